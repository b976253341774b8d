"""JAX's splash attention, the fused kernel for TPUs: blocks that a mask hides are never computed.

A causal mask or a window, by index, is computed in the kernel; segments, padding and lengths become
segment numbers. What is known only when the program runs (a prefix, an offset, positions) is the first and
the last key of each query, or else a matrix, four bytes for each query and key. It has no bias, no dropout.
The backward pass makes the weights from a float32 log-sum-exp: under logits of 10,000, to three digits.

Run here: the kernels in Pallas's interpret mode. Not run: on a TPU.

Source: ``jax.experimental.pallas.ops.tpu.splash_attention``.
"""

import importlib
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from crossattn.ops import passes, tpu
from crossattn.ops.call import AttentionOutput, Call
from crossattn.ops.masks import Mask, lowering, tiles
from crossattn.ops.masks.tiles import Seen, Static
from crossattn.types import Array

_TABLE = 2**19  # bytes for numbers of blocks: half of a core's scalar memory


def rank(platform: str) -> int | None:
    """Returns its rank: first on TPU, nowhere else."""
    return 10 if platform == "tpu" else None


def attend(call: Call) -> AttentionOutput:
    """Computes ``crossattn.attend`` by splash attention."""
    tpu.refuse_elsewhere()
    call.refuse("splash attention", "weights", "bias", "dropout", "traced softcap", "float64")
    q, k, v, mask, known = call.q, call.k, call.v, call.mask, call.known
    T, S, N, dtype = q.shape[-3], k.shape[-3], q.shape[-2], q.dtype
    exact = all(x.dtype in (jnp.float32, jnp.float16) for x in (q, k, v))
    prepared = lowering.prepare(q, k, v, None, mask, lowering.Lowered(Mask(())))
    # Mosaic has no float16.
    compute = jnp.float32 if dtype == jnp.float16 else dtype
    q = tpu.scaled(prepared.q.astype(compute), call.scale)
    k, v = prepared.k.astype(q.dtype), prepared.v.astype(q.dtype)
    batch, tiled = q.shape[:-3], tiles.tiled(mask, T, S)
    seen = None
    if tiled.rest.terms or not tiled.band.leaves_a_key(tpu.padded(T), tpu.padded(S)):
        rest, padded = tiled.band.mask & tiled.rest, (tpu.padded(T), tpu.padded(S))
        seen = tiles.seen(rest, T, S, padded, batch)
    ids = tpu.segment_ids(tiled.ids, T, S, batch)
    segment_ids = None if ids is None else _library().splash_attention.SegmentIds(*ids)
    if known is not None:
        known = _known(known, q, batch)
    q, k, v = (tpu.heads_first(x, batch) for x in (q, k, v))
    kernel = _kernel(q, k, v, tiled.band, seen, call.softcap, call.return_lse, exact)
    out, lse = _fused(
        kernel, call.return_lse or call.return_rows, (q, k, v, segment_ids, seen), known
    )
    out = jnp.moveaxis(out[..., :T, :].reshape(*batch, N, T, v.shape[-1]), -3, -2)
    lse = None if lse is None else lse[..., :T].reshape(*batch, N, T)
    return prepared.output(call, out, lse)


def _known(known: Any, q: Array, batch: tuple[int, ...]) -> tuple[Array, Array]:
    """Returns output and log-sum-exp without what was repaired, which takes no part in a gradient."""
    out, lse = known[0], known[1] + jnp.log(known[2])
    out, lse = (jnp.where(jnp.isfinite(x), x, 0) for x in (out, lse))
    lse = lse.reshape(math.prod(batch), *lse.shape[-2:]).astype(jnp.float32)
    lse = jnp.pad(lse, ((0, 0), (0, 0), (0, tpu.padded(lse.shape[-1]) - lse.shape[-1])))
    return tpu.heads_first(out.astype(q.dtype), batch), lse


