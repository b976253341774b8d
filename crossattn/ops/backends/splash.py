"""JAX's splash attention, the fused kernel for TPUs: blocks that a mask hides are never computed.

A causal mask or a window, by index, is computed in the kernel; segments, padding and lengths become
segment numbers. Other masks and biases are refused, and so is the log-sum-exp, which has no gradient.
The backward pass makes the weights from a float32 log-sum-exp: under logits of 10,000, to three digits.

Run here: the kernel in Pallas's interpret mode, by ``interpreted``. Not run: on a TPU.

Source: ``jax.experimental.pallas.ops.tpu.splash_attention``.
"""

import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from crossattn.ops import platforms
from crossattn.ops.backends import AttentionOutput, few_queries
from crossattn.ops.masks import Band, KeyPadding, Lengths, Mask, Segments, Term, as_mask, lowering
from crossattn.types import Array, Float, Int, Key

_BLOCK = 128  # queries and keys are padded to multiples of it
_WIDEST = 512  # block of the grid, where it divides the length
# What a kernel and its backward pass are told.
_STATIC = (
    "save_residuals",
    "mask_value",
    "is_mqa",
    "block_sizes",
    "mask_function",
    "attn_logits_soft_cap",
    "interpret",
)


REUSES = True


def rank(platform: str) -> int | None:
    """First on TPU; nowhere else."""
    return 10 if platform == "tpu" else None


def unsuited(q: Float[Array, "*B T N H"], k: Float[Array, "*B S K H"]) -> str | None:
    """Why another backend is the better choice for these shapes."""
    if few_queries(q, k):
        return "for few queries, as in decoding, plain products read keys and values where they lie"
    return None


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
    if platforms.platform() != "tpu":
        raise NotImplementedError(f"it runs on TPU, not on {platforms.platform()}")
    if not platforms.one_device():
        raise NotImplementedError(
            "XLA cannot partition it over several devices whose mesh crossattn.axes.RULES does not know"
        )
    _refuse(q, bias, softcap, dropout_key, return_weights, return_lse)
    return _attend(q, k, v, mask, scale, softcap, return_rows, known, interpret=False)


def interpreted(q, k, v, mask=None, *, bias=None, scale=None, softcap=None, **others) -> Array:
    """The same on any platform, slowly, in Pallas's interpret mode; arguments as ``attend``'s.

    It is how the kernel's arguments are tested without a TPU; for nothing else.
    """
    others = {name: x for name, x in others.items() if x}
    _refuse(q, bias, softcap, others or None, False, False)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    mask = None if mask is None else as_mask(mask)
    return _attend(q, k, v, mask, scale, softcap, False, None, interpret=True).out


class Static(NamedTuple):
    """The band that the kernel computes by index, -left <= key - query <= right; None: no limit."""

    left: int | None
    right: int | None


class Ids(NamedTuple):
    """Segment numbers [*#B T] and [*#B S]: a query reads the keys of its own; None: one segment."""

    q: Int[Array, "*#B T"] | None
    k: Int[Array, "*#B S"] | None


def lower(mask: Mask | None, T: int, S: int) -> tuple[Static, Ids]:
    """The mask as what the kernel takes.

    Raises:
      NotImplementedError: it cannot say the mask.
    """
    terms = () if mask is None else mask.terms
    bands = [t for t in terms if isinstance(t, Band)]
    segments = [t for t in terms if isinstance(t, Segments)]
    for term in terms:
        if not isinstance(term, (Band, Segments, KeyPadding, Lengths)):
            raise NotImplementedError(f"splash attention cannot say the mask {type(term).__name__}")
    if len(segments) > 1:
        raise NotImplementedError("splash attention takes one kind of segments")
    static = _band(bands, T, S)
    q = jnp.ones((T,), jnp.int32)
    k = jnp.ones((S,), jnp.int32)
    for term in segments:
        # Segment 0 reads nothing: its queries get a number that no key has.
        q = jnp.where(jnp.asarray(term.q_segment_ids) > 0, term.q_segment_ids, -1).astype(jnp.int32)
        k = jnp.asarray(term.k_segment_ids).astype(jnp.int32)
    others = [t for t in terms if isinstance(t, (KeyPadding, Lengths))]
    for term in others:
        k = jnp.where(_valid_keys(term, S), k, 0)
        if isinstance(term, Lengths) and term.q_lengths is not None:
            inside = jnp.arange(T) < jnp.asarray(term.q_lengths)[..., None]
            q = jnp.where(inside, q, -1)
    return static, Ids(q, k) if segments or others else Ids(None, None)


