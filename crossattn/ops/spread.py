"""``attend`` where its operands lie: on a mesh each device computes its own part.

What is split by batch, heads or queries stays so. Keys and values that are split along their length are
read where they are and the devices' outputs merged by log-sum-exp; where queries are split over the same
mesh axis, keys and values are gathered (``attend_sharded`` sends them round a ring instead).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from crossattn.ops import placement, slices
from crossattn.ops.backends import Attended
from crossattn.ops.masks import Mask
from crossattn.ops.merge import merge_over
from crossattn.ops.placement import Names, Split, named


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tried:
    """Which backend ran and which did not, in a form that comes out of ``jax.jit``."""

    backend: str | None = field(metadata={"static": True})
    skipped: tuple = field(metadata={"static": True})


def attend(run: Callable, q, k, v, mask: Mask | None, options: dict) -> tuple[Attended, Tried]:
    """``run(q, k, v, mask, options)`` of each device's parts; it returns what this does."""
    static = {name: x for name, x in options.items() if not _has_arrays(x)}
    arrays = {name: x for name, x in options.items() if name not in static}
    mesh = placement.attended_on((q, k, v, mask, arrays))
    return _attend(run, tuple(static.items()), mesh, q, k, v, mask, arrays)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _attend(run: Callable, static: tuple, mesh: Any, q, k, v, mask: Mask | None, arrays: dict):
    names, split = _names(q, k, v), split_of(mesh, q, k, v)
    call = partial(_call, run, dict(static), split, (q, k, v, mask, arrays), names)
    # Which weights are dropped goes by their place in the whole.
    if split.nested or "dropout_key" in arrays:
        return call(whole=True)
    try:
        return call()
    except NotImplementedError:
        if "S" not in split.axes:
            raise
    # Without a log-sum-exp, or for weights, all keys must be in one place.
    return partial(_call, run, dict(static), split.without("S"), (q, k, v, mask, arrays), names)()


def split_of(mesh: Any, q, k, v) -> Split:
    """Which axes of the mesh split batch, heads, queries and keys."""
    return Split.of(mesh, tuple(zip((q, k, v), _names(q, k, v), strict=True)))


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


def _call(run, static: dict, split: Split, operands: tuple, names: tuple, whole: bool = False):
    q, k, v, mask, arrays = operands
    split, k, v = heads_of(split, q, k, v)
    rows = *names[0][:-3], "N", "T"
    out = Attended(
        names[0],
        Names((*rows, None)) if static["return_weights"] else None,
        Names(rows) if static["return_lse"] else None,
        (Names(rows), Names(rows)) if static.get("return_rows") and "S" not in split.axes else None,
    )
    tried: list[Tried] = []
    if whole:

        def everything(given: Any) -> Attended:
            found, said = run(*given[:4], static | given[4])
            tried.append(said)
            return found

        found = split.without("S").run_whole(everything, (q, k, v, mask, arrays), out)
        return found, tried[0]

    leaves, structure = jax.tree.flatten(mask)
    inner = [] if mask is None else slices.axes_of(mask)
    places = [named(x, *axes) for x, axes in zip(leaves, inner, strict=True)]
    places_of = {"bias": lambda x: named(x, "N", "T", "S"), "known": lambda x: known}
    known = names[0], Names(rows), Names(rows)
    others = {n: places_of.get(n, lambda x: Names())(x) for n, x in arrays.items()}
    merged = split.axes.get("S")
    if merged and static["return_weights"]:
        raise NotImplementedError("no device has the weights of all keys")

    def part(q, k, v, leaves: list, given: dict) -> Attended:
        mask = jax.tree.unflatten(structure, leaves)
        if mask is not None and {"T", "S"} & split.axes.keys():
            first = split.first("T", q.shape[-3]), split.first("S", k.shape[-3])
            mask = slices.shift(mask, *first)
        if not merged:
            found, said = run(q, k, v, mask, static | given)
            tried.append(said)
            return found
        # Rounding is for the whole, as is what is known.
        wide = q.astype(jnp.promote_types(q.dtype, jnp.float32))
        own = dict(return_lse=True, return_rows=False, known=None)
        found, said = run(wide, k, v, mask, static | given | own)
        tried.append(said)
        whole, lse = merge_over(found.out, found.lse, merged)
        return Attended(whole.astype(q.dtype), None, lse if static["return_lse"] else None)

    found = split.run(part, (q, k, v, leaves, arrays), (*names, places, others), out)
    return found, tried[-1]
