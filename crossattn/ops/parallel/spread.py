"""``attend`` where its operands lie: on a mesh each device computes its own part.

What is split by batch, heads or queries stays so. Keys and values that are split along their length are
read where they are and the devices' outputs merged by log-sum-exp; where queries are split over the same
mesh axis, keys and values are gathered (``attend_sharded`` sends them round a ring instead).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from crossattn.ops.backends import AttentionOutput
from crossattn.ops.masks import slices
from crossattn.ops.masks.slices import Form
from crossattn.ops.parallel import placement
from crossattn.ops.parallel.merge import merge_over
from crossattn.ops.parallel.placement import Names, Split, named

# So many kernels of one attention, at most, for queries of as many places.
_MOST_PLACES = 16

Strategy = Literal["merge", "ring"]


@dataclass(frozen=True)
class Plan:
    """How to attend, and the bytes each device sends in one forward pass either way."""

    strategy: Strategy
    merge_bytes: int
    ring_bytes: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tried:
    """Which backend ran and which did not, in a form that comes out of ``jax.jit``."""

    backend: str | None = field(metadata={"static": True})
    skipped: tuple = field(metadata={"static": True})


def attend(
    run: Callable, q, k, v, mask: Any, options: dict, wide: bool = False
) -> tuple[AttentionOutput, Tried]:
    """``run(q, k, v, mask, options, wide)`` of each device's parts; it returns what this does."""
    static = {name: x for name, x in options.items() if not _has_arrays(x)}
    arrays = {name: x for name, x in options.items() if name not in static}
    mesh = placement.attended_on((q, k, v, mask, arrays))
    terms, form = slices.taken_apart(mask)
    setting = _Setting(run, tuple(static.items()), wide)
    return _attend(setting, mesh, form, q, k, v, terms, arrays)


class _Setting(NamedTuple):
    """Of ``attend``: what runs, options that are no arrays, and ``wide``."""

    run: Callable
    static: tuple[tuple[str, Any], ...]
    wide: bool


@partial(jax.jit, static_argnums=(0, 1, 2))
def _attend(setting: _Setting, mesh: Any, form: Form, q, k, v, terms, arrays: dict):
    names, split = _names(q, k, v), split_of(mesh, q, k, v)
    operands = (q, k, v, (form, terms), arrays)
    call = partial(_call, setting, split, operands, names)
    # Which weights are dropped goes by their place in the whole.
    if split.nested or "dropout_key" in arrays:
        return call(whole=True)
    try:
        return call()
    except NotImplementedError:
        if "S" not in split.axes:
            raise
    # Without a log-sum-exp, or for weights, all keys must be in one place.
    return _call(setting, split.without("S"), operands, names)


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


def split_of(mesh: Any, q, k, v) -> Split:
    """Which axes of the mesh split batch, heads, queries and keys.

    Where the table would have queries and keys split over the same devices, that which sends less is:
    queries, whose devices gather the keys, or keys, whose devices merge what they found.
    """
    split = Split.of(mesh, tuple(zip((q, k, v), _names(q, k, v), strict=True)))
    axes = split.axes.get("T", ())
    ruled = bool(axes) and set(axes) <= set(split.automatic)
    if ruled and k.shape[-3] % split.parts("T") == 0:
        if plan(q, k, v, split.parts("T")).strategy == "merge":
            others = {name: own for name, own in split.axes.items() if name != "T"}
            return Split(split.mesh, others | {"S": axes}, split.automatic)
    return split


def _names(q, k, v) -> tuple[Names, Names, Names]:
    return named(q, "T", "N", None), named(k, "S", "N", None), named(v, "S", "N", None)


def _has_arrays(x: Any) -> bool:
    return any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(x))


def heads_of(split: Split, q, k, v) -> tuple[Split, Any, Any]:
    """Keys and values of which each device has the heads that its query heads read."""
    parts, K = split.parts("N"), k.shape[-2]
    if K in (1, q.shape[-2]) or K % parts == 0:
        return split, k, v
    if parts % K:
        return split.without("N"), k, v
    each = split.without("N")
    whole = (each.put(x, named(x, "S", "N", None)) for x in (k, v))
    k, v = (jnp.repeat(x, parts // K, axis=-2) for x in whole)
    return split, k, v


def _call(setting: _Setting, split: Split, operands: tuple, names: tuple, whole: bool = False):
    run, static, wide = setting.run, dict(setting.static), setting.wide
    q, k, v, (form, terms), arrays = operands
    split, k, v = heads_of(split, q, k, v)
    rows = *names[0][:-3], "N", "T"
    out = AttentionOutput(
        names[0],
        Names((*rows, None)) if static["return_weights"] else None,
        Names(rows) if static["return_lse"] else None,
        (Names(rows), Names(rows)) if static.get("return_rows") and "S" not in split.axes else None,
    )
    tried: list[Tried] = []
    if whole:

        def everything(given: Any) -> AttentionOutput:
            output, said = run(*given[:3], form.mask(given[3]), static | given[4], wide)
            tried.append(said)
            return output

        output = split.without("S").run_whole(everything, (q, k, v, terms, arrays), out)
        return output, tried[0]

    places = [named(x, *inner) for x, inner in zip(terms, form.inner, strict=True)]
    places_of = {"bias": lambda x: named(x, "N", "T", "S"), "known": lambda x: known}
    known = names[0], Names(rows), Names(rows)
    others = {n: places_of.get(n, lambda x: Names())(x) for n, x in arrays.items()}
    merged = split.axes.get("S")
    if merged and static["return_weights"]:
        raise NotImplementedError("no device has the weights of all keys")

    def part(q, k, v, terms: list, given: dict) -> AttentionOutput:
        mask, T, S = form.mask(terms), q.shape[-3], k.shape[-3]
        if not merged:
            at = partial(_at, run, (q, k, v, mask, static | given, wide))
            output, said = _by_place(at, split, T) if mask and "T" in split.axes else at(0)
            tried.append(said)
            return output
        if mask is not None:
            mask = slices.shift(mask, split.first("T", T), split.first("S", S))
        # Rounding is for the whole, as is what is known.
        own = dict(return_lse=True, return_rows=False, known=None)
        output, said = run(q, k, v, mask, static | given | own, True)
        tried.append(said)
        whole, lse = merge_over(output.out, output.lse, merged)
        whole = whole if wide else whole.astype(q.dtype)
        return AttentionOutput(whole, None, lse if static["return_lse"] else None)

    output = split.run(part, (q, k, v, terms, arrays), (*names, places, others), out)
    return output, tried[-1]


def _at(run: Callable, operands: tuple, first: Any) -> tuple[AttentionOutput, Tried]:
    """Queries that stand so far into the whole."""
    q, k, v, mask, *others = operands
    return run(q, k, v, mask if mask is None else slices.shift(mask, first), *others)


def _by_place(at: Callable, split: Split, T: int) -> tuple[AttentionOutput, Tried]:
    """Of several devices' queries, each where its own stand.

    A kernel that goes by index must know the place when it is compiled: then every device has the kernels
    of all places, and runs its own.
    """
    first = split.first("T", T)
    anywhere, known = (jax.eval_shape(partial(at, place))[1] for place in (first, T))
    if anywhere == known or split.parts("T") > _MOST_PLACES:
        return at(first)
    places = [lambda place=place: at(place * T)[0] for place in range(split.parts("T"))]
    return jax.lax.switch(jax.lax.axis_index(split.axes["T"]), places), known
