"""Masks: which query may read which key. True means "may read".

A ``Mask`` is a conjunction of small terms that say *what the mask means* (a band around the diagonal,
a length, equal segments) rather than a matrix of booleans. A kernel can look at the terms and skip
work; ``materialize`` turns any mask into the matrix. Combine masks with ``&``, ``|`` and ``~``.

Array arguments may have leading batch axes ``*B`` and never a heads axis (``explicit`` is the exception).
"""

import functools
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, dataclass_transform

import jax
import jax.numpy as jnp

from crossattn.ops.exporting import exportable
from crossattn.ops.integers import as_int32, moved
from crossattn.ops.promotion import as_written
from crossattn.types import AnyArray, Array, Bool, Float, Int


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def _pytree(cls):
    """Makes a frozen dataclass that is a pytree; static fields are part of its structure."""
    return exportable(jax.tree_util.register_dataclass(dataclass(frozen=True)(cls)))


_FAR = 2**30  # farther than any two indices are apart
_static = functools.partial(field, metadata={"static": True})


def _axes(*names: str) -> Any:
    """Declares the axes of a field's array after those of the batch: "N" heads, "T" queries, "S" keys."""
    return field(metadata={"axes": names})


def _rows(x: AnyArray) -> AnyArray:
    """Returns one value a query, to compare with keys: [*B X] -> [*B 1 X 1]."""
    return jnp.asarray(x)[..., None, :, None]


def _columns(x: AnyArray) -> AnyArray:
    """Returns one value a key, to compare with queries: [*B X] -> [*B 1 1 X]."""
    return jnp.asarray(x)[..., None, None, :]


def _per_row(x: AnyArray | int) -> AnyArray:
    return jnp.asarray(x)[..., None, None, None]


@_pytree
class Band:
    """``q_pos - left <= k_pos <= q_pos + right``; None means unlimited on that side."""

    q_positions: Int[AnyArray, "*#B T"] | None = _axes("T")
    k_positions: Int[AnyArray, "*#B S"] | None = _axes("S")
    offset: Int[AnyArray, "*#B"] | int | None = _axes()
    left: int | None = _static()
    right: int | None = _static()

    def block(self, queries: AnyArray, keys: AnyArray) -> AnyArray:
        """Returns which of these keys these queries may read, both given by index: [*#B #N #T #S]."""
        if self.q_positions is None:
            q = queries[:, None] + _per_row(0 if self.offset is None else self.offset)
        else:
            q = _rows(self.q_positions[..., queries])
        k = _columns(keys if self.k_positions is None else self.k_positions[..., keys])
        # A side without a limit adds no comparison; with neither, everything is allowed.
        allowed = jnp.ones((), bool)
        if self.right is not None:
            allowed = allowed & (k <= moved(q, self.right))
        if self.left is not None:
            allowed = allowed & (k >= moved(q, -self.left))
        return allowed


@_pytree
class Lengths:
    """Keys with index below ``k_lengths``, for queries with index below ``q_lengths``."""

    k_lengths: Int[AnyArray, "*B"] | int = _axes()
    q_lengths: Int[AnyArray, "*B"] | int | None = _axes()

    def block(self, queries: AnyArray, keys: AnyArray) -> AnyArray:
        allowed = _columns(keys) < _per_row(self.k_lengths)
        if self.q_lengths is not None:
            allowed = allowed & (_rows(queries) < _per_row(self.q_lengths))
        return allowed


@_pytree
class KeyPadding:
    """Keys marked valid."""

    valid: Bool[AnyArray, "*B S"] = _axes("S")

    def block(self, queries: AnyArray, keys: AnyArray) -> AnyArray:
        return _columns(self.valid[..., keys])


@_pytree
class Segments:
    """Queries and keys of the same segment; segment 0 is padding and reads nothing."""

    q_segment_ids: Int[AnyArray, "*#B T"] = _axes("T")
    k_segment_ids: Int[AnyArray, "*#B S"] = _axes("S")

    def block(self, queries: AnyArray, keys: AnyArray) -> AnyArray:
        q, k = _rows(self.q_segment_ids[..., queries]), _columns(self.k_segment_ids[..., keys])
        return (q == k) & (q > 0)


@_pytree
class Explicit:
    """Boolean matrix."""

    allowed: Bool[AnyArray, "*#BN #T #S"] = _axes("N", "T", "S")

    def block(self, queries: AnyArray, keys: AnyArray) -> AnyArray:
        allowed = self.allowed
        if allowed.shape[-2] != 1:
            allowed = allowed[..., queries, :]
        if allowed.shape[-1] != 1:
            allowed = allowed[..., keys]
        return allowed


@_pytree
class AnyOf:
    """Union of masks."""

    masks: tuple["Mask", ...]

    def block(self, queries: AnyArray, keys: AnyArray) -> AnyArray:
        blocks = [mask.block(queries, keys) for mask in self.masks]
        return functools.reduce(jnp.logical_or, blocks)


