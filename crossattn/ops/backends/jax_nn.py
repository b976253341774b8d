"""``jax.nn.dot_product_attention``: cuDNN's fused kernel on NVIDIA GPUs, plain XLA elsewhere.

Causal masks, windows to the left and lengths become the kernel's own arguments, so that it skips what
they hide; what else a mask says is a matrix. Alone it breaks three promises: a query that may read
nothing gets the mean of the values, NaN leaks out of masked keys, and an unequal value size is refused.
Here the operands are cleaned first and the result is repaired after (``crossattn.ops.lowering``).

Run here: XLA's implementation, which takes the same arguments. Not run yet: cuDNN with them.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from crossattn.ops import lowering, platforms
from crossattn.ops.backends import Attended
from crossattn.ops.masks import Mask
from crossattn.types import Array, Float, Key


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
    _refuse(q, v, softcap, dropout_key, return_weights, return_lse)
    lowered = lowering.lower(mask, q.shape[-3], k.shape[-3])
    matrix = bias is not None or bool(lowered.rest.terms)
    implementation = _implementation(q, k, matrix)
    # XLA's path rounds the weights to the operands' dtype; in float32 there is nothing to round to.
    compute = q.dtype if implementation == "cudnn" else jnp.float32
    dtype, (q, k, v) = q.dtype, (x.astype(compute) for x in (q, k, v))
    prepared = lowering.prepare(q, k, v, bias, mask, lowered)
    operands, keywords = lowering.folded(prepared, lowered, q.shape[:-3])
    if bias is not None:
        operands = (*operands[:3], operands[3].astype(compute), operands[4])
    try:
        out = jax.nn.dot_product_attention(
            *operands, scale=scale, implementation=implementation, **keywords
        )
    except RuntimeError as error:
        if implementation != "cudnn":
            raise
        raise NotImplementedError(f"cuDNN: {error}") from error  # none here, or too old
    out = out.reshape(*q.shape[:-1], v.shape[-1])
    return Attended(lowering.repair(out, prepared).astype(dtype))


def _implementation(q: Array, k: Array, matrix: bool) -> Literal["xla", "cudnn"]:
    if platforms.platform() != "gpu":
        return "xla"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"cuDNN attention takes bfloat16 or float16, not {q.dtype}")
    if q.shape[-1] % 8 or q.shape[-1] > 128:
        raise NotImplementedError(
            f"cuDNN attention takes head sizes 8, 16, .. 128, not {q.shape[-1]}"
        )
    if matrix and (q.shape[-3] % 2 or k.shape[-3] % 2):
        raise NotImplementedError(
            "cuDNN attention has no gradient for odd lengths under a bias or a mask that is a matrix"
        )
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
