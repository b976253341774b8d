"""A fused kernel for CPUs: the score matrix is never in memory, operands are read where they lie.

Written in C++ (``crossattn/ops/native/``), built on first use where there is a compiler.
It has gradients in reverse mode; ``crossattn.ops.primitive`` brings the others.

Source: online softmax, Milakov and Gimelshein 2018; the backward pass, Dao et al. 2022, "FlashAttention".
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from crossattn.ops import native
from crossattn.ops.call import AttentionOutput, Call
from crossattn.ops.masks import Mask
from crossattn.ops.masks.ranges import ranges
from crossattn.ops.parallel.placement import alike
from crossattn.types import Array, Bool, Int


def rank(platform: str) -> int | None:
    """Returns its rank: first on CPU, nowhere else."""
    return -10 if platform == "cpu" else None


def attend(call: Call) -> AttentionOutput:
    """Computes ``crossattn.attend`` by the compiled kernel."""
    call.refuse("it", "float64", "weights", "bias", "softcap", "dropout")
    if call.symbolic:
        raise NotImplementedError("an exported program, as symbolic shapes are for, cannot call it")
    native.load()
    allowed = _operands(call.mask, call.q.ndim - 3, *call.lengths)
    q, k, v = (x.astype(jnp.float32) for x in (call.q, call.k, call.v))
    scale, known = call.scale, call.known
    if not isinstance(scale, (int, float)):
        q, scale = q * scale, 1.0
    known = None if known is None else tuple(x.astype(jnp.float32) for x in known)
    results: Any = _attend(float(scale), *alike((q, k, v, allowed, known)))
    lse = results[1] if call.return_lse else None
    rows = results[2:] if call.return_rows else None
    return AttentionOutput(results[0].astype(call.q.dtype), None, lse, rows)


class _Mask(NamedTuple):
    """Mask in the kernel's form; what it lacks is None."""

    interval: Int[Array, "*#B #T 2"] | None = None
    numbers: Int[Array, "*#B R S"] | None = None
    limits: Int[Array, "*#B R #T 2"] | None = None
    bytes: Bool[Array, "*#B #N #T S"] | None = None

    def filled(self, lead: int) -> "_Mask":
        """Returns it with arrays without elements for what it lacks, as the kernel is called.

        They are made here, for XLA (jaxlib 0.11.2) crashes where such an array goes from one ``shard_map``
        to another, as what the backward pass needs does.
        """
        nothing = jnp.zeros((*(1,) * lead, 0, 1, 2), jnp.int32)
        everything = jnp.ones((*(1,) * (lead + 2), 0), bool)
        lacking = nothing[..., 0, :], nothing[..., 0], nothing, everything
        return _Mask(*(b if a is None else a for a, b in zip(self, lacking, strict=True)))


def _operands(mask: Mask | None, lead: int, T: int, S: int) -> _Mask:
    """Returns a mask in memory linear in length, except for matrices that were given as such."""
    compact = _Mask()
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
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(scale: float, q, k, v, allowed: _Mask, known: Any) -> Any:
    """Computes output [*B T N Hv]; of each row of logits log-sum-exp, peak and sum, [*B N T].

    The latter two are for the backward pass alone: they carry no gradient. What is known is not
    computed again.
    """
    if known is None:
        out = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), jnp.float32)
        row = jax.ShapeDtypeStruct((*q.shape[:-3], q.shape[-2], q.shape[-3]), jnp.float32)
        known = _call("CrossattnForward", (out, row, row), (q, k, v), allowed, (), scale)
    out, peak, total = known
    # -inf for a row that may read nothing; NaN for one that reads a NaN.
    lse = jnp.where(total == 0, -jnp.inf, peak + jnp.log(jnp.where(total == 0, 1, total)))
    return out, lse, peak, total


def _forward(scale: float, q, k, v, allowed: _Mask, known: Any) -> Any:
    results: Any = _attend(scale, q, k, v, allowed, known)
    out, _, *rows = results
    return results, ((q, k, v), allowed, (out, *rows))


def _backward(scale: float, residuals: tuple, cotangents: tuple) -> Any:
    operands, allowed, known = residuals
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in operands)
    rest = (*known, *cotangents[:2])
    return *_call("CrossattnBackward", shapes, operands, allowed, rest, scale), None, None


_attend.defvjp(_forward, _backward)


def _call(
    target: str, results: tuple, qkv: tuple, allowed: _Mask, rest: tuple, scale: float
) -> tuple:
    call = jax.ffi.ffi_call(target, results, vmap_method="broadcast_all")
    operands = (*qkv, *allowed.filled(qkv[0].ndim - 3), *rest)
    outputs = call(*operands, scale=np.float32(scale))
    # In shard_map the results vary over the mesh as the operands do; the call does not say so.
    return alike((operands, *outputs))[1:]
