"""Attention over a memory that several devices hold: ``attend`` with keys and values split along S.

Two ways, and ``plan`` takes the one that moves fewer bytes:

* "merge": every device attends all queries to its own keys, and the outputs are merged over the
  devices by log-sum-exp. For few queries and a long memory: cross-attention, decoding;
* "ring": the queries are split too; keys and values travel round the devices (``ring.py``).

Source: the merge, Dao et al. 2023, "Flash-Decoding"; the ring, Liu et al. 2023, "Ring Attention".
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from crossattn.ops import ring, slices
from crossattn.ops.attend import attend
from crossattn.ops.masks import Mask, as_mask, lengths
from crossattn.ops.merge import merge_over
from crossattn.types import AnyArray, Array, Bool, Float, Key

Strategy = Literal["merge", "ring"]


@dataclass(frozen=True)
class Plan:
    """How to attend, and the bytes each device sends in one forward pass either way."""

    strategy: Strategy
    merge_bytes: int
    ring_bytes: int


def plan(q: Any, k: Any, v: Any, devices: int) -> Plan:
    """The strategy that moves fewer bytes; of both, the merge, whose work is even under any mask.

    Merging gathers the queries, then reduces one float32 output, peak and sum for each query and head
    over the devices (a reduction sends what it reduces twice). The ring sends all keys and values but
    the device's own.

    Args:
      q: [*B T N H]; only shapes and dtypes are looked at, as of k [*B S K H] and v [*B S K Hv].
      k: keys.
      v: values.
      devices: how many devices hold a part of the memory each.
    """
    rows = math.prod(q.shape[:-1])
    gathered = rows * q.shape[-1] * jnp.dtype(q.dtype).itemsize
    reduced = 4 * rows * (v.shape[-1] + 2)
    memory = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in (k, v))
    merged = (devices - 1) * (gathered + 2 * reduced) // devices
    sent = (devices - 1) * memory // devices
    return Plan("merge" if merged <= sent else "ring", merged, sent)


def attend_sharded(
    q: Float[AnyArray, "*B T N H"],
    k: Float[AnyArray, "*B S K H"],
    v: Float[AnyArray, "*B S K Hv"],
    mask: Mask | Bool[AnyArray, "..."] | None = None,
    *,
    mesh: Mesh | None,
    axis: str,
    bias: Float[AnyArray, "..."] | None = None,
    scale: float | Float[Array, ""] | None = None,
    softcap: float | Float[Array, ""] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
    backend: str | None = None,
    return_weights: bool = False,
    return_lse: bool = False,
    strategy: Strategy | None = None,
) -> Any:
    """``attend``, with the keys and values split over a mesh axis; the same numbers up to rounding.

    Arguments and results are those of ``attend``: whole arrays, wherever they lie. Masks and biases go by
    place in the whole. Lengths that the devices do not divide are padded. Other mesh axes
    (batch, heads) stay as they are. Gradients are reverse mode under "ring", which recomputes
    each part in the backward pass instead of keeping the whole memory on every device.

    Args:
      mesh: the devices; None, or a size of 1 along ``axis``, is ``attend``.
      axis: the mesh axis along which the memory is split.
      strategy: "merge" leaves the output whole on every device, "ring" leaves it split along T; None is
        ``plan``'s choice.

    Raises:
      ValueError: as ``attend``; or the mesh has no such axis, or there is no such strategy.
      NotImplementedError: dropout or weights are asked for.
    """
    if return_weights:
        raise NotImplementedError("no device of attend_sharded has the weights; use attend.")
    if dropout_rate > 0 or dropout_key is not None:
        raise NotImplementedError(
            "attend_sharded has no dropout: the mask would depend on how many devices there are."
        )
    if strategy not in (None, "merge", "ring"):
        raise ValueError(f'strategy is {strategy!r}; expected "merge", "ring" or None.')
    if mesh is not None and axis not in mesh.shape:
        raise ValueError(f"axis is {axis!r}; expected one of the mesh's, {mesh.axis_names}.")
    numbers = {"scale": scale, "softcap": softcap}
    single = partial(attend, return_lse=return_lse, **numbers)
    if mesh is None or mesh.shape[axis] == 1 or 0 in (q.shape[-3], k.shape[-3]):
        return single(q, k, v, mask, bias=bias, backend=backend)
    # Whatever attend says of wrong arguments, said of the whole before it is cut.
    jax.eval_shape(partial(single, backend="reference"), q, k, v, mask, bias=bias)
    strategy = strategy or plan(q, k, v, mesh.shape[axis]).strategy
    static = {name: x for name, x in numbers.items() if x is None or isinstance(x, (int, float))}
    setting = ring.Setting(axis, mesh.shape[axis], backend, tuple(static.items()))
    traced = {name: x for name, x in numbers.items() if name not in static}
    mask = Mask(()) if mask is None else as_mask(mask, q.ndim)
    out, lse = _over_devices(q, k, v, bias, traced, mask, setting, mesh, strategy)
    return (out, lse) if return_lse else out


@partial(jax.jit, static_argnames=("setting", "mesh", "strategy"))
def _over_devices(q, k, v, bias, numbers, mask, setting, mesh, strategy):
    """Pads to what the devices divide, and gives each its part."""
    T, S, axis, devices = q.shape[-3], k.shape[-3], setting.axis, setting.devices
    q_devices = devices if strategy == "ring" else 1

    def pad(x, q_axis, k_axis):
        return _pad(_pad(x, q_axis, q_devices), k_axis, devices)

    def place(x, q_axis, k_axis):
        spec = [None] * jnp.ndim(x)
        if q_axis is not None and strategy == "ring":
            spec[q_axis] = axis
        if k_axis is not None and strategy == "merge":
            spec[k_axis] = axis  # The ring keeps masks and biases of all keys beside its queries.
        return PartitionSpec(*spec)

    mask = slices.map_arrays(mask, pad)
    if S % devices or T % q_devices:
        mask = mask & lengths(S, T)  # Else a query of the padding could read a NaN.
    if bias is not None:
        bias = pad(bias, *slices.matrix_axes(bias))
    terms, structure = jax.tree.flatten(mask)
    placed = jax.tree.leaves(
        slices.map_arrays(mask, place), is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    queries, memory = place(q, -3, None), PartitionSpec(*[None] * (k.ndim - 3), axis)
    rows = PartitionSpec(*[None] * (q.ndim - 2), *([axis] if strategy == "ring" else []))

    def on_device(q, k, v, bias, numbers, terms):
        mask = jax.tree.unflatten(structure, terms)
        one = ring.attend_ring if strategy == "ring" else _attend_merged
        return one(setting, (q, k, v, bias, numbers), mask)

    out, lse = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(
            queries,
            memory,
            memory,
            None if bias is None else place(bias, *slices.matrix_axes(bias)),
            PartitionSpec(),
            placed,
        ),
        out_specs=(queries, rows),
        axis_names={axis},
        check_vma=False,  # Kernels of other people do not say over which axes their results vary.
    )(pad(q, -3, None), pad(k, None, -3), pad(v, None, -3), bias, numbers, terms)
    return out[..., :T, :, :], lse[..., :T]


def _attend_merged(setting: ring.Setting, operands: ring.Operands, mask: Mask):
    """All queries to this device's keys, then the devices' outputs merged."""
    q, k, v, bias, numbers = operands
    first_key = jax.lax.axis_index(setting.axis) * k.shape[-3]
    local = slices.shift(mask, first_key=first_key)
    out, lse = setting.attend(q, k, v, local, bias=bias, **numbers)
    out, lse = merge_over(out, lse, setting.axis)
    return out.astype(q.dtype), lse


def _pad(x: Any, axis: int | None, devices: int) -> Any:
    """Zeros at the end of an axis, so that the devices divide it."""
    if axis is None or x.shape[axis] % devices == 0:
        return x
    width = [(0, 0)] * x.ndim
    width[axis] = (0, -x.shape[axis] % devices)
    return jnp.pad(x, width)
