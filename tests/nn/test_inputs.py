"""Token inputs: rounded sinusoids, dropout, frozen tokens and tokens outside the vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from crossattn.nn.inputs import InputConfig, TokenInput
from tests.conftest import on_eight_devices

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
    own = entrance(dropout_rate=0.5, config=InputConfig(dropout_rate=0.0))
    np.testing.assert_array_equal(own(tokens, key=jax.random.key(0)), whole)


def test_a_frozen_token_learns_nothing_where_it_is_looked_up():
    layer = entrance(config=InputConfig(frozen_id=2))
    tokens = jnp.array([[1, 2, 2], [3, 1, 2]])
    np.testing.assert_array_equal(layer(tokens), entrance()(tokens))

    def total(layer):
        return jnp.sum(layer(tokens))

    rows = nnx.grad(total)(layer)
    learnt = np.abs(np.asarray(rows.embedding.table[...])).sum(axis=1) > 0
    assert learnt.tolist() == [False, True, False, True, False, False, False]


@pytest.mark.parametrize("positions", ["none", "sinusoidal", "rope"])
def test_a_text_of_any_length_is_embedded_where_positions_have_no_end(positions):
    layer = entrance(positions=positions, max_length=None)
    assert layer.longest is None
    found = layer(jnp.ones((LENGTH + 1,), int))
    np.testing.assert_array_equal(
        found, entrance(positions=positions)(jnp.ones((LENGTH + 1,), int))
    )


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (dict(positions="learned"), "learnt positions"),
        (
            dict(positions="sinusoidal", config=InputConfig(sinusoid_dtype="float16")),
            "a table of sinusoids in float16",
        ),
    ],
)
def test_positions_of_a_table_want_their_number(options, what):
    with pytest.raises(ValueError, match=f"max_length is None; {what} want their number"):
        entrance(max_length=None, **options)


@pytest.mark.parametrize("wrong", [V, -1])
def test_a_token_beyond_the_vocabulary_is_refused_where_it_is_known_and_nan_where_not(wrong):
    layer = entrance(config=InputConfig(token_types=2))
    tokens = jnp.array([[1, wrong, 2]])
    with pytest.raises(ValueError, match=f"tokens has the id {wrong}; expected 0 to 6"):
        layer(tokens)
    with pytest.raises(ValueError, match=f"types has the id {wrong}; expected 0 to 1"):
        layer(jnp.ones((1, 3), int), types=tokens)
    found = nnx.jit(lambda layer, tokens: layer(tokens))(layer, tokens)
    assert np.isnan(found).all(-1).tolist() == [[False, True, False]]
    others = tokens == wrong, jnp.zeros((1, 3, D))
    np.testing.assert_array_equal(layer(tokens, others=others)[0, 1], layer.types(jnp.array(0)))


ON_A_MESH = """
import jax, numpy as np, crossattn as xa
from crossattn.train.sharding import MeshConfig, make_mesh, params_sharding
build = lambda rngs: xa.nn.Embedding(8, 4, rngs=rngs)
params, axes = xa.init(build, jax.random.key(0)), xa.functional.logical_axes(build)
for sizes in (dict(tensor=8), dict(data=2, fsdp=4), dict(data=2, fsdp=2, tensor=2)):
    mesh = make_mesh(MeshConfig(**sizes))
    placed = jax.device_put(params, params_sharding(params, axes, mesh))
    found = jax.jit(lambda p, ids: xa.apply(build, p, ids))(placed, np.arange(16).reshape(8, 2) - 4)
    assert np.isnan(found).all(-1).ravel().tolist() == [True] * 4 + [False] * 8 + [True] * 4, sizes
"""


@pytest.mark.slow
def test_a_token_beyond_the_vocabulary_is_nan_on_any_mesh_too():
    on_eight_devices("-c", ON_A_MESH)
