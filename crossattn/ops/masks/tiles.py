"""A mask as what attention kernels for TPUs take, which go over blocks of queries and keys.

They compare indices under a band that is known when the program is compiled, and one segment number of each
query and key. The rest of a mask is the first and the last key that each query reads, or else a matrix;
either says which blocks no example reads, and these are left out.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from crossattn.ops.masks import Band, Explicit, KeyPadding, Lengths, Mask, Segments, Term
from crossattn.ops.masks.lowering import one_batch
from crossattn.ops.masks.ranges import ranges
from crossattn.types import Array, Bool, Int

_LONGEST = 2**16  # first and last key go into one number of 32 bits


class Static(NamedTuple):
    """Band by index, -left <= key - query <= right; None: no limit."""

    left: int | None
    right: int | None

    @property
    def mask(self) -> Mask:
        """Mask of the same band."""
        return Mask(() if self == (None, None) else (Band(None, None, None, *self),))

    def leaves_a_key(self, T: int, S: int) -> bool:
        """Returns whether every query may read a key."""
        above = self.right is not None and self.right < 0
        beyond = self.left is not None and T - 1 - self.left > S - 1
        between = self.left is not None and self.right is not None and self.left + self.right < 0
        return not (above or beyond or between)


class Ids(NamedTuple):
    """Segment numbers [*#B T] and [*#B S]: a query reads the keys of its own; None: one segment."""

    q: Int[Array, "*#B T"] | None
    k: Int[Array, "*#B S"] | None


class Tiled(NamedTuple):
    """Conjunction equal to a mask."""

    band: Static
    ids: Ids
    rest: Mask


def tiled(mask: Mask | None, T: int, S: int) -> Tiled:
    """Returns the band and segment numbers that say the most of a mask for ``T`` queries and ``S`` keys."""
    terms = () if mask is None else tuple(map(_simplest, mask.terms))
    bands = [t for t in terms if isinstance(t, Band) and _by_index(t)]
    segments = next((t for t in terms if isinstance(t, Segments)), None)
    numbered = [t for t in terms if isinstance(t, (KeyPadding, Lengths)) or t is segments]
    rest = Mask(tuple(t for t in terms if not any(t is one for one in (*bands, *numbered))))
    return Tiled(_band(bands), _ids(numbered, T, S), rest)


def _simplest(term: Term) -> Term:
    """Returns a matrix of one row, [*B 1 1 S], as padding."""
    if not isinstance(term, Explicit) or term.allowed.shape[-2] > 1:
        return term
    *batch, _, S = term.allowed.shape
    if batch and batch.pop() > 1 or S == 1:
        return term
    return KeyPadding(term.allowed.reshape(*batch, S))


def _by_index(band: Band) -> bool:
    given = band.q_positions is not None or band.k_positions is not None
    return not given and isinstance(band.offset, (int, type(None)))


def _band(bands: list[Band]) -> Static:
    offsets: list[Any] = [band.offset or 0 for band in bands]
    both = list(zip(bands, offsets, strict=True))
    left = [band.left - offset for band, offset in both if band.left is not None]
    right = [band.right + offset for band, offset in both if band.right is not None]
    return Static(min(left, default=None), min(right, default=None))


def _ids(terms: list[Any], T: int, S: int) -> Ids:
    q, k = jnp.ones((T,), jnp.int32), jnp.ones((S,), jnp.int32)
    for term in terms:
        if isinstance(term, Segments):
            # Segment 0 reads nothing: its queries get a number that no key has.
            q = jnp.where(jnp.asarray(term.q_segment_ids) > 0, term.q_segment_ids, -1)
            k = jnp.asarray(term.k_segment_ids)
    for term in terms:
        if isinstance(term, KeyPadding):
            k = jnp.where(jnp.asarray(term.valid), k, 0)
        elif isinstance(term, Lengths):
            k = jnp.where(jnp.arange(S) < jnp.asarray(term.k_lengths)[..., None], k, 0)
            if term.q_lengths is not None:
                q = jnp.where(jnp.arange(T) < jnp.asarray(term.q_lengths)[..., None], q, -1)
    return Ids(q.astype(jnp.int32), k.astype(jnp.int32)) if terms else Ids(None, None)


class Seen(NamedTuple):
    """Mask known only at run time; a row an example, one where all agree.

    Attributes:
      first: [b T], the first key that each query reads; None is key 0.
      last: [b T], one past the last; 0 for queries that read nothing. None where there is a matrix.
      allowed: [b n T S], the matrix; None where there is none.
    """

    first: Int[Array, "b T"] | None
    last: Int[Array, "b T"] | None
    allowed: Bool[Array, "b n T S"] | None

    @property
    def numbers(self) -> Int[Array, "b T"]:
        """First and last key in one number a query, of which ``reads`` makes the mask."""
        assert self.last is not None
        return self.last if self.first is None else self.first * _LONGEST + self.last

    @property
    def reads(self) -> Callable[[Array, Array], Array]:
        """Mask function of numbers and keys by index."""
        return _until if self.first is None else _between


def seen(
    mask: Mask,
    T: int,
    S: int,
    padded: tuple[int, int],
    batch: tuple[int, ...],
) -> Seen:
    """Returns a mask for ``T`` queries and ``S`` keys; padding reads nothing and is not read."""
    limits = ranges(mask, T, S)
    wide = limits.first is not None and padded[1] >= _LONGEST
    if wide or limits.limits or limits.rest.terms:
        allowed = mask.block(jnp.arange(T), jnp.arange(S))
        allowed = allowed.reshape((1,) * (3 - allowed.ndim) + allowed.shape)
        allowed = jnp.broadcast_to(allowed, (*allowed.shape[:-2], T, S))
        return Seen(None, None, one_batch(_pad(allowed, *padded), 3, batch))
    last = jnp.full((1,), S) if limits.last is None else limits.last
    first = None if limits.first is None else jnp.minimum(limits.first, last)
    first, last = (
        None if x is None else jnp.broadcast_to(x, (*x.shape[:-1], T)) for x in (first, last)
    )
    ends = (None if x is None else one_batch(_pad(x, padded[0]), 1, batch) for x in (first, last))
    return Seen(*(None if x is None else x.astype(jnp.int32) for x in ends), None)


def _pad(x: Array, *sizes: int) -> Array:
    """Pads the last axes with zeros up to these sizes."""
    inner = [(0, size - n) for size, n in zip(sizes, x.shape[-len(sizes) :], strict=True)]
    return jnp.pad(x, [(0, 0)] * (x.ndim - len(sizes)) + inner)


def _until(numbers: Array, keys: Array) -> Array:
    return keys < numbers


def _between(numbers: Array, keys: Array) -> Array:
    first = jax.lax.shift_right_logical(numbers, jnp.full_like(numbers, 16))
    return (keys >= first) & (keys < numbers & (_LONGEST - 1))


def visited(seen: Seen, rows: int, columns: int, S: int) -> Bool[Array, "I J"]:
    """Returns which blocks of ``rows`` queries and ``columns`` keys hold a key that any example reads."""
    if seen.allowed is not None:
        b, n, T, S = seen.allowed.shape
        return seen.allowed.reshape(b, n, T // rows, rows, S // columns, columns).any((0, 1, 3, 5))
    assert seen.last is not None
    first = jnp.zeros_like(seen.last) if seen.first is None else seen.first
    first = jnp.where(first < seen.last, first, S)
    lowest = jnp.min(first.reshape(first.shape[0], -1, rows), (0, 2))[:, None]
    highest = jnp.max(seen.last.reshape(first.shape[0], -1, rows), (0, 2))[:, None]
    starts = jnp.arange(0, S, columns)
    return (starts < highest) & (starts + columns > lowest)
