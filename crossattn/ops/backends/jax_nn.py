"""``jax.nn.dot_product_attention``: cuDNN's fused kernel on NVIDIA GPUs, plain XLA elsewhere.

Alone it breaks three promises: a query that may read nothing gets the mean of the values, NaN leaks
out of masked keys, and an unequal value size is refused. Here the operands are cleaned first and the
result is repaired after; what cannot be repaired is refused with its reason.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from crossattn.ops.backends import Attended
from crossattn.ops.masks import Mask
from crossattn.types import Array, Bool, Float, Key


def rank(platform: str) -> int | None:
    """Before the reference on GPU; on CPU it is the same einsum with more passes, so by name only."""
    return 10 if platform == "gpu" else None


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
    implementation = _implementation(q, bias)
    _refuse(q, v, softcap, dropout_key, return_weights, return_lse)
    *batch, T, N, _ = q.shape
    S = k.shape[-3]
    # XLA's path rounds the weights to the operands' dtype; in float32 there is nothing to round to.
    compute = q.dtype if implementation == "cudnn" else jnp.float32
    dtype, q = q.dtype, q.astype(compute)
    k, k_finite = _finite(k.astype(compute))
    v, v_finite = _finite(v.astype(compute))
    ones = (1,) * len(batch) + (1, 1, 1)
    allowed = jnp.ones(ones, bool) if mask is None else mask.materialize(T, S)
    allowed = allowed.reshape((1,) * (len(ones) - allowed.ndim) + allowed.shape)
    if bias is not None:
        readable = bias != -jnp.inf
        bias = jnp.where(readable, bias, 0).astype(compute)
        allowed = allowed & readable

    finite = jnp.repeat(jnp.moveaxis(k_finite & v_finite, -1, -2), N // k.shape[-2], axis=-2)
    reads_poison = jnp.any(allowed & ~finite[..., None, :], axis=-1)
    reads_nothing = ~jnp.any(allowed, axis=-1)

    out = jax.nn.dot_product_attention(
        _one_batch(q, 3, batch),
        _one_batch(k, 3, batch),
        _one_batch(v, 3, batch),
        bias=None if bias is None else _one_batch(bias, 3, batch),
        mask=None if mask is None and bias is None else _one_batch(allowed, 3, batch),
        scale=scale,
        implementation=implementation,
    ).reshape(*batch, T, N, v.shape[-1])
    out = jnp.where(_by_query(reads_nothing), 0, out)
    return Attended(jnp.where(_by_query(reads_poison), jnp.nan, out).astype(dtype))


def _implementation(q: Array, bias: Array | None) -> Literal["xla", "cudnn"]:
    if jax.default_backend() != "gpu":
        return "xla"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"cuDNN attention takes bfloat16 or float16, not {q.dtype}")
    if q.shape[-1] % 8 or q.shape[-1] > 128:
        raise NotImplementedError(
            f"cuDNN attention takes head sizes 8, 16, .. 128, not {q.shape[-1]}"
        )
    if bias is not None and q.shape[-3] % 2:
        raise NotImplementedError("cuDNN attention has no bias gradient for an odd query length")
    return "cudnn"


def _refuse(q: Array, v: Array, softcap, dropout_key, weights: bool, lse: bool) -> None:
    if weights:
        raise NotImplementedError("jax.nn.dot_product_attention does not return weights")
    if lse:
        raise NotImplementedError("the log-sum-exp of jax.nn.dot_product_attention has no gradient")
    if softcap is not None:
        raise NotImplementedError("jax.nn.dot_product_attention has no softcap")
    if dropout_key is not None:
        raise NotImplementedError("jax.nn.dot_product_attention has no dropout")
    if q.shape[-1] != v.shape[-1]:
        raise NotImplementedError(
            "jax.nn.dot_product_attention needs values of the keys' head size"
        )
    if q.dtype == jnp.float64:
        raise NotImplementedError("jax.nn.dot_product_attention computes its softmax in float32")


def _finite(x: Array) -> tuple[Array, Bool[Array, "*B S K"]]:
    finite = jnp.isfinite(x)
    return jnp.where(finite, x, 0), finite.all(-1)


def _one_batch(x: Array, inner: int, batch: list[int]) -> Array:
    """Leading axes folded into one; broadcast to the whole batch unless all are of size 1."""
    own = x.shape[-inner:]
    if any(n != 1 for n in x.shape[:-inner]):
        x = jnp.broadcast_to(x, (*batch, *own))
    return x.reshape(-1, *own)


def _by_query(rows: Bool[Array, "*#B #N #T"]) -> Bool[Array, "*#B #T #N 1"]:
    """A value for each row of logits, laid out beside the output."""
    return jnp.moveaxis(rows, -1, -2)[..., None]
