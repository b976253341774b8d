"""Kernels of each kind of call, forward and backward: the table of ``docs/attend.md``.

    python -m tests.ops.lowered

Programs are lowered for an H100 and a TPU, which needs neither, and no compiler for them. Beside ``attend``
stand JAX's own fused functions, called as they document it, and what FlashAttention 2 documents.
"""

import functools
import os
import warnings
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import crossattn as xa
from crossattn.ops import backends
from crossattn.ops.masks import Band, Lengths, Segments
from tests.ops.pretended_gpu import pretended_gpu

masks = xa.masks
TPUS, GPUS = "tpu", "cuda"


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


@dataclass(frozen=True)
class Kind:
    """A kind of call: sizes of the operands, and arrays that a mask and options are made of.

    ``flash`` is whether FlashAttention 2 takes it (github.com/Dao-AILab/flash-attention, its README).
    """

    name: str
    flash: bool
    arrays: tuple = ()
    mask: Any = lambda *arrays: None
    options: Any = lambda *arrays: {}
    T: int = 256
    S: int = 256
    N: int = 4
    K: int = 4
    H: int = 64
    Hv: int | None = None
    B: int = 2
    dtype: str = "bfloat16"

    @property
    def shapes(self):
        sizes = (
            (self.T, self.N, self.H),
            (self.S, self.K, self.H),
            (self.S, self.K, self.Hv or self.H),
        )
        operands = [array(self.B, *size, dtype=self.dtype) for size in sizes]
        return [*operands, *self.arrays]


IDS, VALID = array(2, 256, dtype="int32"), array(2, 256, dtype="bool")
EACH = array(2, dtype="int32")
BIAS = array(1, 4, 256, 256)


def biased(bias):
    return {"bias": bias}


def with_dropout():
    return {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}


KINDS = (
    Kind("no mask", True),
    Kind("causal", True, mask=masks.causal),
    Kind("window to the left", True, mask=lambda: masks.window(8)),
    Kind("window both ways", True, mask=lambda: masks.window(8, 8)),
    Kind("lengths", True, (EACH,), masks.lengths),
    Kind("key padding", True, (VALID,), masks.key_padding),
    Kind("causal, key padding", True, (VALID,), lambda x: masks.causal() & masks.key_padding(x)),
    Kind("packed rows", True, (IDS,), masks.segments),
    Kind("causal, packed rows", True, (IDS,), lambda x: masks.causal() & masks.segments(x)),
    Kind("prefix LM", False, (EACH,), lambda x: masks.causal() | masks.prefix(x)),
    Kind("boolean matrix [B 1 T S]", False, (array(2, 1, 256, 256, dtype="bool"),), masks.explicit),
    Kind("boolean matrix [B 1 1 S]", False, (array(2, 1, 1, 256, dtype="bool"),), masks.explicit),
    Kind("given positions", False, (IDS,), lambda x: masks.causal(q_positions=x, k_positions=x)),
    Kind("offset known at run time", False, (array(dtype="int32"),), masks.causal),
    Kind("bias [1 N T S]", False, (BIAS,), options=biased),
    Kind("bias [B 1 1 S]", False, (array(2, 1, 1, 256),), options=biased),
    Kind("bias, causal", False, (BIAS,), lambda x: masks.causal(), biased),
    Kind("softcap", True, options=lambda: {"softcap": 30.0}),
    Kind("dropout", True, options=with_dropout),
    Kind("log-sum-exp", False, options=lambda: {"return_lse": True}),
    Kind("scale known at run time", False, (array(),), options=lambda x: {"scale": x}),
    Kind("lengths 197, 197", True, T=197, S=197),
    Kind("lengths 31, 197, causal", False, mask=masks.causal, T=31, S=197),
    Kind("one query", True, T=1),
    Kind("8 query heads, 2 key heads", True, N=8, K=2),
    Kind("values wider than keys", False, Hv=128),
    Kind("head size 36", True, H=36),
    Kind("head size 128", True, H=128),
    Kind("head size 256", True, H=256),
    Kind("head size 1,024, 50,176 keys", False, T=512, S=50176, N=1, K=1, H=1024, B=1),
    Kind("float16", True, dtype="float16"),
    Kind("float32", False, dtype="float32"),
)


