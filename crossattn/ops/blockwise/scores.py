"""A block of the matrix [T, S]: its logits, softmax weights and gradients.

Operands are head-major here, query heads grouped by their key head, NaN and Inf taken out of them.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from crossattn.ops import dropout
from crossattn.ops.blockwise.blocks import Span
from crossattn.ops.masks import Explicit, Mask
from crossattn.ops.parallel import placement
from crossattn.ops.promotion import widened
from crossattn.types import AnyArray, Array, Bool, Float, Shaped

# Full float32 products also where the hardware would round their inputs.
EXACT = jax.lax.Precision.HIGHEST


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Operands:
    """Inputs in which logits are differentiable; a gradient has the same structure.

    Attributes:
      q: [*B K G T H], scaled.
      k: [*B K S H].
      bias: [*#B #N #T #S], or None.
      softcap: [], or None.
    """

    q: Any
    k: Any
    bias: Any
    softcap: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Setting:
    """Other inputs of a block.

    Attributes:
      q_poison: [*B K G T], NaN for queries that held a NaN or Inf, else 0.
      k_poison: [*B K S], the same of keys, and of values where there are some.
      key: of dropout, or None.
      arrays: of the mask.
      form: the mask without them. Apart, because JAX puts placeholders of its own into the pytrees
        that it differentiates, and a mask checks what it holds.
    """

    q_poison: Any
    k_poison: Any
    key: Any
    arrays: list[Any]
    form: Any = field(metadata={"static": True})

    @property
    def mask(self) -> Mask | None:
        """Mask of the keys that may be read; None is all."""
        return jax.tree.unflatten(self.form, self.arrays)


class Scores(NamedTuple):
    """Logits of a block [*B K G t s]; the mask of those that count; and logits / softcap."""

    logits: Any
    allowed: Any
    raw: Any


class Rows(NamedTuple):
    """Sums of a softmax's rows, [*B K G T]: the largest logit, and all exponentials relative to it.

    Not one log-sum-exp: at logits of 1e4 it would lose the small part in the large one.
    """

    peak: Any
    total: Any


def prepare(
    q: Float[Array, "*B T N H"],
    k: Float[Array, "*B S K H"],
    v,
    mask,
    bias,
    scale,
    softcap,
    key=None,
) -> tuple[Operands, Setting, Array | None]:
    """Returns operands, setting and, if there are any, the values [*B K S Hv].

    0 * NaN is NaN, so NaN and Inf of a masked key would reach outputs and gradients through the
    products. They are taken out of the operands and come back as NaN logits, which the mask can hide.
    """
    compute = widened(q.dtype)
    q_poison = grouped(poison(q)[..., None], k.shape[-2])[..., 0]
    k_poison = jnp.moveaxis(poison(k) if v is None else poison(k) + poison(v), -1, -2)
    operands = Operands(
        q=grouped(_finite(q).astype(compute) * scale, k.shape[-2]),
        k=_head_major(_finite(k).astype(compute)),
        bias=bias,
        softcap=None if softcap is None else jnp.asarray(softcap, compute),
    )
    arrays, form = jax.tree.flatten(mask)
    setting = Setting(q_poison.astype(compute), k_poison.astype(compute), key, arrays, form)
    values = None if v is None else _head_major(_finite(v).astype(compute))
    return placement.alike((operands, setting, values))


def poison(x: Float[Array, "*B X N H"]) -> Float[Array, "*B X N"]:
    """Returns NaN for each vector with an element that is not finite, else 0."""
    return jax.lax.stop_gradient(x * 0).astype(jnp.float32).sum(-1)


def _finite(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, 0)


def _head_major(x: Float[Array, "*B X N H"]) -> Float[Array, "*B N X H"]:
    return jnp.swapaxes(x, -2, -3)


def grouped(x: Float[Array, "*B T N H"], K: int) -> Float[Array, "*B K G T H"]:
    """Returns a head-major array, consecutive query heads beside their key head."""
    x = _head_major(x)
    return x.reshape(*x.shape[:-3], K, -1, *x.shape[-2:])


def ungrouped(x: Shaped[Array, "*B K G X Y"]) -> Shaped[Array, "*B N X Y"]:
    """Returns all query heads on one axis."""
    return x.reshape(*x.shape[:-4], x.shape[-4] * x.shape[-3], *x.shape[-2:])


def scores(given: Operands, setting: Setting, queries: Span, keys: Span) -> Scores:
    """Computes a block's logits; members of an earlier block are not allowed in it."""
    q, k = queries.of(given.q, -2), keys.of(given.k, -2)
    logits = jnp.einsum("...kgth,...ksh->...kgts", q, k, precision=EXACT)
    raw = None
    if given.softcap is not None:
        raw = logits / given.softcap
        logits = given.softcap * jnp.tanh(raw)
    heads = q.shape[-4:-2]
    conditions = _conditions(setting.mask, queries, keys, heads)
    if given.bias is not None:
        bias = _by_group(_piece(given.bias, queries, keys), heads)
        # -inf in the bias is a mask too; kept out of the sum, it leaves no NaN in gradients.
        conditions.append(bias != -jnp.inf)
        logits = logits + jnp.where(conditions[-1], bias, 0).astype(logits.dtype)
    logits = logits + keys.of(setting.k_poison, -1)[..., None, None, :]
    allowed = None
    for condition in conditions:
        allowed = condition if allowed is None else allowed & condition
    return Scores(logits, allowed, raw)


def _conditions(mask: Mask | None, queries: Span, keys: Span, heads: tuple[int, ...]) -> list[Any]:
    """Returns masks that broadcast to the block."""
    conditions: list[Any] = []
    if mask is not None:
        # Indexed by arrays, a matrix would be gathered: its rows whole, at every block.
        matrices = [term for term in mask.terms if isinstance(term, Explicit)]
        others = Mask(tuple(term for term in mask.terms if not isinstance(term, Explicit)))
        conditions += [_by_group(_piece(term.allowed, queries, keys), heads) for term in matrices]
        if others.terms:
            conditions.append(_by_group(others.block(queries.indices, keys.indices), heads))
    if queries.fresh is not None:
        conditions.append(queries.fresh[:, None])
    if keys.fresh is not None:
        conditions.append(keys.fresh)
    return conditions


def _piece(x: Shaped[AnyArray, "*#B #N #T #S"], queries: Span, keys: Span) -> Array:
    return keys.of(queries.of(x, -2), -1)


def _by_group(x: Shaped[Array, "..."], heads: tuple[int, ...]) -> Array:
    if x.ndim < 3:
        return x
    heads = (1, 1) if x.shape[-3] == 1 else heads
    return x.reshape(*x.shape[:-3], *heads, *x.shape[-2:])


def only(allowed: Bool[Array, "..."] | None, x: Array, other: float = 0) -> Array:
    """Returns ``x`` where allowed, else exactly ``other``."""
    return x if allowed is None else jnp.where(allowed, x, other)


def no_rows(q: Float[Array, "*B K G t H"]) -> Rows:
    """Returns rows that have read nothing yet."""
    one = q[..., 0]
    return Rows(placement.full_like(one, -jnp.inf), placement.full_like(one, 0))


def extend(rows: Rows, block: Scores) -> tuple[Rows, Array, Array]:
    """Returns rows with one more block, its exponentials, and the factor of earlier sums.

    Source: online softmax, Milakov and Gimelshein 2018.
    """
    logits = only(block.allowed, block.logits, -jnp.inf)
    peak = jax.lax.stop_gradient(jnp.maximum(rows.peak, logits.max(-1)))
    base = jnp.where(peak == -jnp.inf, 0, peak)
    exponentials = jnp.exp(logits - base[..., None])
    factor = jnp.exp(rows.peak - base)
    return Rows(peak, rows.total * factor + exponentials.sum(-1)), exponentials, factor


def log_sum_exp(rows: Rows) -> Array:
    """Computes the log-sum-exp: -inf for a row that may read nothing, NaN for one that reads a NaN."""
    empty = rows.total == 0
    return jnp.where(empty, -jnp.inf, rows.peak + jnp.log(jnp.where(empty, 1, rows.total)))


def softmax(block: Scores, rows: Rows) -> Float[Array, "*B K G t s"]:
    """Computes a block's weights from the sums over its whole rows."""
    base = jnp.where(rows.peak == -jnp.inf, 0, rows.peak)[..., None]
    divisor = jnp.where(rows.total == 0, 1, rows.total)[..., None]
    return only(block.allowed, jnp.exp(block.logits - base) / divisor)


def kept(key, rate: float, heads: tuple[int, ...], T: int, queries: Span, keys: Span) -> Array:
    """Returns the weights [*B K G t s] that dropout keeps, as for the whole matrix; heads is [*B K G]."""
    row = jnp.arange(math.prod(heads), dtype=jnp.uint32).reshape(*heads, 1, 1)
    row = row * jnp.uint32(T) + queries.indices[:, None].astype(jnp.uint32)
    row = dropout.of_whole(row, math.prod(heads) * T)
    return dropout.keep_block(key, rate, row, keys.indices.astype(jnp.uint32))


def no_gradient(given: Operands) -> Operands:
    """Returns zeros to sum gradients in, float32 at least."""
    wide = jax.tree.map(lambda x: x.astype(widened(x.dtype)), given)
    return jax.tree.map(lambda x: placement.full_like(x, 0), wide)


def spread(
    into: Operands, d_q: Array, d_logits: Array, given: Operands, block: Scores, queries, keys
) -> tuple[Operands, Array]:
    """Adds a block's part to the gradients; that of its queries, scaled, is carried as ``d_q``."""
    d_logits = only(block.allowed, d_logits)
    bias, softcap = into.bias, into.softcap
    if bias is not None:
        share = _summed_like(ungrouped(d_logits), _piece(bias, queries, keys))
        bias = _add_piece(bias, share, queries, keys)
    if block.raw is not None:
        bent = jnp.tanh(block.raw)
        slope = 1 - bent**2
        softcap = softcap + jnp.sum(d_logits * (bent - block.raw * slope))
        d_logits = d_logits * slope
    q, k = queries.of(given.q, -2), keys.of(given.k, -2)
    d_q = d_q + jnp.einsum("...kgts,...ksh->...kgth", d_logits, k, precision=EXACT)
    d_k = jnp.einsum("...kgts,...kgth->...ksh", d_logits, q, precision=EXACT)
    return Operands(into.q, keys.add(into.k, d_k, -2), bias, softcap), d_q


def _summed_like(x: Array, like: Array) -> Array:
    axes = tuple(i for i, n in enumerate(like.shape) if n == 1 and x.shape[i] != 1)
    return x.sum(axes, keepdims=True)


def _add_piece(x: Array, new: Array, queries: Span, keys: Span) -> Array:
    """Adds ``new`` where ``_piece`` reads."""
    start = [0] * x.ndim
    start[-2] = queries.start if x.shape[-2] > 1 else 0
    start[-1] = keys.start if x.shape[-1] > 1 else 0
    return jax.lax.dynamic_update_slice(x, _piece(x, queries, keys) + new, start)
