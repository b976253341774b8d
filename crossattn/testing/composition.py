"""Holds a callable to the oracle inside jit, grad, vmap, scan, remat, shard_map and on sharded arrays.

Each function here takes the callable and raises ``Broken`` where the transformation changes a number.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from crossattn.ops import masks as mask_algebra
from crossattn.testing import oracle
from crossattn.testing.case import KEY, QUERY, H, K, N, S, T, array
from crossattn.testing.checks import Broken, close, expect

m: Any = mask_algebra  # the terms take numpy arrays too, which its types do not say

LENGTHS = np.array([3, 7])
PADDED = (KEY < LENGTHS[:, None])[:, None, None]


def jit_takes_masks_as_arguments(attend) -> None:
    """Masks are values: compiled once, they may change."""
    q, k, v = _arrays()
    call = jax.jit(lambda q, k, v, mask: attend(q, k, v, mask=mask))
    for lengths in (LENGTHS, LENGTHS - 1):
        allowed = (KEY < lengths[:, None])[:, None, None] & (KEY <= QUERY + 1)
        out = call(q, k, v, m.lengths(jnp.asarray(lengths)) & m.causal(offset=1))
        close(out, _expected(q, k, v, allowed), "output")


def one_compilation_serves_every_offset(attend) -> None:
    """A decoding step is compiled once for all positions."""
    q, k, v = _arrays()
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
    """Is the batch axis."""
    q, k, v = _arrays()
    call = jax.jit(jax.vmap(lambda q, k, v, mask: attend(q, k, v, mask=mask)))
    close(call(q, k, v, _padding()), _expected(q, k, v, PADDED), "output")


def vmap_over_heads(attend) -> None:
    """Is grouped heads."""
    q, k, v = _arrays()

    def one_group(q, k, v):
        return attend(q, k[:, :, None], v[:, :, None], mask=m.causal())

    grouped = q.reshape(2, T, K, N // K, H)
    out = jax.jit(jax.vmap(one_group, in_axes=2, out_axes=2))(grouped, k, v)
    close(out.reshape(q.shape), _expected(q, k, v, KEY <= QUERY), "output")


def vmap_over_queries_alone(attend) -> None:
    """Shares the keys and values."""
    q, k, v = _arrays()
    call: Any = jax.jit(jax.vmap(attend, in_axes=(0, None, None)))
    out = call(jnp.stack([q, 2 * q]), k, v)
    close(out, np.stack([_expected(q, k, v), _expected(2 * q, k, v)]), "output")


def gradients_of_vmap(attend) -> None:
    """Are those of the batch."""
    arrays = _arrays()

    def energy(arrays, mask):
        q, k, v = arrays
        return jnp.sum(jax.vmap(partial(_energy, attend))(q, k, v, mask))

    compare_gradients(jax.jit(jax.grad(energy))(arrays, _padding()), arrays, PADDED)


def vmap_of_gradients(attend) -> None:
    """Gradients of each example, in one call."""
    arrays = _arrays()
    call = jax.jit(jax.vmap(jax.grad(partial(_energy, attend), argnums=(0, 1, 2))))
    compare_gradients(call(*arrays, _padding()), arrays, PADDED)


def scan_over_queries(attend) -> None:
    """One query at a time is all queries at once."""
    q, k, v = _arrays()

    def step(offset, query):
        return offset + 1, attend(query[:, None], k, v, mask=m.causal(offset=offset))[:, 0]

    _, out = jax.lax.scan(step, 0, jnp.moveaxis(q, 1, 0))
    close(jnp.moveaxis(out, 0, 1), _expected(q, k, v, KEY <= QUERY), "output")


def gradients_through_scan_over_layers(attend) -> None:
    """The chain rule, layer by layer in the oracle."""
    x, k, _ = _arrays()
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
    """Computing it twice changes no gradient."""
    arrays = _arrays()
    call = jax.grad(jax.checkpoint(partial(_energy, attend)), argnums=(0, 1, 2))
    compare_gradients(jax.jit(call)(*arrays, m.lengths(LENGTHS)), arrays, PADDED)


def sharded_arrays(attend) -> None:
    """Examples and heads spread over the devices there are: the compiler parts the work."""
    _check_over_devices(lambda mesh, spec: partial(_with_valid, attend))


def shard_map(attend) -> None:
    """Examples and heads spread over the devices there are: each works on its own part."""

    def mapped(mesh, spec):
        call, rows = partial(_with_valid, attend), P("data")
        specs = (spec, spec, spec, rows)
        return jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=spec)

    _check_over_devices(mapped)


def float64_stays_float64(attend) -> None:
    """With jax_enable_x64; inside, float32 is enough."""
    with jax.enable_x64(True):
        arrays = tuple(jnp.asarray(x, jnp.float64) for x in _arrays())
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
    sharded_arrays,
    shard_map,
)


def _arrays(batch=2) -> Any:
    shapes = {"q": (batch, T, N, H), "k": (batch, S, K, H), "v": (batch, S, K, H)}
    return tuple(jnp.asarray(array(name, *shape)) for name, shape in shapes.items())


def _padding():
    return m.key_padding(jnp.asarray(KEY[0] < LENGTHS[:, None]))


def _energy(attend, q, k, v, mask=None):
    """A scalar of the output, with a gradient everywhere."""
    return jnp.sum(jnp.sin(attend(q, k, v, mask=mask)))


def _with_valid(attend, q, k, v, valid):
    return attend(q, k, v, mask=m.key_padding(valid) & m.causal(offset=2))


def _expected(q, k, v, allowed=None) -> Any:
    return oracle.attention(q, k, v, allowed)[0]


def compare_gradients(actual, arrays, allowed) -> None:
    """Of the energy, with respect to q, k and v."""
    expected = oracle.gradients(
        np.cos(_expected(*arrays, allowed=allowed)), *arrays, allowed=allowed
    )
    for name, gradient in zip("qkv", actual, strict=True):
        close(gradient, expected[name], f"gradient of {name}", ulps=8)


def _check_over_devices(placed) -> None:
    """Output and gradients of ``placed(mesh, spec)``, for q, k and v laid out by that spec."""
    count = jax.device_count()
    tensor = 2 if count % 2 == 0 else 1
    mesh = jax.make_mesh((count // tensor, tensor), ("data", "tensor"), (AxisType.Auto,) * 2)
    spec, arrays = P("data", None, "tensor"), _arrays(batch=count)
    valid = KEY < 1 + np.arange(count)[:, None] % S
    call = placed(mesh, spec)
    layout = NamedSharding(mesh, spec)

    def energy(q, k, v):
        out = call(q, k, v, jnp.asarray(valid))
        return jnp.sum(jnp.sin(out)), out

    differentiate = jax.jit(jax.grad(energy, argnums=(0, 1, 2), has_aux=True))
    gradients, out = differentiate(*(jax.device_put(x, layout) for x in arrays))
    allowed = valid[:, None, None] & (KEY <= QUERY + 2)
    close(out, _expected(*arrays, allowed=allowed), "output")
    compare_gradients(gradients, arrays, allowed)
    for name, gradient in zip("qkv", gradients, strict=True):
        held = len(gradient.sharding.device_set)
        if held != count:
            raise Broken(f"the gradient of {name} is on {held} of {count} devices")