@_pytree
class Not:
    """Complement of a mask."""

    mask: "Mask"

    def block(self, queries: AnyArray, keys: AnyArray) -> AnyArray:
        return ~self.mask.block(queries, keys)


Term = Band | Lengths | KeyPadding | Segments | Explicit | AnyOf | Not


@_pytree
class Mask:
    """A conjunction of terms; with no term, every query reads every key."""

    terms: tuple[Term, ...]

    # Else ``array & mask`` of a numpy array would ask each of its elements, one by one.
    __array_ufunc__ = None

    def __and__(self, other: "Mask | Bool[AnyArray, '...']") -> "Mask":
        return Mask(self.terms + as_mask(other).terms)

    def __rand__(self, other: "Mask | Bool[AnyArray, '...']") -> "Mask":
        return as_mask(other) & self

    def __or__(self, other: "Mask | Bool[AnyArray, '...']") -> "Mask":
        return Mask((AnyOf((self, as_mask(other))),))

    def __ror__(self, other: "Mask | Bool[AnyArray, '...']") -> "Mask":
        return as_mask(other) | self

    def __invert__(self) -> "Mask":
        """Returns the mask of exactly what this one hides, the padding that it hides too."""
        return Mask((Not(self),))

    def __bool__(self) -> bool:
        """Raises ValueError: ``and``, ``or`` and ``not`` would drop a mask without a word."""
        raise ValueError("a Mask is neither true nor false; write a & b, a | b and ~a.")

    @as_written
    def block(self, queries: Int[AnyArray, " T"], keys: Int[AnyArray, " S"]) -> Bool[Array, "..."]:
        """Returns the part of the matrix at these query and key indices, broadcastable to [*B N T S]."""
        blocks = [term.block(queries, keys) for term in self.terms]
        return functools.reduce(jnp.logical_and, blocks, jnp.ones((), bool))

    def arrays(self) -> "Iterator[tuple[Term, str, Any, tuple[str, ...]]]":
        """Yields each array's term, name, value and axes after those of the batch, in the order of leaves."""
        for term in self.terms:
            if isinstance(term, (AnyOf, Not)):
                for mask in term.masks if isinstance(term, AnyOf) else (term.mask,):
                    yield from mask.arrays()
                continue
            for each in fields(term):
                x = getattr(term, each.name)
                if "axes" in each.metadata and x is not None:
                    yield term, each.name, x, each.metadata["axes"]

    def check(self, T: int, S: int) -> None:
        """Raises ValueError if an array of a term is not for ``T`` queries and ``S`` keys."""
        lengths = {"T": (T, "queries"), "S": (S, "keys")}
        for term, name, x, axes in self.arrays():
            for axis, size in zip(axes[::-1], jnp.shape(x)[::-1], strict=False):
                shared = isinstance(term, Explicit) and size == 1
                if axis in lengths and size != lengths[axis][0] and not shared:
                    length, what = lengths[axis]
                    raise ValueError(
                        f"mask: {name} of {type(term).__name__} has length {size}; expected "
                        f"{axis} = {length}, the number of {what}."
                    )

    @as_written
    def materialize(self, T: int, S: int) -> Bool[AnyArray, "*#B #N T S"]:
        """Returns the whole matrix for ``T`` queries and ``S`` keys, [*#B #N T S].

        Raises:
          ValueError: the mask was made for other lengths.
        """
        self.check(T, S)
        allowed = self.block(jnp.arange(T), jnp.arange(S))
        lead = allowed.shape[:-2] or (1,)
        return jnp.broadcast_to(allowed, (*lead, T, S))

    @as_written
    def to_bias(self, T: int, S: int, dtype=jnp.float32) -> Float[Array, "*#B #N T S"]:
        """Returns the additive form of the mask: 0 where a key may be read, -inf where not."""
        return jnp.where(self.materialize(T, S), 0.0, -jnp.inf).astype(dtype)


def as_mask(mask: Mask | AnyArray, ndim: int | None = None) -> Mask:
    """Returns a Mask as it is, a boolean matrix wrapped by ``explicit``.

    ``ndim`` is the number of axes of [*B N T S] where it is known: an array of so many has all of them.
    """
    if isinstance(mask, Mask):
        return mask
    if ndim is not None and jnp.ndim(mask) == ndim:
        _expect_bool("explicit", "allowed", mask)
        return Mask((Explicit(jnp.asarray(mask)),))
    return explicit(mask)


def causal(
    offset: Int[AnyArray, "*#B"] | int | None = None,
    q_positions: Int[AnyArray, "*#B T"] | None = None,
    k_positions: Int[AnyArray, "*#B S"] | None = None,
) -> Mask:
    """Lets a query read keys at its own position and before: ``k_pos <= q_pos``.

    Without positions, query i stands at ``i + offset`` and key j at j (top-left aligned).

    Raises:
      ValueError: as ``window``.
    Source: Vaswani et al. 2017, section 3.2.3.
    """
    return window(None, 0, offset, q_positions, k_positions)


