"""Attention as einsums in float32 at least, the whole [T, S] matrix in memory.

It refuses nothing, so it is what runs where no faster kernel keeps the contract, and where the problem is
so small that none is faster. The tests hold it to float64 numpy as they do the others
(``crossattn.testing.oracle``).
"""

from typing import Any

import jax
import jax.numpy as jnp

from crossattn.ops import backends, dropout, platforms
from crossattn.ops.blockwise import scores
from crossattn.ops.call import AttentionOutput, Call
from crossattn.ops.promotion import as_written, widened
from crossattn.types import Array, Bool, Float


def rank(platform: str) -> int | None:
    """Returns its rank: last everywhere; on CPU "chunked" leaves small problems to it."""
    return 0 if platform == "cpu" else 100


def attend(call: Call) -> AttentionOutput:
    """Computes ``crossattn.attend`` by einsums."""
    q, k, v, mask = call.q, call.k, call.v, call.mask
    allowed = None if mask is None else mask.block(*map(jnp.arange, call.lengths))
    options = (allowed, call.bias, call.scale, call.softcap)
    if call.dropout_key is None and backends.few_queries(q, k):
        read = _one_query if platforms.platform() == "cpu" else _few_queries
        out, weights, lse = read(q, k, v, *options)
    else:
        dropped = call.dropout_rate, call.dropout_key
        out, weights, lse = _attend(q, k, v, *options, *dropped, clean=True)
    weights, lse = weights if call.return_weights else None, lse if call.return_lse else None
    return AttentionOutput(out, weights, lse)


def _cleaned(q, k, v, allowed, bias, scale, softcap):
    return _attend(q, k, v, allowed, bias, scale, softcap, 0.0, None, clean=True)


def _with_gradients(read):
    """Differentiates a reading by clean operands: in the gradient a NaN could stay hidden."""
    read = jax.custom_jvp(read)

    @read.defjvp
    @as_written
    def jvp(primals, tangents):
        return jax.jvp(_cleaned, primals, tangents)

    return read


@_with_gradients
def _one_query(q, k, v, allowed, bias, scale, softcap):
    """Reads the memory once for one query a row, as in cached decoding.

    Cleaning would write all of it anew, so it is done only when a NaN shows in the result.
    """
    arguments = (q, k, v, allowed, bias, scale, softcap)
    plain = _attend(q, k, v, allowed, bias, scale, softcap, 0.0, None, clean=False)
    spoilt = jnp.isnan(plain[0]).any()
    return jax.lax.cond(spoilt, lambda: _cleaned(*arguments), lambda: plain)


@_with_gradients
def _few_queries(q, k, v, allowed, bias, scale, softcap):
    """Does the same on accelerators, whose products leave a value out while they read it.

    A NaN in a key is in its own logit alone, where the mask hides it. Values that no query reads are
    left out; where one of the queries that share them may and another may not, they are cleaned.
    """
    allowed, bias = _readable(allowed, bias)
    shared = _shared(allowed, k.shape[-2], q.shape[-2])
    poison: Any = 0
    if shared is not None:
        v = jnp.where(shared, v, 0)
    elif allowed is not None:
        poison = _by_head(scores.poison(v), q.shape[-2])[..., None, :]
        v = jnp.where(jnp.isfinite(v), v, 0)
    return _attend(q, k, v, allowed, bias, scale, softcap, 0.0, None, clean=False, poison=poison)


def _shared(
    allowed: Bool[Array, "..."] | None, K: int, N: int
) -> Bool[Array, "*#B #S #K 1"] | None:
    """Returns the values that every query of their head reads; None where queries differ."""
    if allowed is None:
        return None
    allowed = allowed.reshape((1,) * (3 - allowed.ndim) + allowed.shape)
    if allowed.shape[-2] != 1 or (allowed.shape[-3] != 1 and K != N):
        return None
    return jnp.swapaxes(allowed[..., 0, :], -1, -2)[..., None]


def _readable(allowed: Any, bias: Any) -> tuple[Any, Any]:
    """Splits a bias into finite numbers and a mask: a sum with -inf leaves NaN in gradients."""
    if bias is None:
        return allowed, None
    readable = bias != -jnp.inf
    return readable if allowed is None else allowed & readable, jnp.where(readable, bias, 0)


def _attend(
    q, k, v, allowed, bias, scale, softcap, rate, dropout_key, *, clean: bool, poison: Any = 0
):
    """Computes output [*B T N Hv], weights [*B N T S] and log-sum-exp [*B N T].

    0 * NaN is NaN, so NaN and Inf of a masked key would reach outputs and gradients through the
    products. ``clean`` takes them out of the operands and brings them back as NaN logits, which
    the mask can hide: ``poison``.
    """
    *batch, T, N, _ = q.shape
    S, K = k.shape[-3:-1]
    compute = widened(q.dtype)
    if clean:
        k_poison = _by_head(scores.poison(k) + scores.poison(v), N)
        poison = _by_head(scores.poison(q), N)[..., :, None] + k_poison[..., None, :]
        q, k, v = (jnp.where(jnp.isfinite(x), x, 0) for x in (q, k, v))

    grouped = (q.astype(compute) * scale).reshape(*batch, T, K, N // K, q.shape[-1])
    k, v = k.astype(compute), v.astype(compute)
    logits = jnp.einsum("...tkgh,...skh->...kgts", grouped, k, precision=scores.EXACT)
    logits = logits.reshape(*batch, N, T, S)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    allowed, bias = _readable(allowed, bias)
    if bias is not None:
        logits = logits + bias.astype(compute)
    weights, lse = _softmax(logits + poison, allowed)

    kept = weights
    if dropout_key is not None:
        kept = dropout.dropout(weights, rate, dropout_key)
    kept = kept.reshape(*batch, K, N // K, T, S)
    out = jnp.einsum("...kgts,...skh->...tkgh", kept, v, precision=scores.EXACT)
    out = out.reshape(*batch, T, N, v.shape[-1]).astype(q.dtype)
    return out, weights, lse.astype(jnp.float32)


def _by_head(poison: Float[Array, "*B X K"], N: int) -> Float[Array, "*B N X"]:
    return jnp.moveaxis(jnp.repeat(poison, N // poison.shape[-1], axis=-1), -1, -2)


def _softmax(
    logits: Float[Array, "*B N T S"], allowed: Bool[Array, "..."] | None
) -> tuple[Float[Array, "*B N T S"], Float[Array, "*B N T"]]:
    """Computes the softmax over allowed keys and its log-sum-exp; with none allowed, 0 and -inf."""
    if allowed is not None:
        logits = jnp.where(allowed, logits, -jnp.inf)
    peak = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    base = jnp.where(peak == -jnp.inf, 0, peak)
    exponentials = jnp.exp(logits - base)
    total = exponentials.sum(-1, keepdims=True)
    divisor = jnp.where(total == 0, 1, total)
    lse = jnp.where(total == 0, -jnp.inf, base + jnp.log(divisor))
    return exponentials / divisor, lse[..., 0]
