"""``jax.nn.dot_product_attention``: cuDNN's fused kernel on NVIDIA GPUs, plain XLA elsewhere.

Causal masks, windows to the left and lengths become the kernel's own arguments, so that it skips what
they hide; what else a mask says is a matrix. Alone it breaks three promises: a query that may read
nothing gets the mean of the values, NaN leaks out of masked keys, and an unequal value size is refused.
Here the operands are cleaned first and the result is repaired after (``crossattn.ops.masks.lowering``).

Tests run XLA's implementation, which takes the same arguments, and ``make gpu`` cuDNN's
(``crossattn.ops.cudnn``).
"""

from typing import Any

import jax
import jax.numpy as jnp

from crossattn.ops import cudnn, platforms
from crossattn.ops.call import AttentionOutput, Call
from crossattn.ops.masks import lowering
from crossattn.types import Array

_DTYPES = (jnp.bfloat16, jnp.float16)  # of cuDNN


def rank(platform: str) -> int | None:
    """Returns its rank: first on GPU; elsewhere it is a slower reference, so by name only."""
    return 10 if platform == "gpu" else None


def attend(call: Call) -> AttentionOutput:
    """Computes ``crossattn.attend`` by ``jax.nn.dot_product_attention``."""
    on_gpu = platforms.platform() == "gpu"
    call.refuse("jax.nn.dot_product_attention", "weights", "softcap", "dropout", "float64")
    (_refuse_on_gpu if on_gpu else _refuse_elsewhere)(call)
    # XLA's path rounds the weights to the operands' dtype; in float32 there is nothing to round to.
    kernel = lowering.kernel(call, call.q.dtype if on_gpu else jnp.float32, fold_scale=on_gpu)
    if not on_gpu:
        options: dict[str, Any] = dict(scale=kernel.scale, implementation="xla") | kernel.keywords
        return kernel.output(jax.nn.dot_product_attention(*kernel.operands, **options))
    known = None if call.known is None else _folded(call.known, call.q.dtype)
    out, lse = cudnn.attention(
        kernel.operands,
        kernel.keywords,
        scale=kernel.scale,
        known=known,
        return_lse=call.return_lse,
        return_rows=call.return_rows,
    )
    return kernel.output(out, lse)


def _folded(known: Any, dtype: Any) -> tuple[Array, Array]:
    """Returns output [B T N Hv] and log-sum-exp [B N T] with 0 where they were repaired."""
    out, lse = known[0], known[1] + jnp.log(known[2])
    out, lse = (jnp.where(jnp.isfinite(x), x, 0) for x in (out, lse))
    return out.reshape(-1, *out.shape[-3:]).astype(dtype), lse.reshape(-1, *lse.shape[-2:])


def _refuse_on_gpu(call: Call) -> None:
    dtype, others = call.q.dtype, (call.k.dtype, call.v.dtype)
    if dtype not in _DTYPES:
        raise NotImplementedError(f"cuDNN attention takes bfloat16 or float16, not {dtype}")
    if others != (dtype, dtype):
        raise NotImplementedError(
            f"cuDNN attention takes one dtype, not {dtype} to read {others[0]} and {others[1]}"
        )
    if not platforms.one_device():
        raise NotImplementedError(
            "it runs on each device's own examples and heads, and crossattn.axes.RULES does not know "
            "the axes of this mesh; xa.use_rules names them"
        )


def _refuse_elsewhere(call: Call) -> None:
    call.refuse("jax.nn.dot_product_attention", "log-sum-exp")
    if call.q.shape[-1] != call.v.shape[-1]:
        raise NotImplementedError(
            "jax.nn.dot_product_attention needs values of the keys' head size"
        )
