"""The smallest case that still breaks a promise: what a reader can follow with pencil and paper.

A case shrinks only in ways that leave the question as it was: one that had queries that read nothing, or
NaN that nobody may read, keeps some.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossattn.ops.masks import Mask, slices
from crossattn.testing.case import Case

SPELT_OUT = 16  # entries of an array that a description prints


def smallest(case: Case, breaks: Callable[[Case], bool]) -> Case:
    """Returns the case with everything left out without which ``breaks`` still holds.

    Greedy: no subset of one step breaks either.

    Args:
      case: one that breaks.
      breaks: whether a case does, for the same reason.
    """
    while True:
        for smaller in _smaller(case):
            if _alike(smaller, case) and breaks(smaller):
                case = smaller
                break
        else:
            return case


def describe(case: Case) -> str:
    """Returns sizes, mask and options, and the arrays where they are short."""
    *batch, t, n, h = case.q.shape
    s, k, hv = *case.k.shape[-3:-1], case.v.shape[-1]
    sizes = f"B={'x'.join(map(str, batch)) or 'none'} T={t} S={s} N={n} K={k} H={h} Hv={hv}"
    parts = [sizes, *(f"{name}={value}" for name, value in case.options.items())]
    if case.q.dtype != np.float32:
        parts.append(f"dtype={case.q.dtype}")
    if case.mask is not None:
        parts.append(f"mask={_terms(case.mask)}")
        if case.readable.size <= SPELT_OUT:
            parts.append(f"may read {case.readable.astype(int).tolist()}")
    for name, array in case.arrays.items():
        if array.size <= SPELT_OUT:
            parts.append(f"{name}={np.round(np.float64(array), 3).tolist()}")
    return ", ".join(parts)


def _terms(mask) -> str:
    if not isinstance(mask, Mask):
        return "array"
    return " & ".join(type(term).__name__ for term in mask.terms)


def _alike(smaller: Case, case: Case) -> bool:
    """Returns whether the same promises speak of both."""
    empty = smaller.reads_nothing.any() == case.reads_nothing.any()
    return empty and _spoilt(smaller) == _spoilt(case)


def _spoilt(case: Case) -> bool:
    return not all(np.isfinite(np.float64(x)).all() for x in (case.q, case.k, case.v))


def _smaller(case: Case) -> Iterator[Case]:
    """Yields the case with less of something, the most first."""
    for axis, size in enumerate(case.q.shape[:-3]):
        if size > 1:
            for index in range(size):
                yield _examples(case, axis, index)
    *_, t, n, h = case.q.shape
    s, k = case.k.shape[-3:-1]
    gaps = not isinstance(case.mask, Mask)
    for queries in _parts(t, gaps):
        yield _lengths(case, queries, [*range(s)])
    for keys in _parts(s, gaps):
        yield _lengths(case, [*range(t)], keys)
    if n > 1:
        group = n // k
        for head in range(n):
            yield _heads(case, slice(head, head + 1), slice(head // group, head // group + 1))
        if 1 < k < n:
            yield _heads(case, slice(0, group), slice(0, 1))
    if case.bias is not None:
        yield dataclasses.replace(case, bias=None)
    for name in case.options:
        options = {key: value for key, value in case.options.items() if key != name}
        yield dataclasses.replace(case, options=options)
    if case.mask is not None:
        yield dataclasses.replace(case, mask=None, allowed=None)
    if isinstance(case.mask, Mask):  # an array of the same: any key of it can be left out
        dense = np.array(np.broadcast_to(case.allowed, case.weights_shape))
        yield dataclasses.replace(case, mask=jnp.asarray(dense), allowed=dense)
    for size in _sizes(h):
        yield dataclasses.replace(case, q=case.q[..., :size], k=case.k[..., :size])
    for size in _sizes(case.v.shape[-1]):
        yield dataclasses.replace(case, v=case.v[..., :size])


def _sizes(size: int) -> list[int]:
    return sorted({1, size // 2, size - 1} - {0, size, -1})


def _parts(size: int, gaps: bool) -> Iterator[list[int]]:
    """Yields indices of parts, the shortest first: both ends and, with gaps, all but one."""
    for count in _sizes(size):
        for first in sorted({0, size - count}):
            yield [*range(first, first + count)]
    if gaps:
        yield from ([i for i in range(size) if i != left] for left in range(1, size - 1))


def _examples(case: Case, axis: int, index: int) -> Case:
    """Returns one of a batch axis, which stays as an axis of size 1."""
    part = slice(index, index + 1)
    at = axis - len(case.q.shape[:-3])  # from the last batch axis, as what is broadcast counts
    arrays = {x: _take(getattr(case, x), at - 3, part) for x in ("q", "k", "v", "allowed", "bias")}
    mask = _cut_mask(case.mask, lambda x, inner: _take(x, at - inner, part))
    return dataclasses.replace(case, mask=mask, **arrays)


def _heads(case: Case, heads: slice, key_heads: slice) -> Case:
    q = case.q[..., heads, :]
    k, v = case.k[..., key_heads, :], case.v[..., key_heads, :]
    mask = _cut_mask(case.mask, lambda x, inner: _take(x, -3, heads) if inner == 3 else x)
    allowed, bias = (_take(x, -3, heads) for x in (case.allowed, case.bias))
    return dataclasses.replace(case, q=q, k=k, v=v, mask=mask, allowed=allowed, bias=bias)


def _lengths(case: Case, queries: list[int], keys: list[int]) -> Case:
    mask = case.mask
    if isinstance(mask, Mask):
        ranges = [(part[0], len(part)) if part else (0, 0) for part in (queries, keys)]
        mask = slices.part(mask, *ranges)
    dense = {"allowed": case.allowed, "bias": case.bias, "mask": mask}
    for name, x in dense.items():
        if not isinstance(x, Mask):
            dense[name] = _take(_take(x, -2, queries), -1, keys)
    k, v = (np.take(x, keys, -3) for x in (case.k, case.v))
    return dataclasses.replace(case, q=np.take(case.q, queries, -3), k=k, v=v, **dense)


def _cut_mask(mask: Any, change: Callable[[Any, int], Any]) -> Any:
    """Applies ``change(x, how many axes follow those of the batch)`` to each array of a mask."""
    if not isinstance(mask, Mask):
        return change(mask, 3)
    leaves, structure = jax.tree.flatten(mask)
    inner = [len(axes) for *_, axes in mask.arrays()]
    return structure.unflatten([change(x, n) for x, n in zip(leaves, inner, strict=True)])


def _take(x: Any, axis: int, part: Any) -> Any:
    """Returns part of an axis counted from the last; all where there is no such axis, or it is shared."""
    if x is None or np.ndim(x) < -axis or np.shape(x)[axis] == 1:
        return x
    part = np.array(part, int) if isinstance(part, list) else part
    return x[(..., part, *(slice(None),) * (-axis - 1))]
