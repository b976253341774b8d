"""The fused loss against the plain one: `cross_entropy` of the logits, differentiated by JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crossattn.train.linear_loss import linear_cross_entropy
from crossattn.train.losses import cross_entropy
from tests.closeness import close

B, T, D, V = 2, 8, 5, 11


@pytest.fixture
def example():
    random = np.random.default_rng(0)
    hidden = random.normal(size=(B, T, D)).astype(np.float32) * 2
    table = random.normal(size=(V, D)).astype(np.float32)
    labels = random.integers(0, V, (B, T)).astype(np.int32)
    weights = random.choice([0.0, 1.0, 0.5], (B, T)).astype(np.float32)
    return tuple(map(jnp.asarray, (hidden, table, labels, weights)))


def fused(example, loss=linear_cross_entropy, **options):
    """((loss, sums), gradients of hidden, table and, where they are not counts, weights)"""
    floating = [i for i, x in enumerate(example) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jax.value_and_grad(loss, argnums=floating, has_aux=True)(*example, **options)


def plain(example, **options):
    def loss(hidden, table, labels, weights, **options):
        logits = jnp.einsum("btd,vd->btv", hidden, table, precision="highest")
        return cross_entropy(logits, labels, weights, **options)

    return fused(example, loss, **options)


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.3, 0.1)])
def test_loss_sums_and_gradients_are_those_of_the_plain_loss(example, smoothing, z_loss, chunks):
    options = {"label_smoothing": smoothing, "z_loss": z_loss}
    (loss, sums), gradients = fused(example, **options, chunks=chunks)
    (expected, expected_sums), expected_gradients = plain(example, **options)
    assert sums.keys() == expected_sums.keys()
    close((loss, sums), (expected, expected_sums))
    close(gradients, expected_gradients)


@pytest.mark.parametrize("dtype", [np.int32, np.bool_])
def test_weights_may_be_segments_or_a_mask(example, dtype):
    *others, weights = example
    given = (*others, jnp.asarray(np.asarray(weights) != 0, dtype))
    as_floats = (*others, (weights != 0).astype(jnp.float32))
    expected, gradients = plain(as_floats)
    close(fused(given), (expected, gradients[:2]))


@pytest.mark.parametrize("padded", [1e4, np.nan])
@pytest.mark.parametrize("chunks", [1, 4])
def test_padding_reaches_neither_the_loss_nor_the_gradient(example, chunks, padded):
    hidden, table, labels, weights = example
    padding = weights == 0
    assert padding.any() and not padding.all()
    poisoned = jnp.where(padding[..., None], padded, hidden)
    poisoned = (poisoned, table, jnp.where(padding, 0, labels), weights)
    expected, found = fused(example, chunks=chunks), fused(poisoned, chunks=chunks)
    if np.isnan(padded):  # which a sum over all tokens, the table's gradient, cannot hide
        expected, found = ((loss, (grads[0], grads[2])) for loss, grads in (expected, found))
    close(found, expected)
    assert not np.asarray(found[1][0])[np.asarray(padding)].any()


def test_a_batch_of_padding_alone_costs_nothing(example):
    *others, weights = example
    (loss, sums), gradients = fused((*others, jnp.zeros_like(weights)), z_loss=0.1)
    assert float(loss) == 0.0 and float(sums["weight"]) == 0.0
    assert not any(np.asarray(g).any() for g in gradients)


def test_the_sums_carry_no_gradient(example):
    hidden, table, labels, weights = example

    def reported(hidden, table):
        return linear_cross_entropy(hidden, table, labels, weights)[1]["nll"]

    for gradient in jax.grad(reported, argnums=(0, 1))(hidden, table):
        assert not np.asarray(gradient).any()


def test_the_gradient_scales_with_what_the_loss_is_multiplied_by(example):
    hidden, table, labels, weights = example

    def loss(hidden, table, weights):
        return -3.0 * linear_cross_entropy(hidden, table, labels, weights)[0]

    found = jax.grad(loss, argnums=(0, 1, 2))(hidden, table, weights)
    expected = jax.tree.map(lambda g: -3.0 * g, plain(example)[1])
    close(found, expected)


@pytest.mark.parametrize("chunks", [1, 2])
def test_bfloat16_hidden_keeps_a_float32_table_gradient(example, chunks):
    """Logits are those of rounded vectors, but are never rounded themselves."""
    hidden, table, labels, weights = example
    low = hidden.astype(jnp.bfloat16)
    rounded = table.astype(jnp.bfloat16).astype(jnp.float32)
    expected = plain((low.astype(jnp.float32), rounded, labels, weights), label_smoothing=0.1)
    found = fused((low, table, labels, weights), label_smoothing=0.1, chunks=chunks)
    assert found[0][0].dtype == jnp.float32
    assert [g.dtype for g in found[1]] == [jnp.bfloat16, jnp.float32, jnp.float32]
    close(found[0], expected[0])
    # Each token's share is rounded to half a unit of bfloat16 before it is summed.
    for gradient, wanted in zip(found[1], expected[1], strict=True):
        bound = 6 * 2.0**-7 * np.abs(wanted).max()
        np.testing.assert_allclose(np.asarray(gradient, np.float32), wanted, rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"chunks": 3}, "chunks is 3; expected a divisor of the length, 8"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0; it must be at least 0"),
    ],
)
def test_options_out_of_range_are_refused(example, options, said):
    with pytest.raises(ValueError, match=said):
        linear_cross_entropy(*example, **options)