def _valid_keys(term: Term, S: int) -> Any:
    if isinstance(term, KeyPadding):
        return jnp.asarray(term.valid)
    assert isinstance(term, Lengths)
    return jnp.arange(S) < jnp.asarray(term.k_lengths)[..., None]


def _band(bands: list[Band], T: int, S: int) -> Static:
    left = right = None
    for band in bands:
        if band.q_positions is not None or band.k_positions is not None:
            raise NotImplementedError("splash attention goes by index, not by given positions")
        if not isinstance(band.offset, (int, type(None))):
            raise NotImplementedError("splash attention takes an offset that is a plain number")
        offset = band.offset or 0
        if band.left is not None:
            left = band.left - offset if left is None else min(left, band.left - offset)
        if band.right is not None:
            right = band.right + offset if right is None else min(right, band.right + offset)
    # A block of queries without a key is never run, and what it leaves is NaN, gradients too.
    above = right is not None and right < 0
    beyond = left is not None and _padded(T) - 1 - left > _padded(S) - 1
    between = left is not None and right is not None and left + right < 0
    if above or beyond or between:
        raise NotImplementedError("splash attention needs a key by index for every query")
    return Static(left, right)


def _attend(q, k, v, mask, scale, softcap, rows: bool, known, interpret: bool) -> AttentionOutput:
    T, S, N, dtype = q.shape[-3], k.shape[-3], q.shape[-2], q.dtype
    static, ids = lower(mask, T, S)
    unlowered = lowering.Lowered(False, None, None, None, Mask(()))
    prepared = lowering.prepare(q, k, v, None, mask, unlowered)
    q, k, v = prepared.q, prepared.k, prepared.v
    if ids.k is None and _padded(S) != S:
        ids = Ids(jnp.ones((T,), jnp.int32), jnp.ones((S,), jnp.int32))
    q = _scaled(q, scale)
    k, v = k.astype(q.dtype), v.astype(q.dtype)
    batch = q.shape[:-3]
    q, k, v = _heads_first(q, batch), _heads_first(k, batch), _heads_first(v, batch)
    numbers: Any = [None if x is None else _segments(x, batch) for x in ids]
    segment_ids = None if ids.k is None else _library().SegmentIds(*numbers)
    kernel = partial(_kernel, static, N, _padded(T), _padded(S), softcap, interpret)
    lse: Any = None
    if known is not None:
        out, lse = known[0], known[1] + jnp.log(known[2])
        # What was repaired takes no part in a gradient; nor do the rows of the padding.
        out = _heads_first(jnp.where(jnp.isfinite(out), out, 0).astype(q.dtype), batch)
        lse = jnp.where(jnp.isfinite(lse), lse, 0).reshape(math.prod(batch), N, T)
        lse = jnp.pad(lse, ((0, 0), (0, 0), (0, -T % _BLOCK)))
        out = _again(kernel, q, k, v, segment_ids, (out, lse.astype(jnp.float32)))
    elif rows:
        out, (lse,) = _over_batch(kernel(save_residuals=True), q, k, v, segment_ids)
        lse = lse[..., :T].reshape(*batch, N, T)
    else:
        out = _over_batch(kernel(), q, k, v, segment_ids)
    out = jnp.moveaxis(out[..., :T, :].reshape(*batch, N, T, v.shape[-1]), -3, -2)
    output = AttentionOutput(lowering.repair(out, prepared).astype(dtype))
    return output._replace(rows=(lse, jnp.ones_like(lse))) if rows else output


def _over_batch(kernel: Any, q, k, v, segment_ids: Any) -> Any:
    """The kernel, which is one example's."""
    return jax.vmap(kernel, (0, 0, 0, None if segment_ids is None else 0))(q, k, v, segment_ids)