def attend(kind, q, k, v, *arrays):
    return xa.attend(q, k, v, kind.mask(*arrays), **kind.options(*arrays))


def jax_nn(kind, q, k, v, *arrays):
    """``jax.nn.dot_product_attention`` of cuDNN: what it has no argument for is a matrix."""
    mask, options = kind.mask(*arrays), kind.options(*arrays)
    given: dict[str, Any] = {
        name: options.pop(name) for name in ("bias", "scale") if name in options
    }
    if options.pop("return_lse", False):
        raise NotImplementedError("its log-sum-exp has no gradient")
    rest = []
    for term in () if mask is None else mask.terms:
        if isinstance(term, Lengths):
            given["key_value_seq_lengths"] = term.k_lengths
        elif isinstance(term, Band) and term.right == 0 and term.offset is None and not arrays:
            given["is_causal"] = True
            if term.left is not None:
                given["local_window_size"] = (term.left, 0)
        else:
            rest.append(term)
    if rest:
        given["mask"] = masks.Mask(tuple(rest)).materialize(kind.T, kind.S)
    if "bias" in given:
        given["bias"] = given["bias"].astype(q.dtype)
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **given, **options)


def splash(kind, q, k, v, *arrays):
    """JAX's splash attention: static bands, segments, softcap."""
    from jax.experimental.pallas.ops.tpu import splash_attention as library

    mask, options = kind.mask(*arrays), kind.options(*arrays)
    terms = () if mask is None else mask.terms
    shape, ids = (kind.T, kind.S), None
    static: Any = library.FullMask(shape)
    for term in terms:
        if isinstance(term, Segments):
            ids = library.SegmentIds(
                *(jnp.asarray(x) for x in (term.q_segment_ids, term.k_segment_ids))
            )
        elif isinstance(term, Band) and not arrays:
            static = library.LocalMask(shape, (term.left, term.right), 0)
        elif isinstance(term, Band) and ids is None and isinstance(terms[-1], Segments):
            static = library.CausalMask(shape)
        else:
            raise NotImplementedError("it has no such mask")
    kernel = library.make_splash_mha(
        library.MultiHeadMask([static] * kind.N),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=options.pop("softcap", None),
    )
    if options.keys() - {"scale"}:
        raise NotImplementedError("it has no such option")
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q * options.get("scale", 1.0), k, v))
    return jax.vmap(kernel)(q, k, v, ids)


def lowered(function, kind, platform):
    """The program of output and gradients as text, and what ``attend`` says of kernels that refuse."""
    floating = [i for i, x in enumerate(kind.shapes) if jnp.issubdtype(x.dtype, jnp.floating)]

    def loss(*operands):
        results = function(kind, *operands)
        return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(results))

    backends._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as said, pretended_gpu():
        warnings.simplefilter("always")
        traced = jax.jit(jax.value_and_grad(loss, tuple(floating))).trace(*kind.shapes)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    return text, [f"{w.message}" for w in said if f"{w.message}".startswith("attend ")]


def mark(kind, function, platform):
    """Returns whether both passes are fused; another library's function raises what it will."""
    try:
        text, _ = lowered(function, kind, platform)
    except Exception:
        if function is attend:
            raise
        return "-"
    fused = text.count("custom_call @tpu_custom_call") > 1 or "SoftmaxBackward" in text
    return "fused" if fused else "-"


COLUMNS = {
    "`attend`, H100": functools.partial(mark, function=attend, platform=GPUS),
    "`jax.nn`, H100": functools.partial(mark, function=jax_nn, platform=GPUS),
    "FlashAttention 2": lambda kind: "fused" if kind.flash else "-",
    "`attend`, TPU": functools.partial(mark, function=attend, platform=TPUS),
    "splash, TPU": functools.partial(mark, function=splash, platform=TPUS),
}


def table():
    """Returns the table in Markdown."""
    lines = [f"| kind of call | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    rows = {kind.name: [column(kind) for column in COLUMNS.values()] for kind in KINDS}
    for name, marks in rows.items():
        lines.append(f"| {name} | {' | '.join(marks)} |")
    counts = [str(len(rows) - column.count("-")) for column in zip(*rows.values(), strict=True)]
    return "\n".join([*lines, f"| of {len(rows)} | {' | '.join(counts)} |"])


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    warnings.simplefilter("ignore")
    print(table())
