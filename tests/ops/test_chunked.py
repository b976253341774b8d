"""Attention in blocks: the reference's numbers, dropout included, in memory that grows with length."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn import testing
from crossattn.ops.backends import chunked
from tests.closeness import close

B, T, S, N, K, H = 2, 9, 11, 4, 2, 8
RANDOM = np.random.default_rng(0)
SHAPES = {"q": (B, T, N, H), "k": (B, S, K, H), "v": (B, S, K, 5), "bias": (1, N, T, S)}
ARRAYS = {name: RANDOM.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
SEGMENTS = [np.sort(RANDOM.integers(0, 4, (B, length)), -1) for length in (T, S)]
MASKS = {
    "nothing_masked": None,
    "causal": xa.masks.causal(),
    "causal_offset_lengths": xa.masks.causal(offset=2) & xa.masks.lengths(np.array([5, 11])),
    "window": xa.masks.window(2, 1),
    "segments": xa.masks.segments(*SEGMENTS),
    "matrix_of_a_head": xa.masks.explicit(RANDOM.normal(size=(B, N, T, S)) > 0),
    "padding_and_prefix": xa.masks.key_padding(RANDOM.normal(size=(B, S)) > 0)
    & (xa.masks.causal() | xa.masks.prefix(np.array([3, 4]))),
}
DROPPED = {"dropout_rate": 0.3, "dropout_key": jax.random.key(3)}


def total(backend, mask, options):
    """A scalar of the output and the log-sum-exp, with a gradient everywhere."""

    def call(arrays):
        out, lse = xa.attend(mask=mask, backend=backend, return_lse=True, **arrays, **options)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isfinite(lse), jnp.cos(lse), 0))

    return call


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", MASKS)
def test_many_blocks_are_the_reference(small_blocks, name):
    options = DROPPED if name in ("nothing_masked", "causal_offset_lengths") else {}
    arrays = {**ARRAYS, "softcap": jnp.float32(2.0), "scale": jnp.float32(0.4)}
    found, expected = (
        jax.jit(jax.value_and_grad(total(backend, MASKS[name], options)))(arrays)
        for backend in ("chunked", "reference")
    )
    close(found, expected)


@pytest.mark.parametrize("shape", [(1, N, 1, 1), (B, 1, 1, S), (1, 1, T, 1)])
def test_the_gradient_of_a_bias_is_summed_over_what_shares_it(small_blocks, shape):
    arrays = {**ARRAYS, "bias": np.resize(ARRAYS["bias"], shape)}
    found, expected = (
        jax.jit(jax.grad(total(backend, None, {})))(arrays) for backend in ("chunked", "reference")
    )
    close(found, expected)


@pytest.mark.parametrize(
    "name",
    [
        "every_logit_far_below_zero",
        "bias_of_a_hundred_thousand",
        "some_rows_read_nothing",
        "nan_in_future_v",
        "nan_in_padding_with_bias_and_softcap",
        "two_batch_axes_padded",
        "bfloat16_causal_with_bias",
        "causal_by_positions",
    ],
)
def test_many_blocks_keep_the_promises(small_blocks, name):
    testing.check(functools.partial(xa.attend, backend="chunked"), testing.cases()[name])


@pytest.mark.parametrize(("T", "S"), [(2, 40), (40, 2)])
def test_lengths_may_be_very_different(small_blocks, T, S):
    arrays = {
        name: np.resize(ARRAYS[name], (1, n, 2, 4))
        for name, n in zip("qkv", (T, S, S), strict=True)
    }
    mask = xa.masks.window(5, 3, offset=S - T)
    found, expected = (
        jax.jit(jax.value_and_grad(total(backend, mask, {})))(arrays)
        for backend in ("chunked", "reference")
    )
    close(found, expected)


def test_second_derivatives_are_the_references(small_blocks):
    def second(backend):
        first = jax.grad(total(backend, MASKS["causal_offset_lengths"], DROPPED))

        def slopes(arrays):
            return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(first(arrays)))

        return jax.jit(jax.grad(slopes))(ARRAYS)

    close(second("chunked"), second("reference"), ulps=1000)


def test_only_an_automatic_choice_asks_whether_a_backend_suits():
    small, large = jnp.zeros((1, 8, 2, 1)), jnp.zeros((1, 1 << 15, 2, 1))
    assert "logits" in chunked.unsuited(small, small)
    assert chunked.unsuited(large, large) is None
    assert xa.attend(*(ARRAYS[name] for name in "qkv"), backend="chunked").shape == (B, T, N, 5)


def attended(mask, q, k, v):
    return jnp.sum(xa.attend(q, k, v, mask, backend="chunked") ** 2)


def measured(mask, q, k, v):
    found = xa.attention_stats(q, k, mask)
    return found.entropy.sum() + jnp.sum(found.mass**2)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("loss", "mask"),
    [(attended, None), (attended, xa.masks.causal()), (measured, xa.masks.causal())],
    ids=["full", "causal", "statistics"],
)
def test_memory_grows_with_length_and_not_with_its_square(loss, mask):
    def temporary(length, function):
        x = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
        return jax.jit(function).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    forward = functools.partial(loss, mask)
    for function in (forward, jax.grad(forward, argnums=(0, 1, 2))):
        short, long = (temporary(length, function) for length in (4096, 16384))
        assert long < 5 * short
        assert long < 16384 * 16384 / 4, "a sixteenth of the matrix"