class Kernel(NamedTuple):
    """Kernels of the forward and the backward pass.

    Attributes:
      sizes: of their blocks, for the output, for dq, for dk and dv.
      static: which blocks are computed, where that is known when the program is compiled; or None.
      options: of the library.
      exact: whether products keep the digits of float32.
    """

    sizes: tpu.Blocks
    static: list[Any] | None
    options: dict[str, Any]
    exact: bool

    def forward(self, q, k, v, segment_ids, seen, rows: bool) -> tuple[Array, Array | None]:
        """Computes the output and, with ``rows``, the log-sum-exp; 0 where no block was computed."""

        def one(infos: Any, *operands: Any) -> Any:
            options = self.options | dict(save_residuals=rows)
            return _library().kernel.SplashAttentionKernel(*infos, **options)(*operands)

        results = self._map(one, seen, q, k, v, segment_ids)
        out, lse = (results[0], results[1][0]) if rows else (results, jnp.zeros(()))
        out, lse = (jnp.where(jnp.isfinite(x), x, 0) for x in (out, lse))
        return out, lse if rows else None

    def backward(self, q, k, v, segment_ids, seen, out, lse, d_out) -> Any:
        """Computes gradients of q, k and v."""

        def one(infos: Any, q, k, v, segment_ids, out, lse, d_out):
            kernel = _library().kernel.SplashAttentionKernel(*infos, **self.options)

            def known(shapes: Any) -> list[Array]:
                *scratch, _, lanes = shapes
                along_lanes = jnp.broadcast_to(lse[..., None], lanes.shape)
                return [*(jnp.zeros(x.shape, x.dtype) for x in scratch), out, along_lanes]

            def attention(q, k, v):
                return kernel(q, k, v, segment_ids)

            return passes.pulled("pallas_call", attention, known, d_out.astype(q.dtype), q, k, v)

        return self._map(one, seen, q, k, v, segment_ids, out, lse, d_out)

    def _map(self, function: Any, seen: Seen | None, q, k, *others: Any) -> Any:
        """Computes ``function(infos, *operands)`` for every example."""
        infos, each = self.static, None
        if seen is not None:
            S = k.shape[2]
            made = [_info(seen, S, *size, by_key=i == 2) for i, size in enumerate(self.sizes)]
            infos, each = [info for info, _ in made], [axes for _, axes in made]
        mapped = (each, 0, 0, *(None if x is None else 0 for x in others))
        with tpu.precision(self.exact):
            return jax.vmap(function, mapped)(infos, q, k, *others)


def _fused(kernel: Kernel, with_lse: bool, operands: tuple, known: Any) -> tuple[Array, Any]:
    """Computes output and log-sum-exp, or only gradients where these are known."""
    seen = operands[-1]
    matrix = seen is not None and seen.allowed is not None and seen.allowed.shape[0] > 1
    held = 4 * math.prod(seen.allowed.shape[1:]) if matrix else 0

    def compute(operands, rows: bool):
        def part(*given: Any) -> Any:
            return kernel.forward(*given, rows=rows), None

        return tpu.in_parts(part, operands, held)[0]

    @jax.custom_vjp
    def attention(operands, known):
        known = compute(operands, with_lse) if known is None else known
        return known[0], known[1] if with_lse else None

    def forward(operands, known):
        out, lse = compute(operands, True) if known is None else known
        return (out, lse if with_lse else None), (operands, out, lse)

    def backward(given, cotangents):
        (q, k, v, *hidden), out, lse = given
        (d_out, d_lse), Hv = cotangents, v.shape[-1]
        if d_lse is not None:
            out, v, d_out = tpu.with_lse(out, v, d_out, d_lse)
        whole = q, k, v, *hidden, out, lse, d_out
        dq, dk, dv = tpu.in_parts(lambda *part: (kernel.backward(*part), None), whole, held)[0]
        return (dq, dk, dv[..., :Hv], None, None), None

    attention.defvjp(forward, backward)
    return attention(operands, known)


