"""The oracle: attention as einsums in float32, the whole [T, S] matrix in memory.

It refuses nothing, so it is also what runs where no faster kernel keeps the contract.
"""

import jax
import jax.numpy as jnp

from crossattn.ops import dropout
from crossattn.ops.masks import Mask
from crossattn.types import Array, Bool, Float, Key


def rank(platform: str) -> int | None:
    """Last on accelerators; on CPU, first."""
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
) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B N T S"] | None]:
    """See ``crossattn.attend``."""
    *batch, T, N, _ = q.shape
    S, K = k.shape[-3:-1]
    compute = jnp.promote_types(q.dtype, jnp.float32)
    # 0 * NaN is NaN, so NaN and Inf of a masked key would reach outputs and gradients through the
    # products. They leave the operands here and come back as NaN logits, which the mask can hide.
    (q, q_poison), (k, k_poison), (v, v_poison) = _finite(q), _finite(k), _finite(v)
    poison = _by_head(q_poison, N)[..., :, None] + _by_head(k_poison + v_poison, N)[..., None, :]

    grouped = (q.astype(compute) * scale).reshape(*batch, T, K, N // K, q.shape[-1])
    logits = _product("...tkgh,...skh->...kgts", grouped, k.astype(compute))
    logits = logits.reshape(*batch, N, T, S)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    allowed = None if mask is None else mask.block(jnp.arange(T), jnp.arange(S))
    if bias is not None:
        # -inf in the bias is a mask too; kept out of the sum, it leaves no NaN in gradients.
        readable = bias != -jnp.inf
        logits = logits + jnp.where(readable, bias, 0).astype(compute)
        allowed = readable if allowed is None else allowed & readable
    weights = _softmax(logits + poison, allowed)

    kept = weights
    if dropout_key is not None:
        kept = dropout.dropout(weights, dropout_rate, dropout_key)
    kept = kept.reshape(*batch, K, N // K, T, S)
    out = _product("...kgts,...skh->...tkgh", kept, v.astype(compute))
    out = out.reshape(*batch, T, N, v.shape[-1]).astype(q.dtype)
    return out, weights if return_weights else None


def _finite(x: Float[Array, "*B X N H"]) -> tuple[Float[Array, "*B X N H"], Float[Array, "*B X N"]]:
    """x with 0 for what is not finite, and NaN for each vector that had such an element (else 0)."""
    finite = jnp.isfinite(x)
    poison = jnp.where(finite.all(-1), 0.0, jnp.nan).astype(jnp.float32)
    return jnp.where(finite, x, 0), poison


def _by_head(poison: Float[Array, "*B X K"], N: int) -> Float[Array, "*B N X"]:
    """One row for each query head; grouped heads share their key head's."""
    return jnp.moveaxis(jnp.repeat(poison, N // poison.shape[-1], axis=-1), -1, -2)


def _product(equation: str, a: Array, b: Array) -> Array:
    """An einsum at full float32 precision, also where the hardware would round its inputs."""
    return jnp.einsum(equation, a, b, precision=jax.lax.Precision.HIGHEST)


def _softmax(
    logits: Float[Array, "*B N T S"], allowed: Bool[Array, "..."] | None
) -> Float[Array, "*B N T S"]:
    """Softmax over what is allowed; a row with nothing allowed is exactly 0."""
    if allowed is not None:
        logits = jnp.where(allowed, logits, -jnp.inf)
    peak = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    exponentials = jnp.exp(logits - jnp.where(peak == -jnp.inf, 0, peak))
    total = exponentials.sum(-1, keepdims=True)
    return exponentials / jnp.where(total == 0, 1, total)
