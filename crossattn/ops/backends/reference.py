"""Attention as einsums in float32 at least, the whole [T, S] matrix in memory.

It refuses nothing, so it is what runs where no faster kernel keeps the contract, and where the problem is
so small that none is faster. The tests hold it to float64 numpy as they do the others
(``crossattn.testing.oracle``).
"""

from typing import Any

import jax
import jax.numpy as jnp

from crossattn.ops import dropout
from crossattn.ops.backends import AttentionOutput
from crossattn.ops.masks import Mask
from crossattn.ops.promotion import as_written
from crossattn.types import Array, Bool, Float, Key

# Full float32 products also where the hardware would round their inputs.
_EXACT = jax.lax.Precision.HIGHEST


def rank(platform: str) -> int | None:
    """Last everywhere; on CPU, as "chunked" leaves small problems to it, still often the one that runs."""
    return 0 if platform == "cpu" else 100


def attend(
    q: Float[Array, "*B T N H"],
    k: Float[Array, "*B S K H"],
    v: Float[Array, "*B S K Hv"],
    mask: Mask | None,
    *,
    bias: Float[Array, "*#B #N #T #S"] | None,
    scale: float | Float[Array, ""],
    softcap: float | Float[Array, ""] | None,
    dropout_rate: float,
    dropout_key: Key[Array, ""] | None,
    return_weights: bool,
    return_lse: bool,
) -> AttentionOutput:
    """See ``crossattn.attend``."""
    allowed = None if mask is None else mask.block(jnp.arange(q.shape[-3]), jnp.arange(k.shape[-3]))
    if q.shape[-3] == 1 and dropout_key is None:
        out, weights, lse = _one_query(q, k, v, allowed, bias, scale, softcap)
    else:
        options = (allowed, bias, scale, softcap, dropout_rate, dropout_key)
        out, weights, lse = _attend(q, k, v, *options, careful=True)
    return AttentionOutput(out, weights if return_weights else None, lse if return_lse else None)


@jax.custom_jvp
def _one_query(q, k, v, allowed, bias, scale, softcap):
    """One query a row, as in cached decoding, is bound by reading the memory once.

    Cleaning would write all of it anew, so it is done only when a NaN shows in the result. In the
    gradient it could stay hidden, so differentiation goes the careful way from the start.
    """
    arguments = (q, k, v, allowed, bias, scale, softcap, 0.0, None)
    plain = _attend(*arguments, careful=False)
    spoilt = jnp.isnan(plain[0]).any()
    return jax.lax.cond(spoilt, lambda: _attend(*arguments, careful=True), lambda: plain)


@_one_query.defjvp
@as_written
def _one_query_jvp(primals, tangents):
    def careful(q, k, v, allowed, bias, scale, softcap):
        return _attend(q, k, v, allowed, bias, scale, softcap, 0.0, None, careful=True)

    return jax.jvp(careful, primals, tangents)


def _attend(q, k, v, allowed, bias, scale, softcap, dropout_rate, dropout_key, *, careful: bool):
    """Output [*B T N Hv], weights [*B N T S] and log-sum-exp [*B N T].

    0 * NaN is NaN, so NaN and Inf of a masked key would reach outputs and gradients through the
    products. ``careful`` takes them out of the operands and brings them back as NaN logits, which
    the mask can hide.
    """
    *batch, T, N, _ = q.shape
    S, K = k.shape[-3:-1]
    compute = jnp.promote_types(q.dtype, jnp.float32)
    poison: Any = 0
    if careful:
        k_poison = _by_head(_poison(k) + _poison(v), N)
        poison = _by_head(_poison(q), N)[..., :, None] + k_poison[..., None, :]
        q, k, v = (jnp.where(jnp.isfinite(x), x, 0) for x in (q, k, v))

    grouped = (q.astype(compute) * scale).reshape(*batch, T, K, N // K, q.shape[-1])
    logits = _logits(grouped, k.astype(compute)).reshape(*batch, N, T, S)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    if bias is not None:
        # -inf in the bias is a mask too; kept out of the sum, it leaves no NaN in gradients.
        readable = bias != -jnp.inf
        logits = logits + jnp.where(readable, bias, 0).astype(compute)
        allowed = readable if allowed is None else allowed & readable
    weights, lse = _softmax(logits + poison, allowed)

    kept = weights
    if dropout_key is not None:
        kept = dropout.dropout(weights, dropout_rate, dropout_key)
    out = _mix(kept.reshape(*batch, K, N // K, T, S), v.astype(compute))
    out = out.reshape(*batch, T, N, v.shape[-1]).astype(q.dtype)
    return out, weights, lse.astype(jnp.float32)


def _poison(x: Float[Array, "*B X N H"]) -> Float[Array, "*B X N"]:
    """NaN for each vector that has an element which is not finite, else 0."""
    return jax.lax.stop_gradient(x * 0).astype(jnp.float32).sum(-1)


def _by_head(poison: Float[Array, "*B X K"], N: int) -> Float[Array, "*B N X"]:
    """One row for each query head; grouped heads share their key head's."""
    return jnp.moveaxis(jnp.repeat(poison, N // poison.shape[-1], axis=-1), -1, -2)


def _logits(
    q: Float[Array, "*B T K G H"], k: Float[Array, "*B S K H"]
) -> Float[Array, "*B K G T S"]:
    return jnp.einsum("...tkgh,...skh->...kgts", q, k, precision=_EXACT)


def _mix(
    weights: Float[Array, "*B K G T S"], v: Float[Array, "*B S K Hv"]
) -> Float[Array, "*B T K G Hv"]:
    return jnp.einsum("...kgts,...skh->...tkgh", weights, v, precision=_EXACT)


def _softmax(
    logits: Float[Array, "*B N T S"], allowed: Bool[Array, "..."] | None
) -> tuple[Float[Array, "*B N T S"], Float[Array, "*B N T"]]:
    """Softmax over what is allowed, and its log-sum-exp; with nothing allowed, exactly 0 and -inf."""
    if allowed is not None:
        logits = jnp.where(allowed, logits, -jnp.inf)
    peak = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    base = jnp.where(peak == -jnp.inf, 0, peak)
    exponentials = jnp.exp(logits - base)
    total = exponentials.sum(-1, keepdims=True)
    divisor = jnp.where(total == 0, 1, total)
    lse = jnp.where(total == 0, -jnp.inf, base + jnp.log(divisor))
    return exponentials / divisor, lse[..., 0]
