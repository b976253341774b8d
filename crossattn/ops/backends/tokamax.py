"""tokamax's fused kernels (Triton and Mosaic) for NVIDIA GPUs, the extra ``crossattn[tokamax]``.

Causal masks, windows to the left and lengths become the kernels' own arguments; what else a mask says
is a matrix. Operands are cleaned before and the output is repaired after (``crossattn.ops.masks.lowering``).

Its Mosaic kernels (0.0.17, on an H100) fail on, or compute wrong gradients for, what is repaired here:
negative scales, matrices whose rows are not multiples of 16 bytes, matrices that keys share. Tests run its
"xla" implementation, which takes the same arguments, and ``make gpu`` the kernels.
"""

import importlib
from typing import Any

import jax.numpy as jnp

from crossattn.ops import platforms
from crossattn.ops.call import AttentionOutput, Call
from crossattn.ops.masks import lowering
from crossattn.types import Array

_WIDEST = 256
"""Head size up to which the shared memory of a multiprocessor holds a block of keys."""
_ROW = 16
"""Queries and keys that a matrix is padded to multiples of: rows of so many bytes are copied."""


def rank(platform: str) -> int | None:
    """Returns its rank: after cuDNN on GPU, elsewhere by name only."""
    return 20 if platform == "gpu" else None


def attend(call: Call) -> AttentionOutput:
    """Computes ``crossattn.attend`` by tokamax."""
    call.refuse("tokamax", "weights", "log-sum-exp", "dropout", "traced softcap", "float64")
    if call.softcap is not None and call.bias is not None:
        raise NotImplementedError("tokamax adds the bias before the softcap, not after")
    fused = platforms.platform() == "gpu"
    widest = max(call.q.shape[-1], call.v.shape[-1])
    if fused and widest > _WIDEST:
        raise NotImplementedError(
            f"tokamax's kernels take head sizes up to {_WIDEST}, not {widest}"
        )
    options: dict[str, Any] = dict(implementation=_implementations(call.q, fused))
    compute = _library().dot_product_attention
    T, S = call.lengths
    # Its window is laid out by key and read by query (0.0.12), so right only where T = S.
    kernel = lowering.kernel(call, call.q.dtype if fused else jnp.float32, windows=T == S)
    operands, keywords, scale = _fitted(kernel)
    options |= keywords | dict(scale=scale, logits_soft_cap=call.softcap)
    try:
        return kernel.output(compute(*operands, **options)[:, :T])
    except ExceptionGroup as refusals:
        reasons = "; ".join(str(reason) for reason in refusals.exceptions)
        raise NotImplementedError(f"tokamax: {reasons}") from refusals


def _fitted(kernel: lowering.Kernel) -> tuple[tuple, dict[str, Any], Any]:
    """Returns operands, keywords and scale with a positive scale and whole, padded matrices.

    A backward pass copies rows of the transposed matrix too.
    """
    (q, k, v, bias, mask), keywords, scale = kernel.operands, kernel.keywords, kernel.scale
    if scale < 0:
        q, scale = -q, -scale
    if bias is None and mask is None:
        return (q, k, v, None, None), keywords, scale
    T, S = q.shape[1], k.shape[1]
    more = -T % _ROW, -S % _ROW
    q, k, v = (lowering.padded(x, {1: n}) for x, n in ((q, more[0]), (k, more[1]), (v, more[1])))
    bias, mask = (None if x is None else _whole(x, S, more) for x in (bias, mask))
    if mask is None and more[1]:
        keywords = {"key_value_seq_lengths": jnp.full(k.shape[:1], S, jnp.int32)} | keywords
    return (q, k, v, bias, mask), keywords, scale


def _whole(matrix: Array, S: int, more: tuple[int, int]) -> Array:
    """Returns [#B #N #T S] with so many more queries and keys; the keys are masked."""
    matrix = jnp.broadcast_to(matrix, (*matrix.shape[:-1], S))
    return lowering.enlarged(matrix, more[0] if matrix.shape[2] > 1 else 0, more[1])


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
    """Returns tokamax's kernels; on GPU never "xla", which makes the matrix."""
    if not fused:
        return ("xla",)
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        # Their products of float32 go through tf32 or bfloat16.
        raise NotImplementedError(f"tokamax's kernels take bfloat16 or float16, not {q.dtype}")
    return "mosaic", "triton"
