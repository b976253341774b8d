"""Statistics of a softmax's rows and columns, a block at a time; ``stats.py`` is their public face.

Every differentiable statistic is a mean under the weights of a quantity cheap to compute for each query and
key; so one backward pass over the blocks serves any loss on any of them.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from crossattn.ops import derivative
from crossattn.ops.blockwise import blocks, scores
from crossattn.ops.blockwise.blocks import Plan, Span
from crossattn.ops.blockwise.scores import Operands, Rows, Scores, Setting
from crossattn.ops.derivative import Derivative
from crossattn.ops.parallel import placement
from crossattn.types import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Asked:
    """Quantities to average: keys' positions [*#B 1 1 1 S]; spans' ends [*#B 1 1 #T], or None."""

    positions: Any
    first: Any
    last: Any

    def inside(self, queries: Span, keys: Span) -> Array:
        """Returns which keys of a block lie in their queries' spans."""
        first, last = (queries.of(x, -1)[..., None] for x in (self.first, self.last))
        return (first <= keys.indices) & (keys.indices < last)


class Smooth(NamedTuple):
    """Differentiable statistics: [*B K G T], but mass [*B K G S] and top_weights [*B K G T top_k]."""

    lse: Any
    entropy: Any
    maximum: Any
    expected: Any
    span_mass: Any
    mass: Any
    top_weights: Any


class Places(NamedTuple):
    """The keys of the largest weights: argmax [*B K G T], top_indices [*B K G T top_k]."""

    argmax: Any
    top_indices: Any


def summarise(plan: Plan, top_k: int, given: Operands, setting: Setting, asked: Asked) -> Any:
    """Computes ``Smooth``, ``Places`` and, for the backward pass, ``Rows``."""
    run, rule = partial(_forward, plan, top_k), partial(_summarise_jvp, plan, top_k)
    return derivative.call("attention statistics", run, rule, given, setting, asked)


@partial(jax.jit, static_argnums=(0, 1))
def _forward(plan: Plan, top_k: int, given: Operands, setting: Setting, asked: Asked) -> Any:
    visits = blocks.visits(setting.mask, plan)
    begin = partial(_begin, top_k, given, asked)
    step, end = partial(_step, top_k, given, setting, asked), partial(_end, setting)
    # What rows hold before their first block has the shapes of what they hold after the last.
    state = begin(blocks.whole(plan.T))
    row, places, rows = blocks.sweep(plan, visits, state, begin, step, end)

    def receive(queries, keys, carry, mass):
        weights = scores.softmax(scores.scores(given, setting, queries, keys), _at(rows, queries))
        return carry, keys.add(mass, weights.sum(-2), -1)

    mass = placement.full_like(given.q, 0, (*given.q.shape[:-2], plan.S))
    mass = blocks.sweep(plan, visits, mass, lambda _: (), receive, lambda _, carry, mass: mass)
    return row._replace(lse=scores.log_sum_exp(rows), mass=mass), places, rows


def _begin(top_k: int, given: Operands, asked: Asked, queries: Span) -> Any:
    q = queries.of(given.q, -2)
    zero, none = (
        placement.full_like(q[..., 0], 0),
        placement.full_like(q[..., 0].astype(jnp.int32), -1),
    )
    top = (*zero.shape, top_k)
    sums = Smooth(
        lse=None,
        entropy=zero,
        maximum=zero,
        expected=zero,
        span_mass=None if asked.first is None else zero,
        mass=None,
        top_weights=placement.full_like(zero, -jnp.inf, top),
    )
    return sums, Places(none, placement.full_like(none, -1, top)), scores.no_rows(q)


def _step(top_k: int, given, setting, asked: Asked, queries: Span, keys: Span, carry, state) -> Any:
    """Adds a block to sums of exponentials times what is averaged; ``top_weights`` holds logits.

    The entropy averages logits relative to the peak so far: small where it matters.
    """
    sums, places, before = carry
    block = scores.scores(given, setting, queries, keys)
    rows, exponentials, factor = scores.extend(before, block)
    base = jnp.where(rows.peak == -jnp.inf, 0, rows.peak)
    depth = scores.only(block.allowed, block.logits - base[..., None])
    moved = jnp.where(before.peak == -jnp.inf, 0, before.peak - base) * before.total
    logits = scores.only(block.allowed, block.logits, -jnp.inf)
    highest = (keys.start + jnp.argmax(logits, -1)).astype(jnp.int32)
    places = places._replace(argmax=jnp.where(rows.peak > before.peak, highest, places.argmax))
    positions = keys.of(asked.positions, -1)
    sums = sums._replace(
        entropy=(sums.entropy + moved) * factor + jnp.sum(exponentials * depth, -1),
        expected=sums.expected * factor + jnp.sum(exponentials * positions, -1),
    )
    if asked.first is not None:
        inside = jnp.where(asked.inside(queries, keys), exponentials, 0)
        sums = sums._replace(span_mass=sums.span_mass * factor + inside.sum(-1))
    if top_k:
        indices = jnp.broadcast_to(keys.indices.astype(jnp.int32), logits.shape)
        indices = jnp.concatenate([places.top_indices, indices], -1)
        top, at = jax.lax.top_k(jnp.concatenate([sums.top_weights, logits], -1), top_k)
        places = places._replace(top_indices=jnp.take_along_axis(indices, at, -1))
        sums = sums._replace(top_weights=top)
    return (sums, places, rows), state


def _end(setting: Setting, queries: Span, carry, state) -> Any:
    """Turns sums into means and writes them."""
    sums, places, rows = carry
    empty = rows.total == 0
    total, base = jnp.where(empty, 1, rows.total), jnp.where(empty, 0, rows.peak)
    poison = queries.of(setting.q_poison, -1)

    def mean(x):
        return jnp.where(empty, 0, x / total + poison)

    top = jnp.exp(sums.top_weights - base[..., None]) / total[..., None] + poison[..., None]
    means = sums._replace(
        entropy=jnp.where(empty, 0, jnp.log(total) - mean(sums.entropy)),
        maximum=mean(jnp.ones_like(total)),
        expected=mean(sums.expected),
        span_mass=None if sums.span_mass is None else mean(sums.span_mass),
        top_weights=jnp.where(empty[..., None], 0, top),
    )
    top = jnp.where(sums.top_weights == -jnp.inf, -1, places.top_indices)
    places = places._replace(top_indices=top)
    carry = means, places, rows._replace(peak=rows.peak + poison)
    # Rows are the last axis, but for what is top_k for each of them.
    axis = {True: -2, False: -1}
    return jax.tree.map(lambda x, new: queries.put(x, new, axis[x.ndim > base.ndim]), state, carry)


def _at(rows: Any, queries: Span) -> Any:
    return jax.tree.map(lambda x: queries.of(x, -1), rows)


def _summarise_jvp(plan: Plan, top_k: int, primals, tangents) -> Any:
    # Not _forward: so that a second derivative comes to the rule below, not to a loop without one.
    primals_out: Any = summarise(plan, top_k, *primals)
    smooth, *_ = primals_out
    rule = Derivative(_refuse_forward, lambda at, d: (_backward(plan, at, d),), _refuse_second)
    return primals_out, derivative.linear(rule, (*primals, *primals_out), (tangents[0],), smooth)


def _backward(plan: Plan, residuals: Any, d: Smooth) -> Any:
    """Computes ``_gradients`` and refuses its derivative."""
    run = partial(_gradients, plan)
    return derivative.call(
        "attention statistics, backward", run, partial(_backward_jvp, plan), residuals, d
    )


@partial(jax.jit, static_argnums=0)
def _gradients(plan: Plan, residuals: Any, d: Smooth) -> Operands:
    """Computes gradients of the operands.

    A loss whose derivative in the weight of query t on key s is c has, in its logit, the derivative
    ``weight * (c - mean of c)``; but for mass, the mean follows from the statistics themselves.
    """
    given, setting, asked, _, places, rows = residuals
    mean = _mean_slope(plan, residuals, d)

    def begin(queries):
        return placement.full_like(queries.of(given.q, -2), 0)

    def step(queries, keys, d_q, state):
        block = scores.scores(given, setting, queries, keys)
        own = _at(rows, queries)
        row = _at(d._replace(top_weights=None, mass=None), queries)
        slope = _slope(block, own, row, asked, queries, keys)
        slope = slope + keys.of(d.mass, -1)[..., None, :]
        for index, share in [
            (queries.of(places.argmax, -1), row.maximum),
            *((queries.of(places.top_indices[..., i], -1), queries.of(d.top_weights[..., i], -1))
              for i in range(d.top_weights.shape[-1])),
        ]:  # fmt: skip
            slope = slope + jnp.where(keys.indices == index[..., None], share[..., None], 0)
        slope = slope + (row.lse - queries.of(mean, -1))[..., None]
        d_logits = scores.softmax(block, own) * slope
        state, d_q = scores.spread(state, d_q, d_logits, given, block, queries, keys)
        return d_q, state

    def end(queries, d_q, state):
        return Operands(queries.put(state.q, d_q, -2), state.k, state.bias, state.softcap)

    visits = blocks.visits(setting.mask, plan)
    block = blocks.sweep(plan, visits, scores.no_gradient(given), begin, step, end)
    return jax.tree.map(lambda gradient, x: gradient.astype(x.dtype), block, given)


def _mean_slope(plan: Plan, residuals: Any, d: Smooth) -> Array:
    """Computes the mean of a loss's derivatives in each query's weights, under them."""
    given, setting, _, smooth, _, rows = residuals
    mean = jnp.sum(d.top_weights * smooth.top_weights, -1)
    for name in ("entropy", "maximum", "expected", "span_mass"):
        if getattr(smooth, name) is not None:
            mean = mean + getattr(d, name) * getattr(smooth, name)
    zero = placement.full_like(mean, 0)

    def begin(queries):
        return queries.of(zero, -1)

    def step(queries, keys, carry, state):
        weights = scores.softmax(scores.scores(given, setting, queries, keys), _at(rows, queries))
        return carry + jnp.sum(weights * keys.of(d.mass, -1)[..., None, :], -1), state

    def end(queries, carry, state):
        return queries.put(state, carry, -1)

    def of_mass():
        visits = blocks.visits(setting.mask, plan)
        return blocks.sweep(plan, visits, zero, begin, step, end)

    return mean + jax.lax.cond(jnp.any(d.mass != 0), of_mass, lambda: zero)


def _slope(
    block: Scores, rows: Rows, row: Smooth, asked: Asked, queries: Span, keys: Span
) -> Array:
    """Computes a loss's derivative in the weights by entropy, position and span."""
    total = jnp.where(rows.total == 0, 1, rows.total)
    log_weights = block.logits - rows.peak[..., None] - jnp.log(total)[..., None]
    slope = row.expected[..., None] * keys.of(asked.positions, -1)
    slope = slope - row.entropy[..., None] * scores.only(block.allowed, log_weights)
    if asked.first is not None:
        slope = slope + jnp.where(asked.inside(queries, keys), row.span_mass[..., None], 0)
    return slope


def _backward_jvp(plan: Plan, primals, tangents) -> Any:
    primals_out = _backward(plan, *primals)
    moving = jax.tree.leaves(tangents)
    rule = Derivative(_refuse_second, _refuse_second, _refuse_second)
    return primals_out, derivative.linear(rule, primals, moving, primals_out)


def _refuse_forward(residuals, tangents):
    raise NotImplementedError(
        "attention_stats has no forward-mode derivatives (jax.jvp); take those of reverse mode (jax.grad), "
        "or the statistics of the weights that attend(..., return_weights=True) gives."
    )


def _refuse_second(residuals, tangents):
    raise NotImplementedError(
        "attention_stats has first derivatives only; for a second, take the statistics of the weights "
        "that attend(..., return_weights=True) gives."
    )
