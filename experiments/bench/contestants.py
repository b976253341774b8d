"""Attention functions of other libraries with the signature of ``attend``.

Each is called as its documentation says, without repairs of masks or rows. A library without some option
refuses it by the missing keyword; an error that it raises is a refusal, too.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def jax_nn(q, k, v, mask=None, bias=None, scale=None, return_lse=False):
    """Calls ``jax.nn.dot_product_attention``; its residual is the log-sum-exp, [B T N]."""
    call = partial(jax.nn.dot_product_attention, q, k, v, bias=bias, mask=mask, scale=scale)
    if not return_lse:
        return call()
    out, lse = call(return_residual=True)
    return out, jnp.swapaxes(lse, -1, -2)


def nnx() -> Callable:
    """Returns ``flax.nnx.dot_product_attention``, which sows its weights into a module."""
    from flax import nnx

    def attend(q, k, v, mask=None, bias=None, return_weights=False):
        def call(module=None):
            return nnx.dot_product_attention(q, k, v, mask=mask, bias=bias, module=module)

        if not return_weights:
            return call()
        out, sown = nnx.capture(call, nnx.Intermediate)(nnx.Module())
        return out, sown["attention_weights"][0]

    return attend


def linen() -> Callable:
    """Returns ``flax.linen.dot_product_attention`` with its softmax in float32, and its output cast back.

    It has no grouped heads, so keys and values are repeated.
    """
    from flax import linen

    def attend(q, k, v, mask=None, bias=None, return_weights=False):
        k, v = (jnp.repeat(x, q.shape[-2] // x.shape[-2], axis=-2) for x in (k, v))
        options: Any = dict(mask=mask, bias=bias, force_fp32_for_softmax=True)
        out = linen.dot_product_attention(q, k, v, **options).astype(q.dtype)
        if not return_weights:
            return out
        return out, linen.dot_product_attention_weights(q, k, **options)

    return attend


def tokamax() -> Callable:
    """Returns ``tokamax.dot_product_attention`` with "xla_chunked", which runs on all platforms."""
    import tokamax
    from absl import flags

    if not flags.FLAGS.is_parsed():  # else it parses the arguments of this program
        flags.FLAGS(["conformance"])

    def attend(q, k, v, mask=None, bias=None, scale=None, softcap=None):
        if softcap is not None and bias is not None:
            raise NotImplementedError("its softcap is documented to cap the bias too")
        options: dict[str, Any] = dict(bias=bias, mask=mask, scale=scale)
        options["logits_soft_cap"] = softcap
        return tokamax.dot_product_attention(q, k, v, **options, implementation="xla_chunked")

    return attend


def torch() -> Callable:
    """Returns ``torch``'s ``scaled_dot_product_attention``, called back from JAX with its gradients."""
    import torch

    def sdpa(q, k, v, bias, mask, scale):
        if bias is not None:
            # A boolean mask adds -inf, by its documentation.
            bias = bias.to(q.dtype)
            mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
        q, k, v = (x.transpose(-2, -3) for x in (q, k, v))
        call = torch.nn.functional.scaled_dot_product_attention
        out = call(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[-3] != k.shape[-3])
        return out.transpose(-2, -3)

    def tensor(x):
        if x is None:
            return None
        x = np.asarray(x)
        known = x if x.dtype in (np.bool_, np.float64) else x.astype(np.float32)
        return torch.tensor(known, dtype=getattr(torch, x.dtype.name))

    def array(x, dtype):
        return x.detach().double().numpy().astype(dtype)

    def forward(scale, q, k, v, bias, mask):
        out = sdpa(*(tensor(x) for x in (q, k, v, bias, mask)), scale=scale)
        return array(out, q.dtype)

    def backward(scale, q, k, v, bias, mask, cotangent):
        given = [tensor(x) for x in (q, k, v, bias)]
        leaves = [x.requires_grad_() for x in given if x is not None]
        out = sdpa(*given, mask=tensor(mask), scale=scale)
        gradients = iter(torch.autograd.grad(out, leaves, tensor(cotangent)))
        return tuple(
            None if x is None else array(next(gradients), x.dtype) for x in (q, k, v, bias)
        )

    return partial(_called_back, forward, backward)


def _called_back(forward, backward, q, k, v, mask=None, bias=None, scale=None):
    """Calls a function of numpy arrays, and its gradients, with JAX arrays."""
    if not q.dtype == k.dtype == v.dtype:
        raise NotImplementedError("it takes query, key and value of one dtype")

    def call(q, k, v, bias, mask):
        shape = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype)
        return jax.pure_callback(partial(forward, scale), shape, q, k, v, bias, mask)

    def call_forward(*operands):
        return call(*operands), operands

    def call_backward(operands, cotangent):
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands[:4])
        gradients = jax.pure_callback(partial(backward, scale), like, *operands, cotangent)
        return (*gradients, None)

    differentiable = jax.custom_vjp(call)
    differentiable.defvjp(call_forward, call_backward)
    return differentiable(q, k, v, bias, mask)


OTHERS: dict[str, Callable[[], Callable]] = {
    "jax.nn": lambda: jax_nn,
    "flax.nnx": nnx,
    "flax.linen": linen,
    "tokamax": tokamax,
    "torch": torch,
}


def installed() -> tuple[dict[str, Callable], list[str]]:
    """Returns functions of installed libraries by name, and the names of missing packages."""
    present, missing = {}, []
    for name, make in OTHERS.items():
        try:
            present[name] = make()
        except ImportError:
            missing.append(name)
    return present, missing
