"""JAX's flash attention for TPUs, which adds a bias, and makes its gradient, in the kernel.

A causal mask goes by index; segments, padding and lengths are segment numbers, as in ``splash``; the rest of
a mask is added to the logits with the bias. That sum is a float32 [T, S] for every head, in the backward pass
its gradient too: they are made for a few examples at a time. A bias that examples, heads, queries or keys
share gets the sum of their gradients.

Run here: the kernels in Pallas's interpret mode. Not run: on a TPU.

Source: ``jax.experimental.pallas.ops.tpu.flash_attention``.
"""

import importlib
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from crossattn.ops import passes, tpu
from crossattn.ops.call import AttentionOutput, Call
from crossattn.ops.masks import lowering, tiles
from crossattn.types import Array

_HIDDEN = -1e30  # the kernel adds as much itself, and twice float32's least would be -inf


def rank(platform: str) -> int | None:
    """Returns its rank: after splash on TPU, which skips more and holds less; nowhere else."""
    return 20 if platform == "tpu" else None


def attend(call: Call) -> AttentionOutput:
    """Computes ``crossattn.attend`` by flash attention for TPUs."""
    tpu.refuse_elsewhere()
    call.refuse("flash attention for TPUs", "weights", "dropout", "softcap", "float64")
    q, k, v, mask, known = call.q, call.k, call.v, call.mask, call.known
    T, S, N, Hv, dtype = q.shape[-3], k.shape[-3], q.shape[-2], v.shape[-1], q.dtype
    exact = all(x.dtype in (jnp.float32, jnp.float16) for x in (q, k, v))
    batch, tiled = q.shape[:-3], tiles.tiled(mask, T, S)
    causal = tiled.band == (None, 0)
    rest = tiled.rest if causal else tiled.band.mask & tiled.rest
    prepared = lowering.prepare(q, k, v, call.bias, mask, lowering.Lowered(rest))
    # Mosaic has no float16.
    q = tpu.scaled(prepared.q.astype(jnp.float32 if dtype == jnp.float16 else dtype), call.scale)
    # A column of the values is left free for the log-sum-exp.
    width = tpu.padded(max(q.shape[-1], Hv + call.return_lse))
    operands = [_heads(x.astype(q.dtype), N, batch, width) for x in (q, prepared.k, prepared.v)]
    bias = None if call.bias is None else prepared.bias.astype(jnp.float32)
    added = [lowering.one_batch(x, 3, batch) for x in (bias, prepared.allowed)]
    matrix = any(x is not None for x in added)
    kernel = Kernel(T, S, causal, Hv if call.return_lse else None, matrix, exact)
    ids = tpu.segment_ids(tiled.ids, T, S, batch, always=not matrix)
    if known is not None:
        known = _known(known, T, operands[0], batch)
    ids = None if ids is None else _library().SegmentIds(*ids)
    out, rows, lse = _fused(kernel, (*operands, *added, ids), known)
    out = jnp.moveaxis(out[..., :T, :Hv].reshape(*batch, N, T, Hv), -3, -2)
    peak, total, lse = (x[..., :T].reshape(*batch, N, T) for x in (*rows, lse))
    return prepared.output(call, out, lse, (peak, total))


