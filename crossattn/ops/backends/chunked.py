"""Attention a block of the matrix at a time: plain JAX, any platform, memory linear in T and S.

Blocks that hold nothing to read are skipped. It has derivatives of any order in forward and reverse
mode, the first of them in linear memory too.

Source: Rabe and Staats 2021, "Self-attention does not need O(n^2) memory"; online softmax, Milakov and
Gimelshein 2018; the backward pass, Dao et al. 2022, "FlashAttention".
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from crossattn.ops import derivative, dropout, platforms
from crossattn.ops.backends import few_queries
from crossattn.ops.blockwise import blocks, scores
from crossattn.ops.blockwise.blocks import Plan
from crossattn.ops.blockwise.scores import EXACT, Operands, Rows, Setting
from crossattn.ops.call import AttentionOutput, Call, is_symbolic
from crossattn.ops.derivative import Derivative
from crossattn.ops.masks import Mask, lengths, slices
from crossattn.ops.parallel.placement import alike, full_like
from crossattn.types import Array, Float

# Up to so many logits the reference, which has them all in memory, was not slower; measured on CPU
# (experiments/bench/block_sizes.py), for the others an estimate.
_SMALL = {"cpu": 1 << 18, "gpu": 1 << 24, "tpu": 1 << 24}


def rank(platform: str) -> int | None:
    """Returns its rank: after compiled and fused kernels, before the reference."""
    return -5 if platform == "cpu" else 50


def unsuited(q: Float[Array, "*B T N H"], k: Float[Array, "*B S K H"]) -> str | None:
    """Returns the reason for which another backend is the better choice for these shapes."""
    if few_queries(q, k):
        return "for few queries, as in decoding, the reference reads keys and values where they lie"
    logits = math.prod(q.shape[:-1]) * k.shape[-3]
    if is_symbolic(logits):
        return None  # The length may turn out to be any.
    if logits <= _SMALL[platforms.platform()]:
        return f"with {logits} logits in all, it is faster to compute them at once"
    return None


def attend(call: Call) -> AttentionOutput:
    """Computes ``crossattn.attend`` a block at a time."""
    call.refuse("it", "weights")
    q, k, v, mask, bias = call.q, call.k, call.v, call.mask, call.bias
    (T, S), plan, known = call.lengths, None, call.known
    if is_symbolic(T, S):
        if call.dropout_key is not None:
            raise NotImplementedError("it has no dropout for symbolic lengths")
        plan = blocks.plan_of_symbols(T, S)
        q, k, v, mask, bias = _padded(plan, q, k, v, mask, bias)
    options = call.scale, call.softcap, call.dropout_key
    given, setting, values = scores.prepare(q, k, v, mask, bias, *options)
    rows = math.prod((*q.shape[:-3], q.shape[-2]))
    plan = blocks.plan(T, S, rows, mask) if plan is None else plan
    if known is not None:
        known = alike((_known(given.q, k.shape[-2], known), given))[0]
    out_and_sums: Any = _attend(plan, call.dropout_rate, given, values, setting, known)
    out, lse, sums = out_and_sums
    out = jnp.swapaxes(scores.ungrouped(out), -2, -3).astype(q.dtype)
    lse, *sums = (scores.ungrouped(x[..., None])[..., 0] for x in (lse, *sums))
    lse = lse.astype(jnp.float32) if call.return_lse else None
    if plan.T is not T:
        out, lse = out[..., :T, :, :], None if lse is None else lse[..., :T]
    return AttentionOutput(out, None, lse, tuple(sums) if call.return_rows else None)


def _known(q: Float[Array, "*B K G T H"], K: int, known: Any) -> tuple[Array, Rows]:
    """Returns output and sums of the rows in the layout and dtype of the blocks."""
    out, *sums = (x.astype(q.dtype) for x in known)
    peak, total = (x.reshape(*x.shape[:-2], K, -1, x.shape[-1]) for x in sums)
    return scores.grouped(out, K), Rows(peak, total)


def _padded(plan: Plan, q, k, v, mask: Mask | None, bias) -> tuple:
    """Pads with zeros, hidden by the mask, to lengths that are a number of whole blocks."""
    T, S = q.shape[-3], k.shape[-3]

    def pad(x: Any, q_axis: int | None, k_axis: int | None) -> Any:
        x = jnp.asarray(x)
        if q_axis is None and k_axis is None:
            return x
        width: list[tuple[int, Any]] = [(0, 0)] * x.ndim
        for axis, more in ((q_axis, plan.T - T), (k_axis, plan.S - S)):
            if axis is not None:
                width[axis] = (0, more)
        return jnp.pad(x, width)

    mask = slices.map_arrays(Mask(()) if mask is None else mask, pad) & lengths(
        jnp.asarray(S, jnp.int32), jnp.asarray(T, jnp.int32)
    )
    bias = None if bias is None else pad(bias, *slices.matrix_axes(bias))
    return pad(q, -3, None), pad(k, None, -3), pad(v, None, -3), mask, bias


def _attend(plan: Plan, rate: float, given: Operands, v: Any, setting: Setting, known: Any) -> Any:
    """Computes output [*B K G T Hv], log-sum-exp [*B K G T] and, for the backward pass, the rows' sums."""

    def run(given, v, setting, known):
        out, rows = _forward(plan, rate, given, v, setting) if known is None else known
        return out, scores.log_sum_exp(rows), rows

    rule = partial(_attend_jvp, plan, rate)
    return derivative.call("chunked attention", run, rule, given, v, setting, known)


