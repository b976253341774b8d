"""``jax.nn.dot_product_attention``: cuDNN's fused kernel on NVIDIA GPUs, plain XLA elsewhere.

Causal masks, windows to the left and lengths become the kernel's own arguments, so that it skips what
they hide; what else a mask says is a matrix. Alone it breaks three promises: a query that may read
nothing gets the mean of the values, NaN leaks out of masked keys, and an unequal value size is refused.
Here the operands are cleaned first and the result is repaired after (``crossattn.ops.masks.lowering``).

Run here: XLA's implementation, which takes the same arguments. Not run yet: cuDNN (``crossattn.ops.cudnn``).
"""

from typing import Any

import jax
import jax.numpy as jnp

from crossattn.ops import cudnn, platforms
from crossattn.ops.backends import AttentionOutput
from crossattn.ops.masks import Mask, lowering
from crossattn.types import Array, Float, Key

REUSES = True
_DTYPES = (jnp.bfloat16, jnp.float16)  # of cuDNN


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
    return_rows: bool = False,
    known: Any = None,
) -> AttentionOutput:
    """See ``crossattn.attend``; for ``known``, ``backends``."""
    on_gpu = platforms.platform() == "gpu"
    _refuse(q, softcap, dropout_key, return_weights)
    (_refuse_on_gpu if on_gpu else _refuse_elsewhere)(q, k, v, return_lse)
    lowered = lowering.lower(mask, q.shape[-3], k.shape[-3])
    # XLA's path rounds the weights to the operands' dtype; in float32 there is nothing to round to.
    compute = q.dtype if on_gpu else jnp.float32
    dtype, (q, k, v) = q.dtype, (x.astype(compute) for x in (q, k, v))
    if on_gpu and not isinstance(scale, (int, float)):
        q, scale = (q * scale).astype(compute), 1.0
    prepared = lowering.prepare(q, k, v, bias, mask, lowered)
    operands, keywords = lowering.folded(prepared, lowered, q.shape[:-3])
    if not on_gpu:
        if bias is not None:
            operands = (*operands[:3], operands[3].astype(compute), operands[4])
        options: dict[str, Any] = dict(scale=scale, implementation="xla") | keywords
        out = jax.nn.dot_product_attention(*operands, **options)
        return AttentionOutput(_repaired(out, q, v, prepared).astype(dtype))
    known = None if known is None else _folded(known, compute)
    wanted = dict(known=known, return_lse=return_lse, return_rows=return_rows)
    out, lse = cudnn.attention(operands, keywords, scale=scale, **wanted)
    output = AttentionOutput(_repaired(out, q, v, prepared).astype(dtype))
    if lse is None:
        return output
    lse = lse.reshape(*q.shape[:-3], q.shape[-2], q.shape[-3])
    if return_lse:
        output = output._replace(lse=lowering.repair_lse(lse, prepared))
    return output._replace(rows=(lse, jnp.ones_like(lse))) if return_rows else output


def _repaired(out: Array, q: Array, v: Array, prepared: lowering.Prepared) -> Array:
    return lowering.repair(out.reshape(*q.shape[:-1], v.shape[-1]), prepared)


def _folded(known: Any, dtype: Any) -> tuple[Array, Array]:
    """Output [B T N Hv] and log-sum-exp [B N T] as the kernel gave them; what was repaired is 0."""
    out, lse = known[0], known[1] + jnp.log(known[2])
    out, lse = (jnp.where(jnp.isfinite(x), x, 0) for x in (out, lse))
    return out.reshape(-1, *out.shape[-3:]).astype(dtype), lse.reshape(-1, *lse.shape[-2:])


def _refuse(q: Array, softcap, dropout_key, weights: bool) -> None:
    if weights:
        raise NotImplementedError("jax.nn.dot_product_attention does not return weights")
    if softcap is not None:
        raise NotImplementedError("jax.nn.dot_product_attention has no softcap")
    if dropout_key is not None:
        raise NotImplementedError("jax.nn.dot_product_attention has no dropout")
    if q.dtype == jnp.float64:
        raise NotImplementedError("jax.nn.dot_product_attention computes its softmax in float32")


def _refuse_on_gpu(q: Array, k: Array, v: Array, lse: bool) -> None:
    if q.dtype not in _DTYPES:
        raise NotImplementedError(f"cuDNN attention takes bfloat16 or float16, not {q.dtype}")
    if (k.dtype, v.dtype) != (q.dtype, q.dtype):
        raise NotImplementedError(
            f"cuDNN attention takes one dtype, not {q.dtype} to read {k.dtype} and {v.dtype}"
        )
    if not platforms.one_device():
        raise NotImplementedError(
            "it runs on each device's own examples and heads, and crossattn.axes.RULES does not know "
            "the axes of this mesh; xa.use_rules names them"
        )


def _refuse_elsewhere(q: Array, k: Array, v: Array, lse: bool) -> None:
    if lse:
        raise NotImplementedError("the log-sum-exp of jax.nn.dot_product_attention has no gradient")
    if q.shape[-1] != v.shape[-1]:
        raise NotImplementedError(
            "jax.nn.dot_product_attention needs values of the keys' head size"
        )
