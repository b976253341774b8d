"""A part of a mask: the same meaning for some of the queries and some of the keys.

A device or a loop that holds only part of the queries or keys counts them from 0, but a mask speaks of
their places in the whole. ``part`` cuts the arrays of each term and moves its indices, so the result is
a mask of the same terms, and no matrix of T x S is made on the way.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from crossattn.ops.masks import AnyOf, Band, Lengths, Mask, Not, Term
from crossattn.types import Array, Int

Start = int | Int[Array, ""]


def part(
    mask: Mask,
    queries: tuple[Start, int] | None = None,
    keys: tuple[Start, int] | None = None,
) -> Mask:
    """Returns the mask of some queries and some keys, each given as (first, how many); None is all.

    ``part(mask, (t, n), (s, m)).materialize(n, m)`` is ``mask.materialize(T, S)[..., t:t+n, s:s+m]``.
    The first may be traced; the range must lie within the whole.
    """

    def cut(x: Any, q_axis: int | None, k_axis: int | None) -> Any:
        return cut_axis(cut_axis(x, q_axis, queries), k_axis, keys)

    first_query, first_key = (0 if part is None else part[0] for part in (queries, keys))
    return shift(map_arrays(mask, cut), first_query, first_key)


def shift(mask: Mask, first_query: Start = 0, first_key: Start = 0) -> Mask:
    """Returns the mask whose query 0 and key 0 are these of the whole; arrays are left as they are."""
    if all(isinstance(first, int) and first == 0 for first in (first_query, first_key)):
        return mask  # kernels know a band that goes by index as such
    return Mask(tuple(_shift(term, first_query, first_key) for term in mask.terms))


def map_arrays(mask: Mask, change: Callable[[Any, int | None, int | None], Any]) -> Mask:
    """Applies ``change(x, axis of queries or None, axis of keys or None)`` to each array of each term."""
    leaves, structure = jax.tree.flatten(mask)
    places = [places_of(x, *axes) for _, _, x, axes in mask.arrays()]
    changed = [change(x, p.get("T"), p.get("S")) for x, p in zip(leaves, places, strict=True)]
    return structure.unflatten(changed)


def places_of(x: Any, *inner: str) -> dict[str, int]:
    """Returns the axes of queries and keys, given the names of the last axes; shared ones are left out."""
    if len(inner) == 3:
        places = dict(zip("TS", matrix_axes(x), strict=True))
        return {name: at for name, at in places.items() if at is not None}
    return {name: -1 for name in inner}


def cut_axis(x: Any, axis: int | None, part: tuple[Start, int] | None) -> Any:
    """Returns part of an axis, given as (first, how many)."""
    if axis is None or part is None:
        return x
    return jax.lax.dynamic_slice_in_dim(jnp.asarray(x), part[0], part[1], axis % jnp.ndim(x))


def matrix_axes(x: Any) -> tuple[int | None, int | None]:
    """Returns the axes of queries and keys in an array [*#B #N #T #S]; None for one that is shared."""
    return (-2 if x.shape[-2] != 1 else None), (-1 if x.shape[-1] != 1 else None)


def _shift(term: Term, first_query: Start, first_key: Start) -> Term:
    if isinstance(term, Lengths):
        q_lengths = None if term.q_lengths is None else jnp.asarray(term.q_lengths) - first_query
        return Lengths(jnp.asarray(term.k_lengths) - first_key, q_lengths)
    if isinstance(term, Band):
        # Only the distance between the two counts. Positions that are given stay true; those that
        # are counted moved.
        move_q = 0 if term.q_positions is not None else first_query
        move_k = 0 if term.k_positions is not None else first_key
        if term.q_positions is not None:
            return replace(term, q_positions=jnp.asarray(term.q_positions) - move_k)
        offset = 0 if term.offset is None else jnp.asarray(term.offset)
        return replace(term, offset=offset + move_q - move_k)
    if isinstance(term, AnyOf):
        return AnyOf(tuple(shift(mask, first_query, first_key) for mask in term.masks))
    if isinstance(term, Not):
        return Not(shift(term.mask, first_query, first_key))
    return term
