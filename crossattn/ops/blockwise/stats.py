"""Statistics of attention weights without their matrix, in memory linear in T and S.

Entropy, the keys with the most weight, where a query looks on average, how much a key is looked at: what
pictures and losses on alignments are made from. They are loops over blocks as ``attend`` by "chunked" is.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp

from crossattn.ops.arguments import check_broadcast, check_mask, check_number, check_operands
from crossattn.ops.blockwise import blocks, scores
from crossattn.ops.blockwise.summaries import Asked, summarise
from crossattn.ops.call import Names, named
from crossattn.ops.masks import Mask, slices
from crossattn.ops.parallel import placement
from crossattn.ops.parallel.spread import heads_of
from crossattn.ops.promotion import as_written
from crossattn.types import AnyArray, Array, Bool, Float


class AttentionStats(NamedTuple):
    """Statistics in float32; a query that may read nothing has zeros, lse of -inf and indices of -1.

    Attributes:
      lse: [*B N T], log of the sum of the exponentials of the logits.
      entropy: [*B N T], of the weights, in nats.
      maximum: [*B N T], the largest weight.
      argmax: int32 [*B N T], its key; the first one on ties.
      expected: [*B N T], the mean of the keys' positions under the weights.
      mass: [*B N S], what each key receives, summed over queries.
      top_weights: [*B N T top_k], the largest weights, in falling order.
      top_indices: int32 [*B N T top_k], their keys; -1 and weight 0 beyond what may be read.
      span_mass: [*B N T], the weight on each query's span of keys; None without spans.
    """

    lse: Any
    entropy: Any
    maximum: Any
    argmax: Any
    expected: Any
    mass: Any
    top_weights: Any
    top_indices: Any
    span_mass: Any


jax.export.register_namedtuple_serialization(
    AttentionStats, serialized_name="crossattn.AttentionStats"
)


@as_written
def attention_stats(
    q: Float[AnyArray, "*B T N H"],
    k: Float[AnyArray, "*B S K H"],
    mask: Mask | Bool[AnyArray, "..."] | None = None,
    *,
    bias: Float[AnyArray, "..."] | None = None,
    scale: float | Float[Array, ""] | None = None,
    softcap: float | Float[Array, ""] | None = None,
    top_k: int = 0,
    k_positions: AnyArray | None = None,
    spans: tuple[AnyArray, ...] | None = None,
) -> AttentionStats:
    """Computes statistics of the weights with which ``attend(q, k, v, mask, ...)`` mixes values.

    Differentiable once, in reverse mode, in q, k, bias, scale and softcap, memory linear there too.
    Indices have no gradient; the largest weights have that of the keys they were found at.

    Args:
      q: queries [*B T N H].
      k: keys [*B S K H].
      mask: as in ``attend``, and so are bias, scale and softcap.
      top_k: how many of the largest weights to return; a few, as each is a pass over the logits.
      k_positions: [*#B S], where keys stand; None is ``arange``.
      spans: (first, last), integers [*#B #T] each: the keys with ``first <= index < last``. For a
        loss that guides an alignment, ``-log(span_mass)`` is the negative log-likelihood of the span.

    Raises:
      ValueError: an argument's shape, dtype or value does not fit; the message names it.

    Source: coverage as a key's mass, Tu et al. 2016; guided alignment, Chen et al. 2016.
    """
    check_operands(q, k, k)
    q, k = jnp.asarray(q), jnp.asarray(k)
    batch, T, N, S = q.shape[:-3], q.shape[-3], q.shape[-2], k.shape[-3]
    mask = check_mask(mask, (*batch, N, T, S))
    if bias is not None:
        check_broadcast("bias", bias, (*batch, N, T, S), jnp.floating)
        bias = jnp.asarray(bias)
    check_number("scale", scale)
    check_number("softcap", softcap, positive=True)
    if not 0 <= top_k <= S:
        raise ValueError(f"top_k is {top_k}; expected 0 to the number of keys, {S}.")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    asked = _asked(k_positions, spans, batch, T, S)
    if 0 in (*batch, T, S):
        return _of_nothing((*batch, N, T), S, top_k, spans is not None)
    operands = q, k, mask, bias, scale, softcap, asked
    mesh = placement.mesh_of(operands)
    return _stats(top_k, *operands) if mesh is None else _spread(top_k, mesh, operands)


def _stats(top_k: int, q, k, mask, bias, scale, softcap, asked: Asked) -> AttentionStats:
    heads = (*q.shape[:-3], q.shape[-2])
    given, setting, _ = scores.prepare(q, k, None, mask, bias, scale, softcap)
    given, setting, asked = placement.alike((given, setting, asked))
    plan = blocks.plan(q.shape[-3], k.shape[-3], math.prod(heads), mask)
    return _arranged(summarise(plan, top_k, given, setting, asked), heads)


@partial(jax.jit, static_argnums=(0, 1))
def _spread(top_k: int, mesh: Any, operands: tuple) -> AttentionStats:
    """Computes each device's examples, heads and queries; keys are whole everywhere."""
    q, k, mask, bias, scale, softcap, asked = operands
    places = named(q, "T", "N", None), named(k, "S", "N", None)
    split = placement.Split.of(mesh, (q, k), places).without("S")
    split = split.without("T") if split.nested else split
    split, k, _ = heads_of(split, q, k, k)
    leaves, structure = jax.tree.flatten(mask)
    inner = [] if mask is None else [axes for *_, axes in mask.arrays()]
    names = (
        *places,
        [named(x, *axes) for x, axes in zip(leaves, inner, strict=True)],
        None if bias is None else named(bias, "N", "T", "S"),
        *(None if x is None else Names() for x in (scale, softcap)),
        Asked(
            named(asked.positions, None, None, None, "S"),
            *(None if x is None else named(x, None, None, "T") for x in (asked.first, asked.last)),
        ),
    )
    rows = *places[0][:-3], "N", "T"
    by_query, by_rank = Names(rows), Names((*rows, None))
    fields: dict[str, Any] = dict.fromkeys(AttentionStats._fields, by_query)
    fields |= dict(mass=Names((*rows[:-1], None)), top_weights=by_rank, top_indices=by_rank)
    fields |= dict(span_mass=None if asked.first is None else by_query)
    out = AttentionStats(**fields)

    def part(q, k, leaves, *others):
        mask = jax.tree.unflatten(structure, leaves)
        if mask is not None and "T" in split.axes:
            mask = slices.shift(mask, split.first("T", q.shape[-3]))
        statistics = _stats(top_k, q, k, mask, *others)
        if "T" not in split.axes:
            return statistics
        return statistics._replace(mass=jax.lax.psum(statistics.mass, split.axes["T"]))

    return split.run_elementwise(part, (q, k, leaves, bias, scale, softcap, asked), names, out)


def _asked(k_positions, spans, batch: tuple[int, ...], T: int, S: int) -> Asked:
    positions = jnp.arange(S) if k_positions is None else jnp.asarray(k_positions)
    _check_fits("k_positions", positions, (*batch, S), "[*B S]")
    first = last = None
    if spans is not None:
        if not isinstance(spans, tuple) or len(spans) != 2:
            what = f"a tuple of {len(spans)}" if isinstance(spans, tuple) else type(spans).__name__
            raise ValueError(f"spans is {what}; expected a tuple (first, last).")
        first, last = (jnp.asarray(x) for x in spans)
        for name, x in (("first", first), ("last", last)):
            if not jnp.issubdtype(x.dtype, jnp.integer):
                raise ValueError(f"spans: {name} has dtype {x.dtype}; expected integers.")
            _check_fits(f"spans: {name}", x, (*batch, T), "[*B T]")
        first, last = (x[..., None, None, :] for x in (first, last))
    positions = jax.lax.stop_gradient(positions.astype(jnp.float32))
    return Asked(positions[..., None, None, None, :], first, last)


def _check_fits(name: str, x: Array, full: tuple[int, ...], axes: str) -> None:
    fits = 1 <= x.ndim <= len(full)
    if not fits or any(n not in (1, m) for n, m in zip(x.shape[::-1], full[::-1], strict=False)):
        raise ValueError(
            f"{name} has shape {x.shape}; expected one that broadcasts to {axes} = {full}."
        )


def _arranged(statistics: Any, heads: tuple[int, ...]) -> AttentionStats:
    """Returns the statistics with heads on one axis, in float32 (indices in int32)."""
    smooth, places, _ = statistics

    def ungroup(fields: Any, dtype: Any) -> dict[str, Any]:
        shapes = {
            name: (*heads, *x.shape[len(heads) + 1 :])
            for name, x in fields._asdict().items()
            if x is not None
        }
        return {name: getattr(fields, name).reshape(n).astype(dtype) for name, n in shapes.items()}

    found = dict(span_mass=None) | ungroup(smooth, jnp.float32) | ungroup(places, jnp.int32)
    return AttentionStats(**found)


def _of_nothing(rows: tuple[int, ...], S: int, top_k: int, spans: bool) -> AttentionStats:
    """Returns statistics for no examples, no queries or no keys."""
    zero, none = jnp.zeros(rows), jnp.full(rows, -1, jnp.int32)
    by_key, top = jnp.zeros((*rows[:-1], S)), jnp.zeros((*rows, top_k))
    return AttentionStats(
        lse=jnp.full(rows, -jnp.inf), entropy=zero, maximum=zero, argmax=none, expected=zero,
        mass=by_key, top_weights=top, top_indices=top.astype(jnp.int32),
        span_mass=zero if spans else None,
    )  # fmt: skip
