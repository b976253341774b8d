"""A fused kernel for CPUs: the score matrix is never in memory, operands are read where they lie.

Written in C++ (``crossattn/ops/native/``), built on first use where there is a compiler.
It has gradients of any order; forward mode (``jax.jvp``) recomputes through "chunked" or "reference".

Source: online softmax, Milakov and Gimelshein 2018; the backward pass, Dao et al. 2022, "FlashAttention".
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from crossattn.ops import derivative, native
from crossattn.ops.backends import AttentionOutput, chunked, reference
from crossattn.ops.blockwise import blocks
from crossattn.ops.derivative import Derivative
from crossattn.ops.masks import Explicit, Mask
from crossattn.ops.masks.ranges import ranges
from crossattn.types import Array, Bool, Float, Int, Key

REUSES = True


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
    return_rows: bool = False,
    known: Any = None,
) -> AttentionOutput:
    """See ``crossattn.attend``; for ``known``, ``backends``."""
    _refuse(q, bias, softcap, dropout_key, return_weights)
    if blocks.is_symbolic(*q.shape, *k.shape):
        raise NotImplementedError("an exported program, as symbolic shapes are for, cannot call it")
    native.load()
    allowed = _operands(mask, q.ndim - 3, q.shape[-3], k.shape[-3])
    dtype, (q, k, v) = q.dtype, (x.astype(jnp.float32) for x in (q, k, v))
    if not isinstance(scale, (int, float)):
        q, scale = q * scale, 1.0
    known = None if known is None else tuple(x.astype(jnp.float32) for x in known)
    results: Any = _forward(*blocks.alike((q, k, v, allowed, known)), scale=float(scale))
    lse, rows = results[1] if return_lse else None, results[2:] if return_rows else None
    return AttentionOutput(results[0].astype(dtype), None, lse, rows)


class _Mask(NamedTuple):
    """A mask as the kernel takes it; what is not there has no elements."""

    interval: Int[Array, "*#B #T 2"]
    numbers: Int[Array, "*#B R S"]
    limits: Int[Array, "*#B R #T 2"]
    bytes: Bool[Array, "*#B #N #T S"]


def _operands(mask: Mask | None, lead: int, T: int, S: int) -> _Mask:
    """The mask in memory linear in length, but for matrices that were given as such."""
    nothing = jnp.zeros((*(1,) * lead, 0, 1, 2), jnp.int32)
    compact = _Mask(
        nothing[..., 0, :], nothing[..., 0], nothing, jnp.ones((*(1,) * (lead + 2), 0), bool)
    )
    if mask is None:
        return compact
    said = ranges(mask, T, S)
    if said.first is not None or said.last is not None:
        first = jnp.zeros((1,), jnp.int32) if said.first is None else said.first
        last = jnp.full((1,), S, jnp.int32) if said.last is None else said.last
        compact = compact._replace(interval=_leading(_pairs(first, last), lead + 2))
    if said.limits:
        numbers, pairs = zip(
            *((x.numbers, _pairs(x.low, x.high)) for x in said.limits), strict=True
        )
        numbers, pairs = _stack(numbers, -2), _stack(pairs, -3)
        compact = compact._replace(
            numbers=_leading(numbers, lead + 2), limits=_leading(pairs, lead + 3)
        )
    if said.rest.terms:
        allowed = _leading(said.rest.block(jnp.arange(T), jnp.arange(S)), lead + 3)
        compact = compact._replace(bytes=jnp.broadcast_to(allowed, (*allowed.shape[:-1], S)))
    return compact


def _pairs(low, high):
    return jnp.stack(jnp.broadcast_arrays(low, high), axis=-1).astype(jnp.int32)


def _stack(arrays, axis: int):
    return jnp.stack(jnp.broadcast_arrays(*arrays), axis=axis).astype(jnp.int32)


def _leading(x, ndim: int):
    """With axes of size 1 in front, ``ndim`` in all."""
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)


def _refuse(q: Array, bias, softcap, dropout_key, return_weights: bool) -> None:
    if q.dtype == jnp.float64:
        raise NotImplementedError("it computes in float32")
    if return_weights:
        raise NotImplementedError("it never has the weights")
    for name, value in (("bias", bias), ("softcap", softcap), ("dropout", dropout_key)):
        if value is not None:
            raise NotImplementedError(f"it has no {name}")


def _forward(q, k, v, allowed: _Mask, known: Any, scale: float) -> Any:
    """``_kernel`` with a derivative."""
    run, rule = partial(_kernel, scale=scale), partial(_forward_jvp, scale)
    return derivative.call("CrossattnForward", run, rule, q, k, v, allowed, known)


def _kernel(q, k, v, allowed: _Mask, known: Any, scale: float) -> Any:
    """Output [*B T N Hv]; of each row of logits the log-sum-exp, the peak and the sum, [*B N T].

    The latter two are for the backward pass alone: they carry no gradient. What is known is not
    computed again.
    """
    if known is None:
        out = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), jnp.float32)
        row = jax.ShapeDtypeStruct((*q.shape[:-3], q.shape[-2], q.shape[-3]), jnp.float32)
        known = _call("CrossattnForward", (out, row, row), (q, k, v, *allowed), scale)
    out, peak, total = known
    # -inf for a row that may read nothing; NaN for one that reads a NaN.
    lse = jnp.where(total == 0, -jnp.inf, peak + jnp.log(jnp.where(total == 0, 1, total)))
    return out, lse, peak, total


def _forward_jvp(scale: float, primals, tangents) -> Any:
    primals_out: Any = _forward(*primals, scale=scale)
    out, lse, *rows = primals_out
    at, d_qkv = (*primals[:4], out, *rows), tangents[:3]
    d_out, d_lse = derivative.linear(_derivative(scale), at, d_qkv, (out, lse))
    return primals_out, (d_out, d_lse)


def _derivative(scale: float) -> Derivative:
    """Of output and log-sum-exp in q, k and v; ``_backward`` is its backward pass."""

    def forward(residuals, tangents):
        q, k, v, allowed, *_ = residuals
        module = chunked if chunked.unsuited(q, k) is None else reference
        return jax.jvp(_plain(allowed, scale, module), (q, k, v), tangents)[1]

    def backward(residuals, cotangents):
        return _backward(*residuals, *cotangents, scale=scale)

    def smooth(residuals, tangents):
        q, k, v, allowed, *_ = residuals
        return jax.jvp(_plain(allowed, scale, reference), (q, k, v), tangents)[1]

    return Derivative(forward, backward, smooth)


def _backward(*operands: Any, scale: float) -> Any:
    """``_gradients`` with a derivative."""
    run = partial(_gradients, scale=scale)
    return derivative.call("CrossattnBackward", run, partial(_backward_jvp, scale), *operands)


def _gradients(q, k, v, allowed, out, peak, total, d_out, d_lse, scale: float):
    """Of q, k and v."""
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (q, k, v))
    operands = (q, k, v, *allowed, out, peak, total, d_out, d_lse)
    return _call("CrossattnBackward", shapes, operands, scale)


def _call(target: str, results: tuple, operands: tuple, scale: float) -> tuple:
    call = jax.ffi.ffi_call(target, results, vmap_method="broadcast_all")
    outputs = call(*operands, scale=np.float32(scale))
    # In shard_map the results vary over the mesh as the operands do; the call does not say so.
    return blocks.alike((operands, *outputs))[1:]


def _backward_jvp(scale: float, primals, tangents) -> Any:
    """Second order, through the reference: there out, peak and total follow from q, k and v."""
    q, k, v, allowed, _, _, _, d_out, d_lse = primals

    def first_order(q, k, v, d_out, d_lse):
        return jax.vjp(_plain(allowed, scale, reference), q, k, v)[1]((d_out, d_lse))

    primals_out = _backward(*primals, scale=scale)
    moving = (*tangents[:3], *tangents[7:])
    # Without the checkpoint a backward pass over this would hold the matrix until it runs.
    return primals_out, jax.jvp(jax.checkpoint(first_order), (q, k, v, d_out, d_lse), moving)[1]


def _plain(allowed: _Mask, scale: float, module: Any) -> Any:
    """Output and log-sum-exp as a function of q, k and v, by another backend."""

    def call(q, k, v):
        mask = _again(allowed, q.shape[-3], k.shape[-3])
        options: dict[str, Any] = dict(bias=None, softcap=None)
        options |= dict(dropout_rate=0.0, dropout_key=None, return_weights=False)
        output = module.attend(q, k, v, mask, scale=scale, return_lse=True, **options)
        return output.out, output.lse

    return call


def _again(allowed: _Mask, T: int, S: int) -> Mask:
    """The mask that the operands were made from."""
    matrix = jnp.ones((1, 1, 1), bool)
    keys = jnp.arange(S)
    if allowed.interval.size:
        first, last = jnp.moveaxis(allowed.interval[..., None, :, None, :], -1, 0)
        matrix = matrix & (first <= keys) & (keys < last)
    if allowed.numbers.size:
        low, high = (jnp.moveaxis(allowed.limits, -1, 0)[i][..., None] for i in (0, 1))
        numbers = allowed.numbers[..., None, :]
        matrix = matrix & ((low <= numbers) & (numbers <= high)).all(-3)[..., None, :, :]
    if allowed.bytes.size:
        matrix = matrix & allowed.bytes
    return Mask((Explicit(matrix),))
