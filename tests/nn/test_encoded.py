"""Concatenated outputs of encoders are read as one row of both would be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.nn import Encoded, MultiHeadAttention
from tests import numpy_model as oracle

RNG = np.random.default_rng(0)
FIRST, SECOND = (jnp.asarray(RNG.normal(size=(2, n, 8)).astype(np.float32)) for n in (3, 4))
VALID = jnp.asarray(np.arange(4) < np.array([[4], [2]]))


def test_two_side_by_side_are_read_as_one():
    build = lambda rngs: MultiHeadAttention(8, 2, rngs=rngs)  # noqa: E731
    params = oracle.random_params(build)
    attention = xa.functional.bind(build, params)

    @jax.jit
    def call(first, second):
        both = Encoded.concat(first, second)
        return attention(FIRST, attention.memory(both.vectors, valid=both.valid))

    found = call(Encoded(FIRST), Encoded(SECOND, VALID))
    memory = np.concatenate([FIRST, SECOND], axis=1)
    allowed = np.concatenate([np.ones((2, 3), bool), VALID], axis=1)[:, None]
    expected, _ = oracle.attention(params, np.asarray(FIRST), memory, allowed)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("given", [dict(valid=VALID), dict(positions=jnp.arange(4) + VALID * 1)])
@pytest.mark.parametrize("compiled", [False, True])
def test_parts_on_a_mesh_with_explicit_axes_are_what_they_are_without_one(given, compiled):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    place = jax.NamedSharding(mesh, jax.P("data"))
    keys = jnp.asarray(RNG.normal(size=(2, 4, 2, 3)), jnp.float32)

    def encoded(first, second, given):
        return Encoded.concat(Encoded(second, **given), Encoded(first))

    def memory(keys, given):
        return xa.Memory.concat(xa.Memory(keys, keys, **given), xa.Memory(keys, keys))

    expected = encoded(FIRST, SECOND, given), memory(keys, given)
    with jax.set_mesh(mesh):
        first, second, there, own = jax.device_put((FIRST, SECOND, keys, given), place)
        made = [jax.jit(call) if compiled else call for call in (encoded, memory)]
        found = made[0](first, second, own), made[1](there, own)
    assert all(x.sharding.spec[0] == "data" for x in jax.tree.leaves(found))
    for mine, one in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(mine, one)


def test_parts_without_positions_stand_where_they_land():
    both = Encoded.concat(Encoded(FIRST), Encoded(SECOND, positions=jnp.arange(10, 14)))
    np.testing.assert_array_equal(both.positions, [[0, 1, 2, 10, 11, 12, 13]] * 2)
    bare = Encoded.concat(Encoded(FIRST), Encoded(SECOND))
    assert bare.positions is None and bare.valid is None


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="got no part"):
        Encoded.concat()
    with pytest.raises(ValueError, match="equal size, the last axis: project them to one"):
        Encoded.concat(Encoded(FIRST), Encoded(SECOND[..., :5]))
