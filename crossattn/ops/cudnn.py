"""cuDNN's fused attention, by ``jax.nn.dot_product_attention``, for any shape and with its log-sum-exp.

JAX's interface differentiates even lengths alone, takes head sizes that are multiples of 8 and equal for keys
and values, and biases of full size: operands are padded to that here. It rounds the log-sum-exp to the
operands' type, has no gradient for it, and no name for the backward pass alone (``passes``).

A bias has the operands' type there, so one of float32 is rounded. Tests run the same code with XLA's products
in place of the kernels, and ``make gpu`` the kernels.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from crossattn.ops import passes
from crossattn.ops.masks.lowering import enlarged, padded
from crossattn.types import Array

_FORWARD = "dot_product_attention_fwd_wrapper"
_MULTIPLE = 8  # of head sizes
_ONE = AbstractMesh((1,), ("device",))


class Operands(NamedTuple):
    """Differentiated operands: q [B T N H], k and v [B S K H], bias [#B #N T S] or None."""

    q: Any
    k: Any
    v: Any
    bias: Any


class _Call(NamedTuple):
    """Static part of a call; ``lse_moves``: the log-sum-exp has a gradient."""

    scale: float
    options: tuple[tuple[str, Any], ...]
    with_lse: bool
    lse_moves: bool

    def kernel(self, given: Operands, mask: Any, lengths: dict[str, Any]) -> Array:
        options = dict(self.options) | lengths
        return jax.nn.dot_product_attention(
            *given, mask, scale=self.scale, implementation="cudnn", **options
        )


def attention(
    operands: tuple,
    keywords: dict[str, Any],
    *,
    scale: float,
    known: tuple[Array, Array] | None = None,
    return_lse: bool = False,
    return_rows: bool = False,
) -> tuple[Array, Array | None]:
    """Computes output [B T N Hv] and float32 log-sum-exp [B N T] or None, with gradients.

    Args:
      operands: q, k, v, bias and mask for ``jax.nn.dot_product_attention``, the last two of any sizes that
        broadcast, or None.
      keywords: its others: is_causal, local_window_size, lengths.
      scale: of the logits.
      known: output and log-sum-exp of an earlier call with the same operands: only gradients are computed.
      return_lse: whether the log-sum-exp is returned.
      return_rows: the same without a gradient, as it is wanted for ``known``.

    Raises:
      NotImplementedError: JAX has no such call of cuDNN, or here is no cuDNN.
    """
    T, Hv = operands[0].shape[1], operands[2].shape[-1]
    given, mask, keywords = _fitted(operands, keywords)
    if known is not None:
        out, lse = known
        widths = [(0, b - a) for a, b in zip(out.shape, given.q.shape, strict=True)]
        known = jnp.pad(out, widths), jnp.pad(lse, [(0, 0), (0, 0), widths[1]])
    lengths = {name: x for name, x in keywords.items() if hasattr(x, "dtype")}
    options = tuple((name, x) for name, x in keywords.items() if name not in lengths)
    call = _Call(scale, options, return_lse or return_rows, return_lse)
    try:
        if known is not None or return_lse:  # whether JAX will take what its gradient needs
            jax.eval_shape(call.kernel, _wider(given) if return_lse else given, mask, lengths)
        results: Any = _attend(call, given, mask, lengths, known)
    except RuntimeError as error:
        raise NotImplementedError(f"cuDNN: {error}") from error  # none here, or too old
    out, lse = results
    return out[:, :T, :, :Hv], None if lse is None else lse[..., :T]


def _fitted(operands: tuple, keywords: dict[str, Any]) -> tuple[Operands, Any, dict[str, Any]]:
    """Pads with zeros, which no query reads, to the shapes that the kernels take."""
    q, k, v, bias, mask = operands
    T, S = q.shape[1], k.shape[1]
    width = -(-max(q.shape[-1], v.shape[-1]) // _MULTIPLE) * _MULTIPLE
    q, k, v = (padded(x, {1: x.shape[1] % 2, 3: width - x.shape[3]}) for x in (q, k, v))
    if mask is not None:
        mask = enlarged(_whole(mask, T, S), T % 2, S % 2)
    elif S % 2 and not (keywords.get("is_causal") and T <= S):
        lengths = jnp.full(k.shape[:1], S, jnp.int32)
        keywords = {"key_value_seq_lengths": lengths} | keywords
    if bias is not None:
        bias = enlarged(_whole(bias, T, S), T % 2, S % 2).astype(q.dtype)
    return Operands(q, k, v, bias), mask, keywords


def _whole(matrix: Array, T: int, S: int) -> Array:
    """Returns [#B #N T S]: examples and heads may share a matrix, queries and keys not."""
    return jnp.broadcast_to(matrix, (*matrix.shape[:-2], T, S))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: _Call, given: Operands, mask: Any, lengths: dict, known: Any) -> Any:
    if known is None and not call.with_lse:
        return _alone(call.kernel)(given, mask, lengths), None
    return _forward(call, given, mask, lengths, known)[0]


def _forward(call: _Call, given: Operands, mask: Any, lengths: dict, known: Any) -> Any:
    out, lse = _alone(partial(_trained, call))(given, mask, lengths) if known is None else known
    return (out, lse if call.with_lse else None), (given, mask, lengths, out, lse)


def _backward(call: _Call, residuals: tuple, cotangents: tuple) -> tuple:
    given, mask, lengths, out, lse = residuals
    d_out, d_lse = cotangents
    width = out.shape[-1]
    if call.lse_moves:
        # The kernel takes sum(out * d_out) from each logit's gradient: one more column there takes -d_lse
        # from it, in three parts, for it is rounded to the operands' type.
        parts = _split(-d_lse.swapaxes(-1, -2)[..., None], out.dtype)
        given = _wider(given)
        out = padded(jnp.concatenate([out, *[jnp.ones_like(x) for x in parts]], -1), {3: 5})
        d_out = padded(jnp.concatenate([d_out, *parts], -1), {3: 5})
    gradients = _alone(partial(_gradients, call))(given, mask, lengths, out, lse, d_out)
    q, k, v = (x[..., :width] for x in gradients[:3])
    return Operands(q, k, v, gradients.bias), None, None, None


_attend.defvjp(_forward, _backward)


def _wider(given: Operands) -> Operands:
    """Appends columns of zeros, which change no logit."""
    q, k, v = (padded(x, {3: _MULTIPLE}) for x in given[:3])
    return Operands(q, k, v, given.bias)


def _split(x: Array, dtype: Any) -> list[Array]:
    """Returns three numbers of a narrow dtype whose sum is a float32."""
    parts = []
    for _ in range(3):
        parts.append(x.astype(dtype))
        x = x - parts[-1].astype(x.dtype)
    return parts


def _alone(call: Callable) -> Callable:
    """Wraps a call of one device's arrays, so that JAX needs no devices while it lowers.

    Mapped, it runs once for each: JAX's rule for the kernels fails on biases that examples or heads share.
    """
    mesh = jax.sharding.get_abstract_mesh()
    mesh = _ONE if mesh.empty else mesh
    rest = set(mesh.axis_names) - set(mesh.manual_axes)
    if rest:
        options: dict[str, Any] = dict(in_specs=PartitionSpec(), out_specs=PartitionSpec())
        call = jax.shard_map(call, mesh=mesh, axis_names=rest, check_vma=False, **options)
    return jax.custom_batching.sequential_vmap(jax.jit(call))


def _trained(call: _Call, given: Operands, mask: Any, lengths: dict) -> tuple[Array, Array]:
    """Computes output and log-sum-exp [B N T] by the forward kernel of a training step."""
    out, results = passes.watched(_FORWARD, lambda given: call.kernel(given, mask, lengths), given)
    return out, results[1]


def _gradients(call: _Call, given: Operands, mask, lengths, out, lse, d_out) -> Operands:

    def known(shapes: Any) -> list[Array]:
        pairs = zip((out, lse), shapes, strict=True)
        return [x.reshape(kind.shape).astype(kind.dtype) for x, kind in pairs]

    def kernel(given: Operands) -> Array:
        return call.kernel(given, mask, lengths)

    return passes.pulled(_FORWARD, kernel, known, d_out, given)[0]