def window(
    left: int | None,
    right: int | None = 0,
    offset: Int[AnyArray, "*#B"] | int | None = None,
    q_positions: Int[AnyArray, "*#B T"] | None = None,
    k_positions: Int[AnyArray, "*#B S"] | None = None,
) -> Mask:
    """Lets a query read from ``left`` positions before its own to ``right`` after; None is unlimited.

    A limit of 2**30 and more is none.

    Raises:
      ValueError: a limit is not a whole number, positions or the offset are not integers of int32, or both
        are given for the queries.
    Source: Beltagy et al. 2020, "Longformer", section 3.1.
    """
    if isinstance(offset, int) and offset == 0:
        offset = None
    if offset is not None and q_positions is not None:
        raise ValueError("offset and q_positions both place the queries; give one of them.")
    offset, *positions = _integers(
        "causal" if (left, right) == (None, 0) else "window",
        offset=offset,
        q_positions=q_positions,
        k_positions=k_positions,
    )
    q_positions, k_positions = (None if x is None else jnp.asarray(x) for x in positions)
    left, right = _limit("left", left), _limit("right", right)
    return Mask((Band(q_positions, k_positions, offset, left, right),))


def prefix(length: Int[AnyArray, "*B"] | int) -> Mask:
    """Lets every query read the first ``length`` keys.

    The mask of a prefix LM is ``causal() | prefix(n)``.

    Source: Raffel et al. 2020, "T5", section 3.2.1.
    """
    [length] = _integers("prefix", length=length)
    return lengths(length)


def lengths(
    k_lengths: Int[AnyArray, "*B"] | int, q_lengths: Int[AnyArray, "*B"] | int | None = None
) -> Mask:
    """Lets the first ``q_lengths`` queries (None: all) read the first ``k_lengths`` keys."""
    return Mask((Lengths(*_integers("lengths", k_lengths=k_lengths, q_lengths=q_lengths)),))


def key_padding(valid: Bool[AnyArray, "*B S"]) -> Mask:
    """Lets every query read the keys where ``valid`` is True."""
    _expect_bool("key_padding", "valid", valid)
    return Mask((KeyPadding(jnp.asarray(valid)),))


def segments(
    q_segment_ids: Int[AnyArray, "*B T"], k_segment_ids: Int[AnyArray, "*B S"] | None = None
) -> Mask:
    """Lets queries read keys of an equal segment number above 0 (packed examples)."""
    q, k = _integers("segments", q_segment_ids=q_segment_ids, k_segment_ids=k_segment_ids)
    q = jnp.asarray(q)
    return Mask((Segments(q, q if k is None else jnp.asarray(k)),))


def explicit(allowed: Bool[AnyArray, "*#BN #T #S"]) -> Mask:
    """Wraps a boolean matrix, True where the query may read the key; axes of size 1 broadcast.

    It has the axes [T S], or all of them; without a batch too one may write [1 N T S].

    Raises:
      ValueError: ``allowed`` is not boolean, or has fewer than two axes, or three, which could mean
        [B T S] or [N T S].
    """
    _expect_bool("explicit", "allowed", allowed)
    allowed = jnp.asarray(allowed)
    if allowed.ndim < 2:
        raise ValueError(
            f"mask has shape {allowed.shape}; expected at least two axes, [*B N T S] with axes of "
            "size 1 where it is shared."
        )
    if allowed.ndim == 3 and allowed.shape[0] != 1:
        raise ValueError(
            f"mask has shape {allowed.shape}, three axes, which could mean [B T S] or [N T S]; write "
            "mask[:, None] for [B 1 T S], or mask[None] for [1 N T S]."
        )
    return Mask((Explicit(allowed),))


def _expect_bool(name: str, argument: str, value) -> None:
    dtype = getattr(value, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.bool_):
        said = f"is a {type(value).__name__}" if dtype is None else f"has dtype {dtype}"
        raise ValueError(
            f"masks.{name}: {argument} {said}; expected an array of bool, True = may be read: of 0 and 1, "
            f"{argument}.astype(bool). An additive mask of 0 and -inf goes into bias=."
        )


def _integers(name: str, **arguments) -> list[Any]:
    return [as_int32(f"masks.{name}: {argument}", x) for argument, x in arguments.items()]


def _limit(name: str, limit: int | None) -> int | None:
    """Returns a limit that kernels may add to indices in 32 bits."""
    if limit is None:
        return None
    try:
        limit = operator.index(limit)
    except TypeError:
        raise ValueError(
            f"masks.window: {name} is {limit!r}; expected a whole number known before tracing, or None."
        ) from None
    return None if limit >= _FAR else max(limit, -_FAR)
