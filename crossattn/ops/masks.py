"""Masks: which query may read which key. True means "may read".

A ``Mask`` is a conjunction of small terms that say *what the mask means* (a band around the diagonal,
a length, equal segments) rather than a matrix of booleans. A kernel can look at the terms and skip
work; ``materialize`` turns any mask into the matrix. Combine masks with ``&`` and ``|``.

Array arguments may have leading batch axes ``*B`` and never a heads axis (``explicit`` is the exception).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from crossattn.types import Array, Bool, Float, Int


def _pytree(cls):
    """A frozen dataclass that is a pytree; fields marked static are part of the structure."""
    cls = dataclass(frozen=True)(cls)
    fields = cls.__dataclass_fields__.values()
    static = [f.name for f in fields if f.metadata.get("static")]
    data = [f.name for f in fields if not f.metadata.get("static")]
    return jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=static)


_static = functools.partial(field, metadata={"static": True})


def _rows(x: Array) -> Array:
    """[*B X] -> [*B 1 X 1]: one value a query, ready to compare with keys."""
    return jnp.asarray(x)[..., None, :, None]


def _columns(x: Array) -> Array:
    """[*B X] -> [*B 1 1 X]: one value a key, ready to compare with queries."""
    return jnp.asarray(x)[..., None, None, :]


def _per_row(x: Array | int) -> Array:
    """[*B] -> [*B 1 1 1]."""
    return jnp.asarray(x)[..., None, None, None]


@_pytree
class Band:
    """``q_pos - left <= k_pos <= q_pos + right``; None means unlimited on that side."""

    q_positions: Int[Array, "*B T"] | None
    k_positions: Int[Array, "*B S"] | None
    offset: Int[Array, "*B"] | int | None
    left: int | None = _static()
    right: int | None = _static()

    def block(self, queries: Array, keys: Array) -> Array:
        if self.q_positions is None:
            q = queries[:, None] + _per_row(0 if self.offset is None else self.offset)
        else:
            q = _rows(self.q_positions[..., queries])
        k = _columns(keys if self.k_positions is None else self.k_positions[..., keys])
        # A side without a limit adds no comparison; with neither, everything is allowed.
        allowed = jnp.ones((), bool)
        if self.right is not None:
            allowed = allowed & (k <= q + self.right)
        if self.left is not None:
            allowed = allowed & (k >= q - self.left)
        return allowed

    @property
    def is_plain_causal(self) -> bool:
        """The lower triangle by index: no offset, no explicit positions, no window."""
        given = (self.q_positions, self.k_positions, self.offset)
        return self.left is None and self.right == 0 and all(x is None for x in given)


@_pytree
class Lengths:
    """Keys with index below ``k_lengths``, for queries with index below ``q_lengths``."""

    k_lengths: Int[Array, "*B"] | int
    q_lengths: Int[Array, "*B"] | int | None

    def block(self, queries: Array, keys: Array) -> Array:
        allowed = _columns(keys) < _per_row(self.k_lengths)
        if self.q_lengths is not None:
            allowed = allowed & (_rows(queries) < _per_row(self.q_lengths))
        return allowed


@_pytree
class KeyPadding:
    """Keys marked valid."""

    valid: Bool[Array, "*B S"]

    def block(self, queries: Array, keys: Array) -> Array:
        return _columns(self.valid[..., keys])


@_pytree
class Segments:
    """Queries and keys of the same segment; segment 0 is padding and reads nothing."""

    q_segments: Int[Array, "*B T"]
    k_segments: Int[Array, "*B S"]

    def block(self, queries: Array, keys: Array) -> Array:
        q, k = _rows(self.q_segments[..., queries]), _columns(self.k_segments[..., keys])
        return (q == k) & (q > 0)


@_pytree
class Explicit:
    """The matrix itself."""

    allowed: Bool[Array, "*#B #N #T #S"]

    def block(self, queries: Array, keys: Array) -> Array:
        allowed = self.allowed
        if allowed.shape[-2] != 1:
            allowed = allowed[..., queries, :]
        if allowed.shape[-1] != 1:
            allowed = allowed[..., keys]
        return allowed


@_pytree
class AnyOf:
    """At least one of several masks allows it."""

    masks: tuple["Mask", ...]

    def block(self, queries: Array, keys: Array) -> Array:
        blocks = [mask.block(queries, keys) for mask in self.masks]
        return functools.reduce(jnp.logical_or, blocks)


Term = Band | Lengths | KeyPadding | Segments | Explicit | AnyOf


@_pytree
class Mask:
    """A conjunction of terms; with no term, every query reads every key."""

    terms: tuple[Term, ...]

    def __and__(self, other: "Mask") -> "Mask":
        return Mask(self.terms + as_mask(other).terms)

    def __or__(self, other: "Mask") -> "Mask":
        return Mask((AnyOf((self, as_mask(other))),))

    def block(self, queries: Int[Array, " T"], keys: Int[Array, " S"]) -> Bool[Array, "..."]:
        """The part of the matrix at these query and key indices, broadcastable to [*B N T S]."""
        blocks = [term.block(queries, keys) for term in self.terms]
        return functools.reduce(jnp.logical_and, blocks, jnp.ones((), bool))

    def materialize(self, T: int, S: int) -> Bool[Array, "*#B #N T S"]:
        """The whole matrix for ``T`` queries and ``S`` keys, [*#B #N T S]."""
        allowed = self.block(jnp.arange(T), jnp.arange(S))
        lead = allowed.shape[:-2] or (1,)
        return jnp.broadcast_to(allowed, (*lead, T, S))

    def to_bias(self, T: int, S: int, dtype=jnp.float32) -> Float[Array, "*#B #N T S"]:
        """The additive form M of the mask: 0 where a key may be read, -inf where not."""
        return jnp.where(self.materialize(T, S), 0.0, -jnp.inf).astype(dtype)


def as_mask(mask: Mask | Array) -> Mask:
    """A Mask as it is; a boolean matrix wrapped by ``explicit``."""
    return mask if isinstance(mask, Mask) else explicit(mask)


def causal(
    offset: Int[Array, "*B"] | int | None = None,
    q_positions: Int[Array, "*B T"] | None = None,
    k_positions: Int[Array, "*B S"] | None = None,
) -> Mask:
    """A query reads keys at its own position and before: ``k_pos <= q_pos``.

    Without positions, query i stands at ``i + offset`` and key j at j (top-left aligned).
    Source: Vaswani et al. 2017, section 3.2.3.
    """
    return window(None, 0, offset, q_positions, k_positions)


def window(
    left: int | None,
    right: int | None = 0,
    offset: Int[Array, "*B"] | int | None = None,
    q_positions: Int[Array, "*B T"] | None = None,
    k_positions: Int[Array, "*B S"] | None = None,
) -> Mask:
    """A query reads from ``left`` positions before its own to ``right`` after; None is unlimited.

    Source: Beltagy et al. 2020, "Longformer", section 3.1.
    """
    if isinstance(offset, int) and offset == 0:
        offset = None
    return Mask((Band(q_positions, k_positions, offset, left, right),))


def prefix(length: Int[Array, "*B"] | int) -> Mask:
    """Every query reads the first ``length`` keys; ``causal() | prefix(n)`` is the prefix LM mask.

    Source: Raffel et al. 2020, "T5", section 3.2.1.
    """
    return lengths(length)


def lengths(
    k_lengths: Int[Array, "*B"] | int, q_lengths: Int[Array, "*B"] | int | None = None
) -> Mask:
    """The first ``k_lengths`` keys, read by the first ``q_lengths`` queries (None: by all)."""
    return Mask((Lengths(k_lengths, q_lengths),))


def key_padding(valid: Bool[Array, "*B S"]) -> Mask:
    """Keys where ``valid`` is True."""
    _expect_bool("key_padding", "valid", valid)
    return Mask((KeyPadding(jnp.asarray(valid)),))


def segments(
    q_segments: Int[Array, "*B T"], k_segments: Int[Array, "*B S"] | None = None
) -> Mask:
    """Queries and keys whose segment numbers are equal and above 0 (packed examples)."""
    q_segments = jnp.asarray(q_segments)
    k_segments = q_segments if k_segments is None else jnp.asarray(k_segments)
    return Mask((Segments(q_segments, k_segments),))


def explicit(allowed: Bool[Array, "*#B #N #T #S"]) -> Mask:
    """A boolean matrix, True where the query may read the key; axes of size 1 broadcast.

    Raises:
      ValueError: ``allowed`` is not boolean, or has fewer than two axes.
    """
    _expect_bool("explicit", "allowed", allowed)
    allowed = jnp.asarray(allowed)
    if allowed.ndim < 2:
        raise ValueError(
            f"mask has shape {allowed.shape}; expected at least two axes, [*B N T S] with axes of "
            "size 1 where it is shared."
        )
    return Mask((Explicit(allowed),))


def _expect_bool(name: str, argument: str, value) -> None:
    dtype: Callable | None = getattr(value, "dtype", None)
    if dtype != bool:
        raise ValueError(
            f"masks.{name}: {argument} has dtype {dtype}; expected bool, True = may be read. "
            "An additive mask of 0 and -inf goes into bias=."
        )
