"""What enters a stack: rounded sinusoids, and tokens that learn nothing where they are looked up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from crossattn.nn.inputs import InputConfig, TokenInput

V, D, LENGTH = 7, 5, 200


def entrance(**options):
    options = dict(positions="none", max_length=LENGTH) | options
    return TokenInput(V, D, **options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sinusoids_of_a_table_are_rounded_and_end_with_it(dtype):
    """Against the float64 of each, rounded: not one differs."""
    layer = entrance(positions="sinusoidal", config=InputConfig(scale=0.0, sinusoid_dtype=dtype))
    exact = np.array(
        [
            [np.sin(t / 10000 ** (2 * i / D)) for i in range(3)]
            + [np.cos(t / 10000 ** (2 * i / D)) for i in range(2)]
            for t in range(LENGTH)
        ]
    )
    found = layer(jnp.ones((LENGTH,), int))
    np.testing.assert_array_equal(found, exact.astype(jnp.dtype(dtype)).astype(np.float32))
    assert layer.longest == LENGTH
    with pytest.raises(ValueError, match="table has 200 positions"):
        layer.check(LENGTH + 1)
    assert np.isnan(layer(jnp.ones((1,), int), jnp.array([LENGTH]))).all()


def test_a_key_drops_a_share_of_the_vectors_and_rescales_the_rest():
    layer, tokens = entrance(dropout_rate=0.5), jnp.arange(V)
    found, whole = layer(tokens, key=jax.random.key(0)), layer(tokens)
    kept = np.asarray(found) != 0
    assert 0.2 < kept.mean() < 0.8
    np.testing.assert_array_equal(found, np.where(kept, 2 * whole, 0))


def test_a_frozen_token_learns_nothing_where_it_is_looked_up():
    layer = entrance(config=InputConfig(frozen_id=2))
    tokens = jnp.array([[1, 2, 2], [3, 1, 2]])
    np.testing.assert_array_equal(layer(tokens), entrance()(tokens))

    def total(layer):
        return jnp.sum(layer(tokens))

    rows = nnx.grad(total)(layer)
    learnt = np.abs(np.asarray(rows.embedding.table[...])).sum(axis=1) > 0
    assert learnt.tolist() == [False, True, False, True, False, False, False]
