"""attend under jit, vmap, scan, remat, grad and shard_map, and its dropout."""

import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.testing.case import KEY, QUERY, H, K, N, S, T, array

LENGTHS = np.array([3, 7])
ROOT = pathlib.Path(__file__).parents[2]


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


def close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_jit_takes_masks_as_arguments(qkv):
    mask = xa.masks.lengths(LENGTHS) & xa.masks.causal(offset=1)
    close(attend(*qkv, mask), xa.attend(*qkv, mask))


def test_one_compilation_serves_every_offset(qkv):
    traces = []

    @jax.jit
    def step(offset):
        traces.append(offset)
        return xa.attend(*qkv, xa.masks.causal(offset=offset))

    for offset in (0, 2, -1):
        expected = attend(*qkv, jnp.asarray(KEY <= QUERY + offset)[None, None])
        close(step(jnp.int32(offset)), expected)
    assert len(traces) == 1


def test_vmap_over_examples_is_the_batch(qkv):
    mask = xa.masks.key_padding(KEY[0] < LENGTHS[:, None])
    close(jax.jit(jax.vmap(xa.attend))(*qkv, mask), attend(*qkv, mask))


def test_vmap_over_heads_is_many_heads(qkv):
    q, k, v = qkv

    def one_group(q, k, v):
        return xa.attend(q, k[:, :, None], v[:, :, None], xa.masks.causal())

    grouped = q.reshape(2, T, K, N // K, H)
    found = jax.jit(jax.vmap(one_group, in_axes=2, out_axes=2))(grouped, k, v)
    close(found.reshape(2, T, N, S), attend(q, k, v, xa.masks.causal()))


def test_vmap_over_queries_shares_the_memory(qkv):
    q, k, v = qkv
    found = jax.jit(jax.vmap(xa.attend, in_axes=(0, None, None)))(jnp.stack([q, 2 * q]), k, v)
    close(found, jnp.stack([attend(q, k, v), attend(2 * q, k, v)]))


def test_gradients_of_vmap_are_the_batch_gradients(qkv):
    mask = xa.masks.key_padding(KEY[0] < LENGTHS[:, None])

    def by_vmap(arrays):
        return jnp.sum(jax.vmap(energy)(*arrays, mask))

    close(jax.jit(jax.grad(by_vmap))(qkv), gradients(*qkv, mask))
    close(jax.jit(jax.vmap(jax.grad(energy, argnums=(0, 1, 2))))(*qkv, mask), gradients(*qkv, mask))


def test_scan_over_queries_is_all_queries_at_once(qkv):
    q, k, v = qkv

    def step(offset, query):
        out = xa.attend(query[:, None], k, v, xa.masks.causal(offset=offset))
        return offset + 1, out[:, 0]

    _, found = jax.lax.scan(step, 0, jnp.moveaxis(q, 1, 0))
    close(jnp.moveaxis(found, 0, 1), attend(q, k, v, xa.masks.causal()))


def test_gradients_flow_through_a_scan_over_layers(qkv):
    q, k, _ = qkv

    def layer(x, scale):
        return xa.attend(scale * x, k, k, xa.masks.causal()), None

    def by_scan(scales):
        return jnp.sum(jax.lax.scan(layer, q, scales)[0] ** 2)

    def by_loop(scales):
        return jnp.sum(layer(layer(q, scales[0])[0], scales[1])[0] ** 2)

    scales = jnp.array([0.5, 2.0])
    close(jax.jit(jax.grad(by_scan))(scales), jax.jit(jax.grad(by_loop))(scales))


def test_remat_changes_no_gradient(qkv):
    mask = xa.masks.lengths(LENGTHS)
    found = jax.jit(jax.grad(jax.checkpoint(energy), argnums=(0, 1, 2)))(*qkv, mask)
    close(found, gradients(*qkv, mask))


def test_gradients_survive_asking_for_weights(qkv):
    def with_weights(*arrays):
        return jnp.sum(jnp.sin(xa.attend(*arrays, return_weights=True)[0]))

    found = jax.jit(jax.grad(with_weights, argnums=(0, 1, 2)))(*qkv)
    close(found, gradients(*qkv))


def test_float64_stays_float64():
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(array(name, 1, 3, 2, 4), jnp.float64) for name in "qkv")
        out = jax.jit(xa.attend)(q, k, v, xa.masks.causal())
        assert out.dtype == jnp.float64


SHARDED = """
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import crossattn as xa
random = np.random.default_rng(0)
q, k, v = (random.normal(size=shape).astype(np.float32)
           for shape in [(8, 5, 8, 4), (8, 7, 8, 4), (8, 7, 8, 4)])
valid = np.arange(7) < np.arange(8)[:, None]
mesh = jax.make_mesh((4, 2), ("data", "tensor"), (AxisType.Auto, AxisType.Auto))

def attend(q, k, v, valid):
    return xa.attend(q, k, v, xa.masks.key_padding(valid) & xa.masks.causal(offset=2))

def energy(attend):
    return jax.jit(jax.value_and_grad(lambda *a: (attend(*a, valid) ** 2).sum(), argnums=(0, 1, 2)))

heads, rows = P("data", None, "tensor"), P("data")
mapped = jax.shard_map(attend, mesh=mesh, in_specs=(heads, heads, heads, rows), out_specs=heads)
value, grads = energy(attend)(q, k, v)
for name, other in {
    "shard_map": energy(mapped)(q, k, v),
    "sharded": energy(attend)(*(jax.device_put(x, NamedSharding(mesh, heads)) for x in (q, k, v))),
}.items():
    np.testing.assert_allclose(other[0], value, rtol=1e-5, err_msg=name)
    for expected, found in zip(grads, other[1], strict=True):
        assert len(found.sharding.device_set) == 8, name
        np.testing.assert_allclose(found, expected, atol=1e-5, err_msg=name)
print("equal on", jax.device_count())
"""


def test_shards_over_examples_and_heads_give_the_same_numbers():
    flags = "--xla_force_host_platform_device_count=8"
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", SHARDED], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "equal on 8\n"


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


def test_dropout_of_rate_zero_is_no_dropout(qkv):
    plain = xa.attend(*qkv)
    np.testing.assert_array_equal(xa.attend(*qkv, dropout_rate=0.0, dropout_key=KEY_1), plain)
    np.testing.assert_array_equal(xa.attend(*qkv, dropout_rate=0.0), plain)


def test_dropped_weights_are_zero_and_the_others_grow(qkv):
    q, k, _ = qkv
    kept = dropped_weights(q, k, 0.0, None)
    found = dropped_weights(q, k, 0.25, KEY_1)
    gone = found == 0
    assert 0.15 < gone.mean() < 0.35
    np.testing.assert_allclose(found, np.where(gone, 0, kept / 0.75), rtol=1e-5)


def test_dropout_differs_between_examples_heads_and_queries(qkv):
    gone = dropped_weights(*qkv[:2], 0.5, KEY_1) == 0
    for axis in range(3):
        first, second = np.take(gone, 0, axis), np.take(gone, 1, axis)
        assert (first != second).any(), f"axis {axis}"


def test_dropout_keeps_the_mean(qkv):
    def drop(key):
        return xa.attend(*qkv, dropout_rate=0.5, dropout_key=key)

    mean = jnp.mean(jax.jit(jax.vmap(drop))(jax.random.split(KEY_1, 4000)), axis=0)
    np.testing.assert_allclose(mean, xa.attend(*qkv), atol=0.1)


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


def test_dropout_without_a_key_is_refused(qkv):
    with pytest.raises(ValueError, match=r"dropout_key"):
        xa.attend(*qkv, dropout_rate=0.1)
