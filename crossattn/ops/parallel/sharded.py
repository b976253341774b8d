"""Attention over a memory that several devices hold: ``attend`` with keys and values split along S.

Two ways, and ``plan`` takes the one that moves fewer bytes:

* "merge": every device attends all queries to its own keys, and the outputs are merged over the
  devices by log-sum-exp. For few queries and a long memory: cross-attention, decoding;
* "ring": the queries are split too; keys and values travel round the devices (``ring.py``).

Source: the merge, Dao et al. 2023, "Flash-Decoding"; the ring, Liu et al. 2023, "Ring Attention".
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from crossattn.ops.attend import attend
from crossattn.ops.call import Names, named
from crossattn.ops.masks import Mask, as_mask, lengths, slices
from crossattn.ops.parallel import placement, ring
from crossattn.ops.parallel.merge import merge_over
from crossattn.ops.parallel.placement import Split
from crossattn.ops.parallel.spread import Plan, Strategy, heads_of, names_of, plan
from crossattn.ops.promotion import as_written
from crossattn.types import AnyArray, Array, Bool, Float, Key


@as_written
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
    """Computes ``attend`` with keys and values split over a mesh axis; equal up to rounding.

    Arguments and results are those of ``attend``: whole arrays, wherever they lie. Masks and biases go by
    place in the whole. Lengths that the devices do not divide are padded. Other mesh axes
    (batch, heads) stay as they are. Under "ring" the backward pass recomputes each part instead of
    keeping the whole memory on every device.

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
    mesh = None if mesh is None else placement.in_force(mesh)
    if mesh is not None and axis in mesh.manual_axes:
        raise ValueError(
            f"axis {axis!r} is manual here: inside jax.shard_map over it each array is one device's part, "
            "but attend_sharded takes whole ones; call it outside, or attend to the part and merge_over."
        )
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
    ring_ = strategy == "ring"
    multiples = {"T": devices if ring_ else 1, "S": devices}
    names = names_of(q, k, v)
    split = Split.of(mesh, (q, k, v), names).over(axis, *"TS" if ring_ else "S")
    split, k, v = heads_of(split, q, k, v)

    def pad(x, *inner):
        """Pads with zeros where queries and keys end; returns the names of the axes too."""
        names = named(x, *inner)
        for name, at in slices.places_of(x, *inner).items():
            x = _pad(x, at, multiples[name], split, names)
        # The ring keeps masks and biases of all keys beside its queries.
        return x, Names(None if ring_ and name == "S" else name for name in names)

    leaves, structure = jax.tree.flatten(mask)
    axes = [axes for *_, axes in mask.arrays()]
    padded = [pad(x, *inner) for x, inner in zip(leaves, axes, strict=True)]
    cut = bool(S % devices or T % multiples["T"])
    bias, bias_names = (None, None) if bias is None else pad(bias, "N", "T", "S")

    def on_device(q, k, v, bias, numbers, leaves):
        mask = jax.tree.unflatten(structure, leaves)
        if cut:
            mask = mask & lengths(S, T)  # Else a query of the padding could read a NaN.
        one = ring.attend_ring if ring_ else _attend_merged
        return one(setting, (q, k, v, bias, numbers), mask)

    operands = tuple(
        _pad(x, -3, multiples[n[-3]], split, n) for x, n in zip((q, k, v), names, strict=True)
    )
    places = (*names, bias_names, {name: Names() for name in numbers}, [n for _, n in padded])
    rows = Names((*names[0][:-3], "N", "T"))
    out, lse = split.run(
        on_device, (*operands, bias, numbers, [x for x, _ in padded]), places, (names[0], rows)
    )
    if T % multiples["T"]:
        out, lse = split.without("T").put(out, names[0]), split.without("T").put(lse, rows)
    return out[..., :T, :, :], lse[..., :T]


def _attend_merged(setting: ring.Setting, operands: ring.Operands, mask: Mask):
    """Attends from all queries to this device's keys, and merges the devices' outputs."""
    q, k, v, bias, numbers = operands
    first_key = jax.lax.axis_index(setting.axis) * k.shape[-3]
    local = slices.shift(mask, first_key=first_key)
    out, lse = setting.attend(q, k, v, local, bias=bias, **numbers)
    out, lse = merge_over(out, lse, setting.axis)
    return out.astype(q.dtype), lse


def _pad(x: Any, axis: int, multiple: int, split: Split, names: Names) -> Any:
    """Appends zeros to an axis, so that the devices divide it."""
    if x.shape[axis] % multiple == 0:
        return x
    width = [(0, 0)] * x.ndim
    width[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(split.without("T", "S").put(x, names), width)


__all__ = ["Plan", "attend_sharded", "plan"]
