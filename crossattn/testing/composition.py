"""Holds a callable to the oracle inside jit, grad, vmap, scan and remat; over devices, ``meshes``.

Each function here takes the callable and raises ``Broken`` where the transformation changes a number.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossattn.ops import masks as mask_algebra
from crossattn.testing import meshes, oracle
from crossattn.testing.case import KEY, QUERY, H, K, N, T, qkv
from crossattn.testing.checks import check_energy_gradients, close, expect

m: Any = mask_algebra  # the terms take numpy arrays too, which its types do not say

LENGTHS = np.array([3, 7])
PADDED = (KEY < LENGTHS[:, None])[:, None, None]


def jit_takes_masks_as_arguments(attend) -> None:
    """Checks that masks are values: compiled once, they may change."""
    q, k, v = qkv()
    call = jax.jit(lambda q, k, v, mask: attend(q, k, v, mask=mask))
    for lengths in (LENGTHS, LENGTHS - 1):
        allowed = (KEY < lengths[:, None])[:, None, None] & (KEY <= QUERY + 1)
        out = call(q, k, v, m.lengths(jnp.asarray(lengths)) & m.causal(offset=1))
        close(out, _expected(q, k, v, allowed), "output")


def one_compilation_serves_every_offset(attend) -> None:
    """Checks that a decoding step is compiled once for all positions."""
    q, k, v = qkv()
    traces = []

    @jax.jit
    def step(offset):
        traces.append(offset)
        return attend(q, k, v, mask=m.causal(offset=offset))

    for offset in (0, 2, 1):
        expected = _expected(q, k, v, KEY <= QUERY + offset)
        close(step(jnp.int32(offset)), expected, f"output at offset {offset}")
    expect(len(traces) == 1, f"{len(traces)} compilations for 3 offsets")


def vmap_over_examples(attend) -> None:
    """Checks that a mapped axis is the batch axis."""
    q, k, v = qkv()
    call = jax.jit(jax.vmap(lambda q, k, v, mask: attend(q, k, v, mask=mask)))
    close(call(q, k, v, _padding()), _expected(q, k, v, PADDED), "output")


def vmap_over_heads(attend) -> None:
    """Checks that a mapped axis of key heads is grouped heads."""
    q, k, v = qkv()

    def one_group(q, k, v):
        return attend(q, k[:, :, None], v[:, :, None], mask=m.causal())

    grouped = q.reshape(2, T, K, N // K, H)
    out = jax.jit(jax.vmap(one_group, in_axes=2, out_axes=2))(grouped, k, v)
    close(out.reshape(q.shape), _expected(q, k, v, KEY <= QUERY), "output")


def vmap_over_queries_alone(attend) -> None:
    """Checks that mapped queries share keys and values."""
    q, k, v = qkv()
    call: Any = jax.jit(jax.vmap(attend, in_axes=(0, None, None)))
    out = call(jnp.stack([q, 2 * q]), k, v)
    close(out, np.stack([_expected(q, k, v), _expected(2 * q, k, v)]), "output")


def gradients_of_vmap(attend) -> None:
    """Checks that gradients of vmap are those of the batch."""
    arrays = qkv()

    def energy(arrays, mask):
        q, k, v = arrays
        return jnp.sum(jax.vmap(partial(_energy, attend))(q, k, v, mask))

    check_energy_gradients(jax.jit(jax.grad(energy))(arrays, _padding()), arrays, PADDED)


def vmap_of_gradients(attend) -> None:
    """Checks gradients of each example, in one call."""
    arrays = qkv()
    call = jax.jit(jax.vmap(jax.grad(partial(_energy, attend), argnums=(0, 1, 2))))
    check_energy_gradients(call(*arrays, _padding()), arrays, PADDED)


def scan_over_queries(attend) -> None:
    """Checks that one query at a time is all queries at once."""
    q, k, v = qkv()

    def step(offset, query):
        return offset + 1, attend(query[:, None], k, v, mask=m.causal(offset=offset))[:, 0]

    _, out = jax.lax.scan(step, 0, jnp.moveaxis(q, 1, 0))
    close(jnp.moveaxis(out, 0, 1), _expected(q, k, v, KEY <= QUERY), "output")


def gradients_through_scan_over_layers(attend) -> None:
    """Checks the chain rule, layer by layer in the oracle."""
    x, k, _ = qkv()
    allowed, scales = KEY <= QUERY, (0.5, 2.0)

    def layer(x, scale):
        return attend(scale * x, k, k, mask=m.causal()), None

    def energy(scales):
        return jnp.sum(jax.lax.scan(layer, x, scales)[0] ** 2)

    gradient = jax.jit(jax.grad(energy))(jnp.array(scales))
    first = _expected(scales[0] * x, k, k, allowed)
    second = _expected(scales[1] * first, k, k, allowed)
    d_second = oracle.gradients(2 * second, scales[1] * first, k, k, allowed)["q"]
    d_first = oracle.gradients(scales[1] * d_second, scales[0] * x, k, k, allowed)["q"]
    expected = [np.sum(np.asarray(x) * d_first), np.sum(first * d_second)]
    close(gradient, expected, "gradient", ulps=8)


def remat(attend) -> None:
    """Checks that recomputation changes no gradient."""
    arrays = qkv()
    call = jax.grad(jax.checkpoint(partial(_energy, attend)), argnums=(0, 1, 2))
    check_energy_gradients(jax.jit(call)(*arrays, m.lengths(LENGTHS)), arrays, PADDED)


def float64_stays_float64(attend) -> None:
    """Checks the dtype under jax_enable_x64; inside, float32 is enough."""
    with jax.enable_x64(True):
        arrays = tuple(jnp.asarray(x, jnp.float64) for x in qkv())
        out = jax.jit(lambda q, k, v: attend(q, k, v, mask=m.causal()))(*arrays)
        expect(out.dtype == np.float64, f"the output is {out.dtype} for float64 queries")
        close(out, _expected(*arrays, allowed=KEY <= QUERY), "output")


COMPOSITIONS = (
    jit_takes_masks_as_arguments,
    one_compilation_serves_every_offset,
    vmap_over_examples,
    vmap_over_heads,
    vmap_over_queries_alone,
    gradients_of_vmap,
    vmap_of_gradients,
    scan_over_queries,
    gradients_through_scan_over_layers,
    remat,
    meshes.sharded_arrays,
    meshes.shard_map,
)


def _padding():
    return m.key_padding(jnp.asarray(KEY[0] < LENGTHS[:, None]))


def _energy(attend, q, k, v, mask=None):
    """Returns a scalar of the output, with a gradient everywhere."""
    return jnp.sum(jnp.sin(attend(q, k, v, mask=mask)))


def _expected(q, k, v, allowed=None) -> Any:
    return oracle.attention(q, k, v, allowed)[0]