def _again(kernel: Callable[..., Any], q, k, v, segment_ids: Any, known: tuple) -> Array:
    """The output, which is known already, with the gradient that the library's kernels give for it.

    It has no public name; where it is not found, the output is computed again.
    """
    module = importlib.import_module(f"{_library().__name__}.splash_attention_kernel")
    back = getattr(module, "_splash_attention_bwd", None)
    if back is None:
        return _over_batch(kernel(), q, k, v, segment_ids)
    made = kernel()
    options = {name: x for name, x in made.kwargs.items() if name in _STATIC}

    @jax.custom_vjp
    def again(q, k, v, out, lse, segment_ids):
        return out

    def forward(*given):
        return given[3], given

    def backward(given, d_out):
        def one(q, k, v, out, lse, segment_ids, d_out):
            infos = made.dq_mask_info, made.dkv_mask_info
            residuals = (q, k, v, segment_ids, None, out, lse, *infos)
            return back(res=residuals, do=d_out, residual_checkpoint_name=None, **options)[3:6]

        mapped = (*[0] * 5, None if segment_ids is None else 0, 0)
        each: Any = jax.vmap(one, mapped)
        return *each(*given, d_out), None, None, None

    again.defvjp(forward, backward)
    out, lse = known
    return again(q, k, v, out, lse, segment_ids)


def _scaled(q: Array, scale: Any) -> Array:
    """The kernel has no scale. Times a power of two is exact; anything else is kept in float32."""
    if isinstance(scale, (int, float)) and scale and abs(math.frexp(scale)[0]) == 0.5:
        return q * jnp.asarray(scale, q.dtype)
    return q.astype(jnp.float32) * scale


def _kernel(
    static: Static,
    N: int,
    T: int,
    S: int,
    softcap: float | None,
    interpret: bool,
    save_residuals: bool = False,
) -> Any:
    splash = _library()
    shape, window = (T, S), (static.left, static.right)
    if window == (None, None):
        one = splash.FullMask(shape)
    elif window == (None, 0):
        one = splash.CausalMask(shape)
    else:
        one = splash.LocalMask(shape, window, 0)
    queries, keys = _block(T), _block(S)
    sizes = splash.BlockSizes(
        **{f"block_q{which}": queries for which in ("", "_dkv", "_dq")},
        **{f"block_kv{which}": keys for which in ("", "_compute", "_dkv", "_dkv_compute", "_dq")},
    )
    # Its numpy arrays of the mask must not become tracers of whatever calls this.
    with jax.ensure_compile_time_eval():
        return splash.make_splash_mha(
            splash.MultiHeadMask([one] * N),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=softcap,
            interpret=interpret,
            save_residuals=save_residuals,
        )


def _library() -> Any:
    try:
        from jax.experimental.pallas.ops.tpu import splash_attention
    except ImportError as error:
        raise NotImplementedError(f"this JAX has no splash attention: {error}") from error
    return splash_attention


def _padded(length: int) -> int:
    return -(-length // _BLOCK) * _BLOCK


def _block(length: int) -> int:
    return math.gcd(length, _WIDEST)


def _heads_first(x: Float[Array, "*B X N H"], batch: tuple[int, ...]) -> Array:
    """[B N X' H], padded with zeros."""
    x = jnp.moveaxis(x.reshape(math.prod(batch), *x.shape[-3:]), -2, -3)
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[-2] % _BLOCK), (0, 0)))


def _segments(x: Int[Array, "*#B X"], batch: tuple[int, ...]) -> Array:
    """Numbers for each example, [B X']; 0 in the padding."""
    x = jnp.broadcast_to(x, (*batch, x.shape[-1])).reshape(math.prod(batch), -1)
    return jnp.pad(x, ((0, 0), (0, -x.shape[-1] % _BLOCK)))


def _refuse(q, bias, softcap, dropout_key, weights: bool, lse: bool) -> None:
    if weights:
        raise NotImplementedError("splash attention never has the weights")
    if lse:
        raise NotImplementedError("the log-sum-exp of splash attention has no gradient")
    if bias is not None:
        raise NotImplementedError("splash attention has no bias")
    if dropout_key is not None:
        raise NotImplementedError("splash attention has no dropout")
    if softcap is not None and not isinstance(softcap, (int, float)):
        raise NotImplementedError("splash attention takes a softcap that is a plain number")
    if q.dtype == jnp.float64:
        raise NotImplementedError("splash attention computes in float32")
