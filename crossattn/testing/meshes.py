"""Holds a callable to the oracle on meshes with Auto, Explicit (JAX's default) and manual axes, and both.

Each function here takes the callable and raises ``Broken`` where a mesh changes a number. They take the
devices there are; one is enough.
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
from crossattn.testing.case import H, K, N, S, array, qkv
from crossattn.testing.checks import check_energy_gradients, close, expect

m: Any = mask_algebra  # the terms take numpy arrays too, which its types do not say

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
BY_HEAD = P("data", None, "tensor")
SPECS = BY_HEAD, BY_HEAD, BY_HEAD, P("data")


def sharded_arrays(attend) -> None:
    """Checks examples and heads spread over all devices by the compiler."""
    _check(attend, (AUTO, AUTO))


def shard_map(attend) -> None:
    """Checks examples and heads spread over all devices, each of which works on its own part."""
    options: Any = dict(mesh=_mesh((AUTO, AUTO)), in_specs=SPECS, out_specs=BY_HEAD)
    _check(attend, (AUTO, AUTO), wrap=lambda call: jax.shard_map(call, **options))


def explicit_axes(attend) -> None:
    """Checks examples and heads on Explicit axes."""
    _check(attend, (EXPLICIT, EXPLICIT))


def explicit_and_auto_axes(attend) -> None:
    """Checks examples over one kind of axis, heads over the other."""
    _check(attend, (EXPLICIT, AUTO))


def explicit_and_manual_axes(attend) -> None:
    """Checks that heads are still split inside ``shard_map`` over examples."""

    def each(mesh, differentiate):
        # The gradient is taken inside: JAX has none through a shard_map that leaves axes Explicit.
        options: Any = dict(mesh=mesh, axis_names={"data"}, out_specs=P("data"))
        return jax.shard_map(differentiate, **options)

    _check(attend, (EXPLICIT, EXPLICIT), each)


def split_queries(attend) -> None:
    """Checks that each device knows the place of its queries."""
    _check_lengths(attend, P(None, "length"), P())


def split_memory(attend) -> None:
    """Checks that each device reads its keys, or all of them."""
    _check_lengths(attend, P(), P(None, "length"))


def split_by_one_axis(attend) -> None:
    """Checks queries and keys over the same devices, which no product of the two can be."""
    _check_lengths(attend, P(None, "length"), P(None, "length"))


def nothing_is_gathered(attend) -> None:
    """Checks that arrays split by examples and heads are not sent to other devices."""
    mesh, arrays = _mesh((EXPLICIT, EXPLICIT)), qkv(jax.device_count())
    placed = [jax.device_put(x, NamedSharding(mesh, BY_HEAD)) for x in arrays]
    call = jax.jit(lambda q, k, v: attend(q, k, v, mask=m.causal(offset=2)))
    program = call.lower(*placed).compile().as_text() or ""
    for sent in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
        found = f" {sent}(" in program or f" {sent}-start(" in program
        expect(not found, f"the compiled program has {sent}")


MESHES = (
    explicit_axes,
    explicit_and_auto_axes,
    explicit_and_manual_axes,
    split_queries,
    split_memory,
    split_by_one_axis,
    nothing_is_gathered,
)


def _mesh(kinds: tuple[AxisType, AxisType]) -> Any:
    count = jax.device_count()
    tensor = 2 if count % 2 == 0 else 1
    return jax.make_mesh((count // tensor, tensor), ("data", "tensor"), kinds)


def _same(function):
    return function


def _check(attend, kinds, each=lambda mesh, differentiate: differentiate, wrap=_same) -> None:
    """Checks output and gradients for as many examples as devices, each of a length of its own."""
    count, mesh = jax.device_count(), _mesh(kinds)
    arrays, valid = qkv(count), np.arange(S) < 1 + np.arange(count)[:, None] % S
    _compare(attend, mesh, SPECS, arrays, valid, partial(each, mesh), wrap)


def _check_lengths(attend, queries, keys) -> None:
    """Checks the same for lengths that the devices divide."""
    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("length",), (EXPLICIT,))
    shapes = {"q": (2, 2 * count, N, H), "k": (2, count, K, H), "v": (2, count, K, H)}
    arrays = tuple(array(name, *shape) for name, shape in shapes.items())
    valid = np.arange(count) < np.array([[count], [(count + 1) // 2]])
    _compare(attend, mesh, (queries, keys, keys, P()), arrays, valid)


def _compare(attend, mesh, specs, arrays, valid, each=_same, wrap=_same) -> None:
    @wrap
    def call(q, k, v, valid):
        return attend(q, k, v, mask=m.key_padding(valid) & m.causal(offset=2))

    def energy(q, k, v, valid):
        out = call(q, k, v, valid)
        return jnp.sum(jnp.sin(out)), out

    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip((*arrays, valid), specs, strict=True)
    ]
    differentiate = jax.grad(energy, argnums=(0, 1, 2), has_aux=True)
    gradients, out = jax.jit(each(differentiate))(*placed)
    queries, keys = arrays[0].shape[1], arrays[1].shape[1]
    allowed = valid[:, None, None] & (np.arange(keys) <= np.arange(queries)[:, None] + 2)
    close(out, oracle.attention(*arrays, allowed=allowed)[0], "output")
    check_energy_gradients(gradients, arrays, allowed)
    for x, gradient in zip(placed, gradients, strict=False):
        held, wanted = len(gradient.sharding.device_set), len(x.sharding.device_set)
        expect(held == wanted, f"a gradient is on {held} of {wanted} devices")
