"""tokamax's fused kernels (Triton and Mosaic) for NVIDIA GPUs, the extra ``crossattn[tokamax]``.

Causal masks, windows to the left and lengths become the kernels' own arguments; what else a mask says
is a matrix. Operands are cleaned before and the output is repaired after (``crossattn.ops.masks.lowering``).

Run here: tokamax 0.0.12 with its "xla" implementation, which takes the same arguments. Not run: its
Triton and Mosaic kernels, which need a GPU.
"""

import importlib
from typing import Any

import jax.numpy as jnp

from crossattn.ops import platforms
from crossattn.ops.backends import AttentionOutput
from crossattn.ops.masks import Mask, lowering
from crossattn.types import Array, Float, Key


def rank(platform: str) -> int | None:
    """After cuDNN on GPU; elsewhere only by name."""
    return 20 if platform == "gpu" else None


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
) -> AttentionOutput:
    """See ``crossattn.attend``."""
    _refuse(q, bias, softcap, dropout_key, return_weights, return_lse)
    fused = platforms.platform() == "gpu"
    implementations = _implementations(q, fused)
    kernel = _library().dot_product_attention
    T, S = q.shape[-3], k.shape[-3]
    # Its window is laid out by key and read by query (0.0.12), so right only where T = S.
    square = T == S or not lowering.lower(mask, T, S).left
    lowered = lowering.lower(mask, T, S) if square else _unlowered(mask)
    compute = q.dtype if fused else jnp.float32
    dtype, (q, k, v) = q.dtype, (x.astype(compute) for x in (q, k, v))
    if not isinstance(scale, (int, float)):
        q, scale = (q * scale).astype(compute), 1.0
    prepared = lowering.prepare(q, k, v, bias, mask, lowered)
    operands, keywords = lowering.folded(prepared, lowered, q.shape[:-3])
    keywords |= dict(scale=scale, logits_soft_cap=softcap, implementation=implementations)
    try:
        out = kernel(*operands, **keywords)
    except ExceptionGroup as refusals:
        reasons = "; ".join(str(reason) for reason in refusals.exceptions)
        raise NotImplementedError(f"tokamax: {reasons}") from refusals
    out = out.reshape(*q.shape[:-1], v.shape[-1])
    return AttentionOutput(lowering.repair(out, prepared).astype(dtype))


def _library() -> Any:
    try:
        library = importlib.import_module("tokamax")
    except ImportError as error:
        raise NotImplementedError(
            f"tokamax cannot be imported ({error}); pip install 'crossattn[tokamax]'"
        ) from error
    # In a program without absl's it would parse the command line itself, and fail at what it finds.
    flags = importlib.import_module("absl.flags").FLAGS
    if not flags.is_parsed():
        flags.mark_as_parsed()
    return library


def _implementations(q: Array, fused: bool) -> tuple[str, ...]:
    """On GPU never "xla", which makes the matrix: then another backend is the better one."""
    if not fused:
        return ("xla",)
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        # Their products of float32 go through tf32 or bfloat16.
        raise NotImplementedError(f"tokamax's kernels take bfloat16 or float16, not {q.dtype}")
    return "mosaic", "triton"


def _unlowered(mask: Mask | None) -> lowering.Lowered:
    return lowering.Lowered(False, None, None, None, Mask(()) if mask is None else mask)


def _refuse(q: Array, bias, softcap, dropout_key, weights: bool, lse: bool) -> None:
    if weights:
        raise NotImplementedError("tokamax does not return weights")
    if lse:
        raise NotImplementedError("tokamax's interface does not return the log-sum-exp")
    if dropout_key is not None:
        raise NotImplementedError("tokamax's interface has no dropout")
    if softcap is not None and bias is not None:
        raise NotImplementedError("tokamax adds the bias before the softcap, not after")
    if softcap is not None and not isinstance(softcap, (int, float)):
        raise NotImplementedError("tokamax takes a softcap that is a plain number")
    if q.dtype == jnp.float64:
        raise NotImplementedError("tokamax computes its softmax in float32")