def _heads(x: Array, N: int, batch: tuple[int, ...], width: int) -> Array:
    """Returns [B N X' H'], with keys repeated for each head that reads them."""
    x = jnp.repeat(x, N // x.shape[-2], -2)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
    return tpu.heads_first(x, batch)


def _known(known: Any, T: int, q: Array, batch: tuple[int, ...]) -> tuple[Array, ...]:
    """Returns output, peaks and sums without what was repaired in them."""
    out, *rows = known
    out = jnp.where(jnp.isfinite(out), out, 0).astype(q.dtype)
    rows = [x.reshape(*q.shape[:2], T).astype(jnp.float32) for x in rows]
    more = [(0, 0), (0, 0), (0, q.shape[-2] - T)]
    rows = [jnp.pad(x, more, constant_values=n) for n, x in enumerate(rows)]
    return _heads(out, out.shape[-2], batch, q.shape[-1]), *rows


class Kernel(NamedTuple):
    """Kernels of the forward and the backward pass.

    Attributes:
      queries, keys: how many there are, without those that pad them.
      causal: by index.
      column: of the values, that is free for the log-sum-exp; None where it has no gradient.
      matrix: whether anything is added to the logits.
      exact: whether products keep the digits of float32.
    """

    queries: int
    keys: int
    causal: bool
    column: int | None
    matrix: bool
    exact: bool

    def forward(self, q, k, v, bias, allowed, ids) -> tuple[Array, Array, Array]:
        """Computes the output, and peak and sum of every row of logits."""
        with tpu.precision(self.exact), jax.named_scope("flash_attention_fwd"):
            matrix = self._added(q, k, bias, allowed)
            out, (_, *rows) = passes.watched("pallas_call", self._attention(ids), q, k, v, matrix)
        total, peak = (x[..., 0] for x in rows)  # the same along all lanes
        return out, peak, total

    def _attention(self, ids: Any) -> Any:
        """Returns the library's function of q, k, v and the matrix that is added to the logits."""

        def attention(q: Array, k: Array, v: Array, matrix: Array | None) -> Array:
            static: dict[str, Any] = dict(causal=self.causal, block_sizes=self._blocks(q, k))
            return _library().flash_attention(q, k, v, matrix, ids, **static)

        return attention

    def backward(self, q, k, v, bias, allowed, ids, known, d_out, d_lse) -> tuple:
        """Computes gradients of q, k, v and the bias."""
        out, peak, total = known
        if self.column is not None:
            # P (dP - sum(out d_out) + d_lse) is the gradient of the logits: a column more changes that
            # sum, and of the values, where it is 0, nothing.
            out = out.astype(jnp.float32).at[..., self.column].set(-d_lse)
            d_out = d_out.at[..., self.column].set(1)

        def given(shapes: Any) -> list[Array]:
            rows = zip((total, peak), shapes[1:], strict=True)
            return [out, *(jnp.broadcast_to(x[..., None], kind.shape) for x, kind in rows)]

        with tpu.precision(self.exact), jax.named_scope("flash_attention_bwd"):
            operands = q, k, v, self._added(q, k, bias, allowed)
            attention = self._attention(ids)
            dq, dk, dv, ds = passes.pulled("pallas_call", attention, given, d_out, *operands)
        if bias is None:
            return dq, dk, dv, None
        # Of all that one number of the bias is for, examples apart.
        shared = tuple(i for i, n in enumerate(bias.shape) if i and n == 1)
        return dq, dk, dv, ds[..., : self.queries, : self.keys].sum(shared, keepdims=True)

    def _added(self, q: Array, k: Array, bias: Any, allowed: Any) -> Array | None:
        """Returns bias and mask as one matrix [B N T' S'], hidden where keys are padding."""
        if bias is None and allowed is None:
            return None
        added = jnp.zeros((), jnp.float32) if bias is None else bias
        added = added if allowed is None else jnp.where(allowed, added, _HIDDEN)
        added = jnp.broadcast_to(added, (*q.shape[:2], self.queries, self.keys))
        rows, columns = q.shape[-2] - self.queries, k.shape[-2] - self.keys
        added = jnp.pad(added, ((0, 0),) * 3 + ((0, columns),), constant_values=_HIDDEN)
        return jnp.pad(added, ((0, 0),) * 2 + ((0, rows), (0, 0)))

    def _blocks(self, q: Array, k: Array) -> Any:
        lengths, width = (q.shape[-2], k.shape[-2]), q.shape[-1]
        pairs = 4 if self.matrix else 0
        found = tpu.blocks(*lengths, width, width, q.dtype, self.exact, pairs)
        (rows, columns), (rows_dq, columns_dq), (rows_dkv, columns_dkv) = found
        return _library().BlockSizes(
            block_b=1,
            block_q=rows,
            block_k_major=columns,
            block_k=columns,
            block_q_dq=rows_dq,
            block_k_major_dq=columns_dq,
            block_k_dq=columns_dq,
            block_q_major_dkv=rows_dkv,
            block_q_dkv=rows_dkv,
            block_k_major_dkv=columns_dkv,
            block_k_dkv=columns_dkv,
        )


def _fused(kernel: Kernel, operands: tuple, known: Any) -> tuple[Array, tuple, Array]:
    """Computes output, rows and log-sum-exp, or only gradients where these are known."""

    def held(operands):
        q, k = operands[:2]
        return 4 * math.prod(q.shape[1:3]) * k.shape[2] if kernel.matrix else 0

    @jax.custom_vjp
    def attention(operands, known):
        return forward(operands, known)[0]

    def forward(operands, known):
        if known is None:
            known, _ = tpu.in_parts(
                lambda *part: (kernel.forward(*part), None), operands, held(operands)
            )
        out, peak, total = known
        return (out, (peak, total), peak + jnp.log(total)), (operands, known)

    def backward(given, cotangents):
        operands, known = given
        d_out, _, d_lse = cotangents
        bias = operands[3]
        shared = bias is not None and bias.shape[0] != operands[0].shape[0]

        def part(*arguments):
            *gradients, d_bias = kernel.backward(*arguments)
            return (
                (gradients, d_bias.sum(0, keepdims=True))
                if shared
                else ((*gradients, d_bias), None)
            )

        given = *operands, known, d_out, d_lse
        own, d_bias = tpu.in_parts(part, given, held(operands), bias if shared else None)
        return (*own[:3], d_bias if shared else own[3], None, None), None

    attention.defvjp(forward, backward)
    return attention(operands, known)


def _library() -> Any:
    try:
        return importlib.import_module("jax.experimental.pallas.ops.tpu.flash_attention")
    except ImportError as error:
        raise NotImplementedError(f"this JAX has no flash attention for TPUs: {error}") from error