def _kernel(
    q, k, v, band: Static, seen: Seen | None, softcap: Any, lse: bool, exact: bool
) -> Kernel:
    lengths = T, S = q.shape[2], k.shape[2]
    pairs = 0 if seen is None or seen.allowed is None else 4  # Mosaic keeps booleans as integers
    sizes = tpu.blocks(T, S, q.shape[-1], v.shape[-1] + lse, q.dtype, exact, pairs)
    static, function = _static(band, q.shape[1], lengths, sizes) if seen is None else (None, None)
    if seen is not None and seen.allowed is None:
        function = seen.reads
    names = "", "_dq", "_dkv"
    blocks = {f"block_q{name}": size[0] for name, size in zip(names, sizes, strict=True)}
    blocks |= {f"block_kv{name}": size[1] for name, size in zip(names, sizes, strict=True)}
    options = dict(
        block_sizes=_library().splash_attention.BlockSizes(**blocks),
        is_mqa=False,
        save_residuals=False,
        mask_value=_library().kernel.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name=None,
        mask_function=function,
        interpret=False,
    )
    return Kernel(sizes, static, options, exact)


def _static(band: Static, N: int, lengths: tuple[int, int], sizes: tpu.Blocks) -> tuple[list, Any]:
    """Returns the kernels' tables for a band by index, as numpy arrays, and its mask function."""
    library = _library()
    splash = library.splash_attention
    if band == (None, None):
        one = splash.FullMask(lengths)
    elif band == (None, 0):
        one = splash.CausalMask(lengths)
    else:
        one = splash.LocalMask(lengths, tuple(band), 0)
    heads = splash.MultiHeadMask([one] * N)
    process = (library.info.process_mask,) * 2 + (library.info.process_mask_dkv,)
    made = [
        of_kernel(heads, size, head_shards=1, q_seq_shards=1)
        for of_kernel, size in zip(process, sizes, strict=True)
    ]
    return [info for info, _ in made], made[0][1]


def _info(seen: Seen, S: int, rows: int, columns: int, by_key: bool) -> tuple[Any, Any]:
    """Returns the blocks to compute, and for each array 0 where every example has its own, else None.

    The program knows them only when it runs; ``by_key`` for dk and dv, which go over the queries.
    """
    MaskInfo = _library().info.MaskInfo
    runs = tiles.visited(seen, rows, columns, S)
    axis = 0 if by_key else 1
    index = jnp.arange(runs.shape[axis])
    index = index[:, None] if by_key else index[None, :]
    # A block that is not computed is not fetched either: its place holds that of a neighbour.
    first = jnp.argmax(runs, axis, keepdims=True)
    last = runs.shape[axis] - 1 - jnp.argmax(jnp.flip(runs, axis), axis, keepdims=True)
    nearest = jnp.clip(index, first, last).astype(jnp.int16)
    if seen.allowed is None:
        tables = [x[None] for x in (nearest, runs.astype(jnp.int8))]
        numbers, each = _of_each(seen.numbers)
        return MaskInfo(tables[0], None, tables[1], None, numbers), MaskInfo(*[None] * 4, each)
    b, n, T = seen.allowed.shape[:3]
    shape = n, T // rows, S // columns
    count = math.prod(shape)
    if 7 * count > _TABLE:
        raise NotImplementedError(
            f"the tables for {count} blocks of a matrix do not fit a TPU core's scalar memory"
        )
    tables = [jnp.broadcast_to(x, shape) for x in (nearest, runs.astype(jnp.int8))]
    blocks = seen.allowed.reshape(b, *shape[:2], rows, shape[2], columns)
    blocks = blocks.transpose(0, 1, 2, 4, *((5, 3) if by_key else (3, 5)))
    blocks, each = _of_each(blocks.reshape(b, count, *blocks.shape[-2:]))
    places = jnp.where(runs, np.arange(count, dtype=np.int32).reshape(shape), 0)
    info = MaskInfo(tables[0], places, tables[1], blocks, None)
    return info, MaskInfo(None, None, None, each, None)


def _of_each(x: Array) -> tuple[Array, int | None]:
    """Returns an array with an example a row and the axis of examples, or its only row and None."""
    return (x, 0) if x.shape[0] > 1 else (x[0], None)


class _Library(NamedTuple):
    """Modules of the library."""

    splash_attention: Any
    kernel: Any
    info: Any


def _library() -> _Library:
    name = "jax.experimental.pallas.ops.tpu.splash_attention"
    try:
        parts = [name, f"{name}.splash_attention_kernel", f"{name}.splash_attention_mask_info"]
        library = _Library(*map(importlib.import_module, parts))
    except ImportError as error:
        raise NotImplementedError(f"this JAX has no splash attention: {error}") from error
    return library
