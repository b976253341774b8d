"""attend transposed, mapped and over devices, and its dropout; the rest is in ``crossattn.testing``."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn import testing
from crossattn.testing.case import H, K, N, S, T, array
from tests.closeness import close
from tests.compiled_kernel import needs_kernel
from tests.ops.eight import needs_eight_devices


@pytest.fixture(scope="module")
def qkv():
    """q, k and v of the shared shape, with as many values as keys so that identities fit."""
    return tuple(map(jnp.asarray, (array("q", 2, T, N, H), array("k", 2, S, K, H),
                                   array("v", 2, S, K, S))))  # fmt: skip


def energy(q, k, v, mask=None, **options):
    """A scalar of the output, with a gradient everywhere."""
    return jnp.sum(jnp.sin(xa.attend(q, k, v, mask, **options)))


attend = jax.jit(xa.attend)
gradients = jax.jit(jax.grad(energy, argnums=(0, 1, 2)))


def test_gradients_survive_asking_for_weights(qkv):
    def with_weights(*arrays):
        return jnp.sum(jnp.sin(xa.attend(*arrays, return_weights=True)[0]))

    found = jax.jit(jax.grad(with_weights, argnums=(0, 1, 2)))(*qkv)
    close(found, gradients(*qkv))


@pytest.mark.parametrize("mask", [None, xa.masks.causal() & xa.masks.lengths(3)])
def test_it_is_transposed_in_the_values_which_alone_it_is_linear_in(qkv, mask):
    q, k, v = qkv
    read = jax.jit(lambda v: xa.attend(q, k, v, mask))
    out, weights = xa.attend(q, k, v, mask, return_weights=True)
    cotangent = jnp.sin(out)
    expected = jnp.einsum("bkgts,btkgh->bskh", weights.reshape(2, K, -1, T, S),
                          cotangent.reshape(2, T, K, -1, S))  # fmt: skip
    close(jax.linear_transpose(read, v)(cotangent)[0], expected)
    with pytest.raises(NotImplementedError, match="linear in v alone"):
        jax.linear_transpose(lambda k: xa.attend(q, k, v, mask), k)(cotangent)


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_a_mapped_axis_may_be_of_other_arrays_alone(qkv, rate):
    options = {"dropout_rate": rate, "dropout_key": jax.random.key(0)} if rate else {}

    def scaled(scale, q, k, v):
        return scale * jax.grad(energy)(q, k, v, **options)

    found = jax.jit(jax.vmap(scaled, (0, None, None, None)))(jnp.arange(3.0), *qkv)
    one = jax.jit(jax.grad(functools.partial(energy, **options)))(*qkv)
    close(found, jnp.stack([0 * one, one, 2 * one]))


def test_a_backend_without_a_log_sum_exp_reads_a_split_memory_on_explicit_axes():
    (item,) = (i for i in testing.items(promises=["meshes"]) if i.case == "split_memory")
    item.check(functools.partial(xa.attend, backend="jax_nn"))


@needs_eight_devices
@pytest.mark.parametrize("backend", [None, pytest.param("cpu", marks=needs_kernel)])
def test_pmap_of_gradients_gives_those_of_the_reference(backend):
    def gradient(q, backend):
        return jax.grad(lambda q: jnp.sin(xa.attend(q, q, q, backend=backend)).sum())(q)

    rows = jax.random.normal(jax.random.key(0), (8, 1, 4, 2, 8))
    found = jax.pmap(functools.partial(gradient, backend=backend))(rows)
    close(found, gradient(rows, "reference"))


KEY_1, KEY_2 = jax.random.key(1), jax.random.key(2)


def dropped_weights(q, k, rate, key, mask=None):
    """The weights that meet the values, read off by attending to one-hot values: [*B T N S]."""
    one_hot = jnp.broadcast_to(jnp.eye(S)[:, None], (*k.shape[:-1], S))
    return np.asarray(xa.attend(q, k, one_hot, mask, dropout_rate=rate, dropout_key=key))


def test_dropout_is_decided_by_its_key(qkv):
    def drop(key):
        return xa.attend(*qkv, dropout_rate=0.5, dropout_key=key)

    np.testing.assert_array_equal(drop(KEY_1), drop(KEY_1))
    close(jax.jit(drop)(KEY_1), drop(KEY_1))
    assert not np.allclose(drop(KEY_1), drop(KEY_2))


def test_dropped_weights_are_zero_the_others_grow_and_returned_ones_are_those_before(qkv):
    q, k, _ = qkv
    kept = dropped_weights(q, k, 0.0, None)
    found = dropped_weights(q, k, 0.25, KEY_1)
    gone = found == 0
    assert 0.15 < gone.mean() < 0.35
    close(found, np.where(gone, 0, kept / 0.75))
    options = {"dropout_rate": 0.25, "dropout_key": KEY_1, "return_weights": True}
    close(xa.attend(*qkv, **options)[1], np.swapaxes(kept, 1, 2))
    for axis in range(3):
        first, second = np.take(gone, 0, axis), np.take(gone, 1, axis)
        assert (first != second).any(), f"axis {axis}"


def test_dropout_gradients_are_those_of_the_same_dropped_weights(qkv):
    options = {"dropout_rate": 0.5, "dropout_key": KEY_1}
    call = jax.jit(lambda *arrays: energy(*arrays, xa.masks.causal(), **options))
    found = jax.jit(jax.grad(call, argnums=(0, 1, 2)))(*qkv)
    for i, gradient in enumerate(found):
        direction = array(f"direction {i}", *gradient.shape)
        direction = direction / np.linalg.norm(direction)
        ends = []
        for step in (2e-2, -2e-2):
            moved = list(qkv)
            moved[i] = qkv[i] + step * direction
            ends.append(call(*moved))
        slope = (ends[0] - ends[1]) / 4e-2
        np.testing.assert_allclose(slope, np.sum(gradient * direction), rtol=5e-3, atol=5e-3)


def test_dropout_leaves_masked_queries_at_exactly_zero(qkv):
    mask = xa.masks.causal(offset=-2)
    call = functools.partial(energy, dropout_rate=0.5, dropout_key=KEY_1)
    found = jax.jit(jax.grad(call, argnums=(0, 1, 2)))(*qkv, mask)
    assert not np.asarray(found[0])[:, :2].any()
    assert all(np.isfinite(gradient).all() for gradient in found)
    assert not dropped_weights(*qkv[:2], 0.5, KEY_1, mask)[:, :2].any()