@partial(jax.jit, static_argnums=(0, 1))
def _forward(plan: Plan, rate: float, given: Operands, v: Array, setting: Setting) -> Any:
    """Computes the output and the sums of its rows."""
    lead, Hv = given.q.shape[:-2], v.shape[-1]

    def begin(queries):
        q = queries.of(given.q, -2)
        return full_like(q, 0, (*q.shape[:-1], Hv)), scores.no_rows(q)

    def step(queries, keys, carry, state):
        mixed, rows = carry
        block = scores.scores(given, setting, queries, keys)
        rows, exponentials, factor = scores.extend(rows, block)
        if setting.key is not None:
            keep = scores.kept(setting.key, rate, lead, plan.T, queries, keys)
            exponentials = jnp.where(keep, exponentials, 0)
        mixed = mixed * factor[..., None] + _mix(exponentials, keys.of(v, -2))
        return (mixed, rows), state

    def end(queries, carry, state):
        mixed, rows = carry
        out, (peak, total) = state
        divisor = jnp.where(rows.total == 0, 1, rows.total)[..., None]
        share = 1.0 if setting.key is None else dropout.kept_scale(rate)
        poison = queries.of(setting.q_poison, -1)
        mixed = scores.only(rows.total[..., None] != 0, share * mixed / divisor + poison[..., None])
        peak = queries.put(peak, rows.peak + poison, -1)
        return queries.put(out, mixed, -2), Rows(peak, queries.put(total, rows.total, -1))

    state = full_like(given.q, 0, (*lead, plan.T, Hv)), scores.no_rows(given.q)
    return blocks.sweep(plan, blocks.visits(setting.mask, plan), state, begin, step, end)


def _attend_jvp(plan: Plan, rate: float, primals, tangents) -> Any:
    given, v, setting, _ = primals
    # Not _forward: the second order differentiates this, and a loop it cannot.
    primals_out: Any = _attend(plan, rate, *primals)
    out, lse, rows = primals_out
    at = (given, v, setting, out, rows)
    d_out, d_lse = derivative.linear(_derivative(plan, rate), at, tangents[:2], (out, lse))
    return primals_out, (d_out, d_lse)


def _derivative(plan: Plan, rate: float) -> Derivative:
    """Returns the derivative of output and log-sum-exp in the operands and v."""

    def forward(residuals, tangents):
        given, v, setting, *_ = residuals

        def blockwise(given, v):
            out, rows = _forward(plan, rate, given, v, setting)
            return out, scores.log_sum_exp(rows)

        return jax.jvp(blockwise, (given, v), tangents)[1]

    def backward(residuals, cotangents):
        return _backward(plan, rate, *residuals, *cotangents)

    def smooth(residuals, tangents):
        given, v, setting, *_ = residuals
        return jax.jvp(partial(_dense, plan, rate, setting), (given, v), tangents)[1]

    return Derivative(forward, backward, smooth)


