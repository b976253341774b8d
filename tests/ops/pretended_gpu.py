"""A GPU that is not there: kernels are chosen as for one, and their calls of cuDNN run as plain products.

What cuDNN is told and what is made of its results is then held to the oracle on any machine; in float32,
which cuDNN itself does not take, rounding hides nothing. JAX's own checks stay, but for that dtype.
"""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.interpreters import mlir

from crossattn.ops import platforms
from crossattn.ops.backends import jax_nn


@contextlib.contextmanager
def pretended_gpu(float32=False):
    """Inside, programs for this CPU are lowered as for a GPU of Hopper's generation.

    With ``float32``, cuDNN takes it too.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cudnn, "check_cudnn_version", lambda: 91000)
        patched.setattr(cudnn, "check_compute_capability", lambda version: version <= "9.0")
        patched.setitem(platforms._ALIASES, "cpu", "gpu")
        if float32:
            patched.setattr(jax_nn, "_DTYPES", (jnp.float32,))
            patched.setattr(cudnn, "check_layout", _check_layout_of_bfloat16(cudnn.check_layout))
            patched.setattr(cudnn, "get_large_negative_number", lambda dtype: jnp.float32(-2e12))
        with platforms.lowered_for(platforms.Target("gpu", True)):
            yield


def _check_layout_of_bfloat16(check):
    def narrow(x):
        floating = x is not None and jnp.issubdtype(x.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) if floating else x

    return lambda *arguments: check(*map(narrow, arguments[:-1]), arguments[-1])


def _logits(q, k, bias, q_seqlen, kv_seqlen, *, scale, variadic_args, mask_type, window):
    """Float32 [B N T S], with what may not be read far below all others, as cuDNN has it."""
    groups = q.shape[2] // k.shape[2]
    logits = scale * jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, groups, 2), precision="highest")
    if variadic_args[0]:
        logits = logits + bias
    T, S = logits.shape[-2:]
    rows, columns = jnp.arange(T)[:, None], jnp.arange(S)
    allowed = jnp.ones((T, S), bool)
    if mask_type in (cudnn.MaskType.CAUSAL, cudnn.MaskType.PADDING_CAUSAL):
        allowed &= columns <= rows
    if window:  # with the query's own place
        allowed &= columns > rows - window
    if cudnn.has_padding(mask_type):
        allowed = allowed & (columns < kv_seqlen[:, None, None, None])
        allowed = allowed & (rows < q_seqlen[:, None, None, None])
    return jnp.where(allowed, logits, -jnp.inf)


def _common(parameters):
    assert parameters["layout"] == cudnn.AttentionLayout.BTNH.value
    assert parameters["dropout_rate"] == 0
    kept = {name: parameters[name] for name in ("scale", "variadic_args", "mask_type")}
    return kept | {"window": parameters["sliding_window_length"]}


def _weights(logits, lse):
    return jnp.exp(logits - jnp.where(jnp.isfinite(lse), lse, 0)[..., None])


def _forward(q, k, v, bias, q_seqlen, kv_seqlen, *others, is_training, **parameters):
    wide = [x.astype(jnp.float32) for x in (q, k, v, bias)]
    logits = _logits(wide[0], wide[1], wide[3], q_seqlen, kv_seqlen, **_common(parameters))
    lse = jax.nn.logsumexp(logits, -1)
    v = jnp.repeat(wide[2], q.shape[2] // k.shape[2], 2)
    weights = jax.nn.softmax(jnp.where(jnp.isfinite(lse)[..., None], logits, 0), -1)
    out = jnp.einsum("bnts,bsnh->btnh", weights, v, precision="highest")
    return [out.astype(q.dtype), *([lse] if is_training else [])]


def _backward(q, k, v, bias, q_seqlen, kv_seqlen, *others, **parameters):
    """Differentiates from the given log-sum-exp and output, as the kernel does."""
    lse, out, d_out = others[-3:]
    K, groups = k.shape[2], q.shape[2] // k.shape[2]
    wide = [x.astype(jnp.float32) for x in (q, k, v, bias, out, d_out)]
    logits = _logits(wide[0], wide[1], wide[3], q_seqlen, kv_seqlen, **_common(parameters))
    q32, k32, v32 = wide[0], *(jnp.repeat(x, groups, 2) for x in wide[1:3])
    weights = _weights(logits, lse)

    def product(form, a, b):
        return jnp.einsum(form, a, b, precision="highest")

    d_weights = product("btnh,bsnh->bnts", wide[5], v32)
    mean = jnp.moveaxis((wide[4] * wide[5]).sum(-1), 1, 2)
    d_logits = weights * (d_weights - mean[..., None])
    d_q = parameters["scale"] * product("bnts,bsnh->btnh", d_logits, k32)
    d_k = parameters["scale"] * product("bnts,btnh->bsnh", d_logits, q32)
    d_v = product("bnts,btnh->bsnh", weights, wide[5])
    d_k, d_v = (x.reshape(*k.shape[:2], K, groups, -1).sum(3) for x in (d_k, d_v))
    found = [x.astype(q.dtype) for x in (d_q, d_k, d_v)]
    if parameters["variadic_args"][1]:
        shared = [i for i, n in enumerate(bias.shape) if n == 1 and d_logits.shape[i] != 1]
        found.append(d_logits.sum(shared, keepdims=True).astype(bias.dtype))
    return found


for _primitive, _run in (
    (cudnn._dot_product_attention_fwd_p, _forward),
    (cudnn._dot_product_attention_bwd_p, _backward),
):
    mlir.register_lowering(_primitive, mlir.lower_fun(_run, multiple_results=True), platform="cpu")
