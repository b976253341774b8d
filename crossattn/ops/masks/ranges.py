"""A mask as a few numbers for each query and each key, for kernels that never see the matrix.

Most masks say "the keys from here to there" (causal, window, lengths) or "the keys whose number lies
within these limits" (padding, segments, explicit positions). Both take memory linear in length, and
both tell a kernel which blocks hold nothing to read.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from crossattn.ops.integers import HIGHEST, LOWEST, moved
from crossattn.ops.masks import AnyOf, Band, KeyPadding, Lengths, Mask, Segments, Term
from crossattn.types import AnyArray, Array, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Limits:
    """Condition on numbers: a query may read the keys with ``low <= number <= high``."""

    numbers: Int[Array, "*#B S"]
    low: Int[Array, "*#B #T"]
    high: Int[Array, "*#B #T"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ranges:
    """Conjunction equal to a mask.

    Attributes:
      first: [*#B #T], index of the first key a query may read; None is 0.
      last: [*#B #T], one past the last, not more than S; None is S.
      limits: conditions on numbers of the keys.
      rest: what neither can say: explicit matrices, and most alternatives (``|``).
    """

    first: Int[AnyArray, "*#B #T"] | None
    last: Int[AnyArray, "*#B #T"] | None
    limits: tuple[Limits, ...]
    rest: Mask


def ranges(mask: Mask, T: int, S: int) -> Ranges:
    """Returns a mask as ranges for ``T`` queries and ``S`` keys."""
    parts = [_of(term, T, S) for term in mask.terms]
    return functools.reduce(_both, parts, Ranges(None, None, (), Mask(())))


def _of(term: Term, T: int, S: int) -> Ranges:
    if isinstance(term, Band):
        return _of_band(term, T, S)
    if isinstance(term, Lengths):
        return Ranges(None, _of_lengths(term, T, S), (), Mask(()))
    if isinstance(term, KeyPadding):
        one = jnp.ones((1,), jnp.int32)
        limits = Limits(jnp.asarray(term.valid).astype(jnp.int32), one, one)
        return Ranges(None, None, (limits,), Mask(()))
    if isinstance(term, Segments):
        q, k = (jnp.asarray(x).astype(jnp.int32) for x in (term.q_segment_ids, term.k_segment_ids))
        real = q > 0
        limits = Limits(k, jnp.where(real, q, 1), jnp.where(real, q, 0))
        return Ranges(None, None, (limits,), Mask(()))
    if isinstance(term, AnyOf):
        return _of_alternatives(term, T, S)
    return Ranges(None, None, (), Mask((term,)))


def _of_band(band: Band, T: int, S: int) -> Ranges:
    if band.q_positions is not None:
        q = jnp.asarray(band.q_positions).astype(jnp.int32)
    else:
        offset = 0 if band.offset is None else jnp.asarray(band.offset)[..., None]
        q = (jnp.arange(T) + offset).astype(jnp.int32)
    if band.k_positions is None:
        first = None if band.left is None else jnp.clip(moved(q, -band.left), 0, S)
        last = None if band.right is None else jnp.clip(moved(q, band.right), -1, S - 1) + 1
        return Ranges(first, last, (), Mask(()))
    low = jnp.full((1,), LOWEST) if band.left is None else moved(q, -band.left)
    high = jnp.full((1,), HIGHEST) if band.right is None else moved(q, band.right)
    numbers = jnp.asarray(band.k_positions).astype(jnp.int32)
    return Ranges(None, None, (Limits(numbers, low, high),), Mask(()))


def _of_lengths(term: Lengths, T: int, S: int) -> Array:
    last = jnp.clip(jnp.asarray(term.k_lengths)[..., None], 0, S).astype(jnp.int32)
    if term.q_lengths is None:
        return last
    return jnp.where(jnp.arange(T) < jnp.asarray(term.q_lengths)[..., None], last, 0)


def _of_alternatives(term: AnyOf, T: int, S: int) -> Ranges:
    """Joins intervals that all begin at the first key, or all end at the last, to one interval."""
    parts = [ranges(mask, T, S) for mask in term.masks]
    simple = not any(part.limits or part.rest.terms for part in parts)
    if simple and all(part.first is None for part in parts):
        return Ranges(None, _widest(jnp.maximum, [part.last for part in parts]), (), Mask(()))
    if simple and all(part.last is None for part in parts):
        return Ranges(_widest(jnp.minimum, [part.first for part in parts]), None, (), Mask(()))
    return Ranges(None, None, (), Mask((term,)))


def _widest(pick, ends: list[AnyArray | None]) -> AnyArray | None:
    given = [x for x in ends if x is not None]
    return functools.reduce(pick, given) if len(given) == len(ends) else None


def _both(a: Ranges, b: Ranges) -> Ranges:
    return Ranges(
        _narrower(jnp.maximum, a.first, b.first),
        _narrower(jnp.minimum, a.last, b.last),
        a.limits + b.limits,
        a.rest & b.rest,
    )


def _narrower(pick, a: AnyArray | None, b: AnyArray | None) -> AnyArray | None:
    if a is None or b is None:
        return b if a is None else a
    return pick(a, b)
