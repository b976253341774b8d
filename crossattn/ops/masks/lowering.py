"""Masks as arguments of fused kernels, and repairs of what such kernels get wrong.

Kernels behind ``jax.nn.dot_product_attention`` and tokamax take a causal flag, a window to the left and
one length an example; the rest of a mask they take as a matrix. They share two faults: a query that
may read nothing gets the mean of the values or NaN, and NaN leaks out of masked keys. ``prepare`` cleans
the operands and leaves no row empty; ``Prepared.output`` repairs the output.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from crossattn.ops.call import AttentionOutput, Call, by_query
from crossattn.ops.masks import Band, Explicit, Lengths, Mask
from crossattn.ops.masks.ranges import ranges
from crossattn.types import Array, Bool, Float, Int


@dataclass(frozen=True)
class Lowered:
    """Conjunction equal to a mask.

    Attributes:
      rest: what the others cannot say.
      causal: only keys up to the query's index.
      left: and not more than so many before it; None is unlimited. Not given without ``causal``.
      k_lengths: [*#B], only so many of the first keys; None is all of them.
      q_lengths: [*#B], only so many of the first queries read; None is all of them.
    """

    rest: Mask
    causal: bool = False
    left: int | None = None
    k_lengths: Int[Array, "*#B"] | None = None
    q_lengths: Int[Array, "*#B"] | None = None


def lower(mask: Mask | None, T: int, S: int) -> Lowered:
    """Lowers the terms that leave every one of ``T`` queries at least one of ``S`` keys.

    That is so for the causal flag, for lengths of 1 and more, and for both together; for a window
    only without lengths, and where no query stands beyond all keys.
    """
    terms = () if mask is None else mask.terms
    bands = [t for t in terms if isinstance(t, Band) and _is_plain(t)]
    lengths = [t for t in terms if isinstance(t, Lengths)]
    wide = [b for b in bands if b.left is None or (not lengths and T <= S + b.left)]
    lefts = [b.left for b in wide if b.left is not None]
    rest = Mask(tuple(t for t in terms if not any(t is one for one in (*wide, *lengths))))
    return Lowered(
        causal=bool(wide),
        left=min(lefts, default=None),
        k_lengths=_least([t.k_lengths for t in lengths], S),
        q_lengths=_least([t.q_lengths for t in lengths if t.q_lengths is not None], T),
        rest=rest,
    )


def _is_plain(band: Band) -> bool:
    """Returns whether a band goes by index and ends at the query's own: causal, with or without a window."""
    given = (band.q_positions, band.k_positions, band.offset)
    return band.right == 0 and (band.left or 0) >= 0 and all(x is None for x in given)


def _least(lengths: list[Any], size: int) -> Any:
    smallest = None
    for length in lengths:
        length = jnp.clip(jnp.asarray(length), 0, size).astype(jnp.int32)
        smallest = length if smallest is None else jnp.minimum(smallest, length)
    return smallest


@dataclass(frozen=True)
class Prepared:
    """Clean operands for a kernel, and what to repair in its output.

    Attributes:
      q, k, v: finite, and 0 where they take no part.
      bias: finite, [*#B #N #T #S] or None.
      allowed: the mask's rest as a matrix [*#B #N #T #S], all True for queries that may read nothing;
        None is all True.
      reads_nothing: [*#B #N #T].
      reads_poison: [*#B #N #T], queries that read a NaN or an Inf.
    """

    q: Float[Array, "*B T N H"]
    k: Float[Array, "*B S K H"]
    v: Float[Array, "*B S K Hv"]
    bias: Float[Array, "*#B #N #T #S"] | None
    allowed: Bool[Array, "*#BN #T #S"] | None
    reads_nothing: Bool[Array, "*#B #N #T"]
    reads_poison: Bool[Array, "*#B #N #T"]

    def output(self, call: Call, out: Array, lse: Any, rows: Any = None) -> AttentionOutput:
        """Returns a kernel's output [*B T N Hv] and log-sum-exp [*B N T], repaired, as a call asks.

        0 and -inf where nothing may be read, NaN where a NaN or an Inf is read; rows are (lse, 1) by default.
        """
        out = jnp.where(by_query(self.reads_nothing), 0, out)
        out = jnp.where(by_query(self.reads_poison), jnp.nan, out).astype(call.q.dtype)
        if rows is None and lse is not None:
            rows = lse, jnp.ones_like(lse)
        if not call.return_lse:
            return AttentionOutput(out, None, None, rows if call.return_rows else None)
        repaired = jnp.where(self.reads_nothing, -jnp.inf, jnp.asarray(lse))
        repaired = jnp.where(self.reads_poison, jnp.nan, repaired)
        return AttentionOutput(out, None, repaired, rows if call.return_rows else None)


def prepare(q: Array, k: Array, v: Array, bias: Array | None, mask: Mask | None, lowered: Lowered):
    """Cleans a call's operands; with nothing but lowered terms it never makes a matrix."""
    T, N, S = q.shape[-3], q.shape[-2], k.shape[-3]
    poison = ~(jnp.isfinite(k).all(-1) & jnp.isfinite(v).all(-1))
    poison = jnp.moveaxis(jnp.repeat(poison, N // k.shape[-2], axis=-1), -1, -2)
    mask, rest, readable = Mask(()) if mask is None else mask, lowered.rest, None
    if bias is not None:
        readable = bias != -jnp.inf
        bias = jnp.where(readable, bias, 0)
        finite = Mask((Explicit(readable),))
        mask, rest = mask & finite, rest & finite
    reads_nothing, reads_poison = _read(mask, poison, T, S)
    reads_poison = reads_poison | _poisoned(q) & ~reads_nothing
    allowed = None
    if rest.terms:
        allowed = rest.block(jnp.arange(T), jnp.arange(S)) | reads_nothing[..., None]
        allowed = allowed.reshape((1,) * (q.ndim - allowed.ndim) + allowed.shape)
    # Selected, not multiplied: gradients that a kernel leaves in a padding end here.
    q = jnp.where(by_query(reads_nothing) | ~jnp.isfinite(q), 0, q)
    unread = False if lowered.k_lengths is None else _beyond(lowered.k_lengths, S)
    k, v = (jnp.where(unread | ~jnp.isfinite(x), 0, x) for x in (k, v))
    return Prepared(q, k, v, bias, allowed, reads_nothing, reads_poison)


def _read(mask: Mask, poison: Bool[Array, "*B N S"], T: int, S: int) -> tuple[Array, Array]:
    """Returns which queries may read nothing, and which a poisoned key: [*#B #N #T] both."""
    limits = ranges(mask, T, S)
    if limits.limits or limits.rest.terms:
        allowed = mask.block(jnp.arange(T), jnp.arange(S))
        allowed = jnp.broadcast_to(allowed, (*allowed.shape[:-1], S))
        allowed = allowed.reshape((1,) * (poison.ndim + 1 - allowed.ndim) + allowed.shape)
        return ~allowed.any(-1), (allowed & poison[..., None, :]).any(-1)
    first = jnp.zeros((1,), jnp.int32) if limits.first is None else limits.first
    last = jnp.full((1,), S) if limits.last is None else limits.last
    first, last = (x.reshape((1,) * (poison.ndim - 1 - x.ndim) + x.shape) for x in (first, last))
    first, last = (x[..., None, :] for x in jnp.broadcast_arrays(first, last))
    before = jnp.cumsum(jnp.pad(poison, [(0, 0)] * (poison.ndim - 1) + [(1, 0)]), -1)
    spread = jnp.broadcast_shapes(before.shape[:-1], first.shape[:-1]) + first.shape[-1:]
    until, since = (
        jnp.take_along_axis(before, jnp.broadcast_to(x, spread), -1) for x in (last, first)
    )
    return first >= last, (until > since) & (first < last)


def _poisoned(q: Float[Array, "*B T N H"]) -> Bool[Array, "*B N T"]:
    return jnp.moveaxis(~jnp.isfinite(q).all(-1), -1, -2)


def _beyond(lengths: Int[Array, "*#B"], S: int) -> Bool[Array, "*#B S 1 1"]:
    return (jnp.arange(S) >= lengths[..., None])[..., None, None]


def padded(x: Array, more: dict[int, int], value: Any = 0) -> Array:
    """Appends so many entries of a value to axes."""
    widths = [(0, more.get(axis, 0)) for axis in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value) if any(more.values()) else x


def enlarged(matrix: Array, queries: int, keys: int) -> Array:
    """Appends to a mask or bias [#B #N T S] queries that read every key, and keys that none reads."""
    return padded(padded(matrix, {2: queries}, matrix.dtype == bool), {3: keys})


def one_batch(x: Any, inner: int, batch: tuple[int, ...], whole: bool = False) -> Any:
    """Folds leading axes into one; broadcasts to the whole batch unless all are of size 1."""
    if x is None:
        return None
    own = x.shape[x.ndim - inner :]
    if whole or any(n != 1 for n in x.shape[: x.ndim - inner]):
        x = jnp.broadcast_to(x, (*batch, *own))
    return x.reshape(-1, *own)


@dataclass(frozen=True)
class Kernel:
    """Call in the form of ``jax.nn.dot_product_attention``'s arguments.

    Attributes:
      operands: q, k, v, bias and mask, with one batch axis.
      keywords: what of the mask was lowered.
      scale: a number where ``operands`` have the scale in them.
      prepared: what is left to repair.
      call: what it serves.
    """

    operands: tuple[Any, ...]
    keywords: dict[str, Any]
    scale: Any
    prepared: Prepared
    call: Any

    def output(self, out: Array, lse: Array | None = None) -> AttentionOutput:
        """Returns the output for [B T N Hv] of the kernel, and its log-sum-exp for [B N T]."""
        batch, T, N = self.call.q.shape[:-3], *out.shape[1:3]
        lse = None if lse is None else lse.reshape(*batch, N, T)
        return self.prepared.output(self.call, out.reshape(*batch, *out.shape[1:]), lse)


def kernel(call: Call, dtype: Any, fold_scale: bool = True, windows: bool = True) -> Kernel:
    """Returns a call in that form, its operands of a dtype.

    Args:
      call: of ``attend``.
      dtype: in which the kernel computes.
      fold_scale: whether a scale that is an array is multiplied into the queries.
      windows: whether the kernel's own window may be used.
    """
    q, k, v = (x.astype(dtype) for x in (call.q, call.k, call.v))
    scale, batch = call.scale, q.shape[:-3]
    if fold_scale and not isinstance(scale, (int, float)):
        q, scale = (q * scale).astype(dtype), 1.0
    lowered = lower(call.mask, *call.lengths)
    if lowered.left is not None and not windows:
        lowered = Lowered(Mask(()) if call.mask is None else call.mask)
    prepared = prepare(q, k, v, call.bias, call.mask, lowered)
    operands = [one_batch(x, 3, batch, whole=True) for x in (prepared.q, prepared.k, prepared.v)]
    operands += [one_batch(x, 3, batch) for x in (prepared.bias, prepared.allowed)]
    if dtype == jnp.float32 and operands[3] is not None:
        operands[3] = operands[3].astype(dtype)
    keywords: dict[str, Any] = {"is_causal": lowered.causal}
    if lowered.left is not None:
        keywords["local_window_size"] = (lowered.left, 0)
    lengths = {"query": lowered.q_lengths, "key_value": lowered.k_lengths}
    for name, length in lengths.items():
        if length is not None:  # A length of 0 would leave its queries nothing: they are repaired.
            whole = one_batch(jnp.maximum(length, 1), 0, batch, whole=True)
            keywords[f"{name}_seq_lengths"] = whole
    return Kernel(tuple(operands), keywords, scale, prepared, call)