def _backward(plan: Plan, rate: float, *operands: Any) -> Any:
    """Computes ``_gradients``, differentiably."""
    run = partial(_gradients, plan, rate)
    return derivative.call(
        "chunked attention, backward", run, partial(_backward_jvp, plan, rate), *operands
    )


@partial(jax.jit, static_argnums=(0, 1))
def _gradients(plan: Plan, rate: float, given, v, setting, out, rows, d_out, d_lse) -> Any:
    lead = given.q.shape[:-2]
    mean = jnp.sum(d_out * out, -1)  # of the weights' gradients, under the weights

    def begin(queries):
        return full_like(queries.of(given.q, -2), 0)

    def step(queries, keys, d_q, state):
        d_given, d_v = state
        block = scores.scores(given, setting, queries, keys)
        weights = scores.softmax(block, Rows(*(queries.of(x, -1) for x in rows)))
        from_out = queries.of(d_out, -2)
        d_weights = jnp.einsum("...kgth,...ksh->...kgts", from_out, keys.of(v, -2), precision=EXACT)
        used = weights
        if setting.key is not None:
            keep = scores.kept(setting.key, rate, lead, plan.T, queries, keys)
            share = dropout.kept_scale(rate)
            d_weights = jnp.where(keep, share * d_weights, 0)
            used = jnp.where(keep, share * weights, 0)
        part = jnp.einsum("...kgts,...kgth->...ksh", used, from_out, precision=EXACT)
        # A weight of 1 is its own mean: exactly so, where two orders of summation would leave noise.
        above = jnp.where(weights == 1, 0, d_weights - queries.of(mean, -1)[..., None])
        d_logits = weights * (above + queries.of(d_lse, -1)[..., None])
        d_given, d_q = scores.spread(d_given, d_q, d_logits, given, block, queries, keys)
        return d_q, (d_given, keys.add(d_v, part, -2))

    def end(queries, d_q, state):
        d_given, d_v = state
        d_given = Operands(
            queries.put(d_given.q, d_q, -2), d_given.k, d_given.bias, d_given.softcap
        )
        return d_given, d_v

    state = scores.no_gradient(given), full_like(v, 0)
    state = blocks.sweep(plan, blocks.visits(setting.mask, plan), state, begin, step, end)
    return jax.tree.map(lambda gradient, x: gradient.astype(x.dtype), state, (given, v))


def _backward_jvp(plan: Plan, rate: float, primals, tangents) -> Any:
    """Differentiates through the whole matrix: there out and rows follow from the operands."""
    given, v, setting, _, _, d_out, d_lse = primals

    def first_order(given, v, d_out, d_lse):
        dense = partial(_dense, plan, rate, setting)
        return jax.vjp(dense, given, v)[1]((d_out, d_lse))

    primals_out = _backward(plan, rate, *primals)
    moving = (*tangents[:2], *tangents[5:])
    # Without the checkpoint a backward pass over this would hold the matrix until it runs.
    return primals_out, jax.jvp(jax.checkpoint(first_order), (given, v, d_out, d_lse), moving)[1]


def _dense(plan: Plan, rate: float, setting: Setting, given: Operands, v: Array) -> Any:
    """Computes output and log-sum-exp from all logits at once, by operations that JAX differentiates."""
    queries, keys = blocks.whole(plan.T), blocks.whole(plan.S)
    block = scores.scores(given, setting, queries, keys)
    rows, exponentials, _ = scores.extend(scores.no_rows(given.q), block)
    weights = exponentials / jnp.where(rows.total == 0, 1, rows.total)[..., None]
    if setting.key is not None:
        keep = scores.kept(setting.key, rate, given.q.shape[:-2], plan.T, queries, keys)
        weights = jnp.where(keep, dropout.kept_scale(rate) * weights, 0)
    poison = scores.only(rows.total != 0, setting.q_poison)
    return _mix(weights, v) + poison[..., None], scores.log_sum_exp(rows) + poison


def _mix(weights: Float[Array, "*B K G t s"], v: Float[Array, "*B K s H"]) -> Array:
    return jnp.einsum("...kgts,...ksh->...kgth", weights, v, precision=EXACT)
