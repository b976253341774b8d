"""A fused kernel for CPUs: the score matrix is never in memory, operands are read where they lie.

Written in C++ (``crossattn/ops/native/``), built on first use where there is a compiler.
It has reverse-mode gradients of any order; for forward mode (``jax.jvp``) ask for "reference".

Source: online softmax, Milakov and Gimelshein 2018; the backward pass, Dao et al. 2022, "FlashAttention".
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossattn.ops import native
from crossattn.ops.backends import Attended, reference
from crossattn.ops.masks import Mask, explicit
from crossattn.types import Array, Float, Key


def rank(platform: str) -> int | None:
    """First on CPU; nowhere else."""
    return -10 if platform == "cpu" else None


def attend(
    q: Float[Array, "*B T N H"],
    k: Float[Array, "*B S K H"],
    v: Float[Array, "*B S K Hv"],
    mask: Mask | None,
    *,
    bias: Float[Array, "*#B #N #T #S"] | None,
    scale: Any,
    softcap: float | Float[Array, ""] | None,
    dropout_rate: float,
    dropout_key: Key[Array, ""] | None,
    return_weights: bool,
    return_lse: bool,
) -> Attended:
    """See ``crossattn.attend``."""
    _refuse(q, bias, softcap, dropout_key, return_weights)
    native.load()
    lead, T, S = q.ndim - 3, q.shape[-3], k.shape[-3]
    if mask is None:
        allowed = jnp.ones((1,) * (lead + 2) + (0,), bool)
    else:
        allowed = mask.block(jnp.arange(T), jnp.arange(S))
        allowed = allowed.reshape((1,) * (q.ndim - allowed.ndim) + allowed.shape)
        allowed = jnp.broadcast_to(allowed, (*allowed.shape[:-1], S))
    dtype, (q, k, v) = q.dtype, (x.astype(jnp.float32) for x in (q, k, v))
    if not isinstance(scale, (int, float)):
        q, scale = q * scale, 1.0
    out, lse = _forward(q, k, v, allowed, float(scale))
    return Attended(out.astype(dtype), None, lse if return_lse else None)


def _refuse(q: Array, bias, softcap, dropout_key, return_weights: bool) -> None:
    if jax.default_backend() != "cpu":
        raise NotImplementedError(f"it runs on CPU, not on {jax.default_backend()}")
    if jax.device_count() > 1:
        raise NotImplementedError("XLA cannot partition it over several devices")
    if q.dtype == jnp.float64:
        raise NotImplementedError("it computes in float32")
    if return_weights:
        raise NotImplementedError("it never has the weights")
    for name, value in (("bias", bias), ("softcap", softcap), ("dropout", dropout_key)):
        if value is not None:
            raise NotImplementedError(f"it has no {name}")


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _forward(q, k, v, allowed, scale: float):
    """Output [*B T N Hv] and log-sum-exp [*B N T]."""
    out, peak, total = _sums(q, k, v, allowed, scale)
    return out, _log_sum_exp(peak, total)


def _sums(q, k, v, allowed, scale: float) -> Any:
    """Output; of each row of logits, its peak and its sum of exponentials, [*B N T]."""
    out = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), jnp.float32)
    row = jax.ShapeDtypeStruct((*q.shape[:-3], q.shape[-2], q.shape[-3]), jnp.float32)
    call = jax.ffi.ffi_call("CrossattnForward", (out, row, row), vmap_method="broadcast_all")
    return call(q, k, v, allowed, scale=np.float32(scale))


def _log_sum_exp(peak, total):
    """-inf for a row that may read nothing; NaN for one that reads a NaN."""
    return jnp.where(total == 0, -jnp.inf, peak + jnp.log(jnp.where(total == 0, 1, total)))


def _forward_forward(q, k, v, allowed, scale):
    out, peak, total = _sums(q, k, v, allowed, scale)
    return (out, _log_sum_exp(peak, total)), (q, k, v, allowed, out, peak, total)


def _forward_backward(scale, residuals, cotangents):
    gradients: Any = _backward(*residuals, *cotangents, scale)
    return (*gradients, None)


@partial(jax.custom_vjp, nondiff_argnums=(9,))
def _backward(q, k, v, allowed, out, peak, total, d_out, d_lse, scale: float):
    """Gradients of q, k and v."""
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (q, k, v))
    call = jax.ffi.ffi_call("CrossattnBackward", shapes, vmap_method="broadcast_all")
    return call(q, k, v, allowed, out, peak, total, d_out, d_lse, scale=np.float32(scale))


def _backward_forward(q, k, v, allowed, out, peak, total, d_out, d_lse, scale):
    gradients = _backward(q, k, v, allowed, out, peak, total, d_out, d_lse, scale)
    return gradients, (q, k, v, allowed, d_out, d_lse)


def _backward_backward(scale, residuals, cotangents):
    """Second order, through the reference: there out, peak and total follow from q, k and v."""
    q, k, v, allowed, d_out, d_lse = residuals

    def first_order(q, k, v, d_out, d_lse):
        def plain(q, k, v):
            mask = explicit(allowed) if allowed.size else None
            options: dict[str, Any] = dict(bias=None, softcap=None)
            options |= dict(dropout_rate=0.0, dropout_key=None, return_weights=False)
            found = reference.attend(q, k, v, mask, scale=scale, return_lse=True, **options)
            return found.out, found.lse

        return jax.vjp(plain, q, k, v)[1]((d_out, d_lse))

    d_q, d_k, d_v, dd_out, dd_lse = jax.vjp(first_order, q, k, v, d_out, d_lse)[1](cotangents)
    return d_q, d_k, d_v, None, None, None, None, dd_out, dd_lse


_forward.defvjp(_forward_forward, _forward_backward)
_backward.defvjp(_backward_forward, _backward_backward)
