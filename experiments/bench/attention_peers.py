"""Attention functions of several libraries, each timed on arrays of its own library."""

import importlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import crossattn as xa
from crossattn.ops.masks import Mask
from experiments.bench import contest
from experiments.launch import trim_heap

CONTESTANTS = (
    "crossattn", "crossattn chunked", "naive", "jax.nn", "flax.nnx", "tokamax", "PyTorch SDPA",
)  # fmt: skip
ON_GPU = ("PyTorch cuDNN", "PyTorch flex")
QUEUED = 10
"""Calls that a GPU is given at once, so that starting one from Python takes no part of its time."""


@dataclass(frozen=True)
class Shape:
    """Operands [B, T or S, N, H], and a mask: full, causal, padded, or the width of a window."""

    B: int
    T: int
    S: int
    N: int
    H: int
    mask: str | int = "full"
    dtype: str = "float32"

    @property
    def logits(self) -> int:
        """The number of logits."""
        return self.B * self.N * self.T * self.S

    @property
    def flops(self) -> float:
        """FLOPs of both products of the forward pass without a mask."""
        return 4.0 * self.logits * self.H

    def lengths(self) -> np.ndarray:
        """Returns the valid keys of each row of a padded batch, from a third to all."""
        return np.linspace(self.S // 3, self.S, self.B).astype(np.int32)

    def operands(self) -> list[np.ndarray]:
        """Draws q, k, v and the gradient of the output, float32."""
        shapes = [(self.B, n, self.N, self.H) for n in (self.T, self.S, self.S, self.T)]
        return [_drawn(i, math.prod(shape)).reshape(shape) for i, shape in enumerate(shapes)]

    def term(self) -> Mask | None:
        """Returns the mask as a term of ``crossattn.masks``."""
        if isinstance(self.mask, int):
            return xa.masks.window(self.mask, 0)
        if self.mask == "padded":
            return xa.masks.lengths(self.lengths())
        return xa.masks.causal() if self.mask == "causal" else None

    def matrix(self) -> Any:
        """Returns the mask as an array [B or 1, 1, T or 1, S], True for keys that a query may read."""
        query, key = np.arange(self.T)[:, None], np.arange(self.S)
        if self.mask == "padded":
            return (key < self.lengths()[:, None])[:, None, None]
        if self.mask == "full":
            return None
        left = self.T if self.mask == "causal" else int(self.mask)
        return ((key <= query) & (key >= query - left))[None, None]

    def __str__(self) -> str:
        kind = f"window {self.mask}" if isinstance(self.mask, int) else self.mask
        return f"[{self.B}, {self.T}, {self.S}, {self.N}, {self.H}] {kind}"


@cache
def _drawn(seed: int, count: int) -> np.ndarray:
    """Draws standard normal numbers, once for all shapes of so many."""
    return np.random.default_rng(seed).standard_normal(count, np.float32)


def contestant(library: str, shapes: dict[str, Shape]) -> Callable[[str, bool, int], list[float]]:
    """Returns ``measure(name of a shape, backward, calls)``, which returns the seconds of each call.

    The first call with a shape makes its operands and compiles. On a GPU a call is the mean of several.
    """
    build = _torch if library.startswith("PyTorch") else _jax
    ready: dict[tuple[str, bool], Callable[[int], object]] = {}
    gpu = jax.default_backend() == "gpu"
    queued = QUEUED if gpu else 1

    def measure(name: str, backward: bool, calls: int) -> list[float]:
        if (name, backward) not in ready:
            ready.clear()  # memory holds the operands of one shape
            ready[name, backward] = build(library, shapes[name], backward)
            ready[name, backward](1)
        seconds = []
        for _ in range(calls):
            start = time.perf_counter()
            ready[name, backward](queued)
            seconds.append((time.perf_counter() - start) / queued)
        return seconds

    return measure


def quadratic(library: str, dtype: str) -> bool:
    """Returns whether the library has the whole matrix of logits in memory."""
    return library in ("naive", "flax.nnx") or (library == "jax.nn" and dtype != "bfloat16")


def missing(library: str) -> str | None:
    """Returns the reason why a contestant cannot take part, or None."""
    package = library.split()[0].lower().replace("pytorch", "torch")
    try:
        importlib.import_module(package if package in ("torch", "tokamax") else "jax")
    except Exception as error:  # a library for another version of JAX fails in its own way
        return f"{type(error).__name__}: {error}"
    return None


def _jax(library: str, shape: Shape, backward: bool) -> Callable[[int], object]:
    q, k, v, d_out = (jnp.asarray(x, shape.dtype) for x in shape.operands())
    attend = _function(library, shape)

    @jax.jit
    def forward(q, k, v, d_out):
        return attend(q, k, v)

    @jax.jit
    def both(q, k, v, d_out):
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(d_out)

    def call(count: int) -> None:
        for _ in range(count):
            results = (both if backward else forward)(q, k, v, d_out)
        jax.block_until_ready(results)

    return call


def _function(library: str, shape: Shape) -> Callable[..., Any]:
    """Returns a library's function of q, k and v, with the mask in the library's own words."""
    if library.startswith("crossattn"):
        return partial(xa.attend, mask=shape.term(), backend=library.partition(" ")[2] or None)
    if library == "naive":
        return partial(_naive, shape.matrix())
    if library == "flax.nnx":
        return partial(nnx.dot_product_attention, mask=shape.matrix())
    # jax.nn and tokamax have the same words for causal masks and windows.
    options: dict[str, Any] = {"is_causal": shape.mask == "causal"}
    if isinstance(shape.mask, int):
        options = {"local_window_size": (shape.mask, 0), "is_causal": True}
    if library == "jax.nn":
        if shape.mask == "padded":
            options["key_value_seq_lengths"] = shape.lengths()
        if shape.dtype == "bfloat16":
            options["implementation"] = "cudnn"
        return partial(jax.nn.dot_product_attention, **options)

    import tokamax
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # else tokamax parses the arguments of this program
    if shape.mask == "padded":
        options["mask"] = shape.matrix()
    if jax.default_backend() == "cpu":
        options["implementation"] = "xla_chunked"
    return partial(tokamax.dot_product_attention, **options)


def _naive(mask: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Computes the equation of the paper."""
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    logits = logits if mask is None else jnp.where(mask, logits, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), v)


def _torch(library: str, shape: Shape, backward: bool) -> Callable[[int], object]:
    import torch

    gpu = torch.cuda.is_available()
    place: dict[str, Any] = {
        "device": "cuda" if gpu else "cpu",
        "dtype": getattr(torch, shape.dtype),
    }
    # Its kernels want [B, N, T, H] in memory.
    q, k, v, d_out = (
        torch.tensor(x).transpose(1, 2).contiguous().to(**place) for x in shape.operands()
    )
    if library.endswith("flex"):
        attend = _flex(shape)
    else:
        options: dict[str, Any] = {"is_causal": shape.mask == "causal"}
        if shape.mask not in ("full", "causal"):
            options["attn_mask"] = torch.tensor(shape.matrix(), device=q.device)
        attend = partial(torch.nn.functional.scaled_dot_product_attention, **options)

    def forward():
        if not library.endswith("cuDNN"):
            return attend(q, k, v)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            return attend(q, k, v)

    def call(count: int) -> None:
        for _ in range(count):
            if backward:
                for x in (q, k, v):
                    x.grad = None
                forward().backward(d_out)
            else:
                with torch.no_grad():
                    forward()
        if gpu:
            torch.cuda.synchronize()

    for x in (q, k, v):
        x.requires_grad_(backward)
    return call


def _flex(shape: Shape) -> Callable[..., Any]:
    """Returns PyTorch's FlexAttention, compiled, with a mask of blocks."""
    import torch
    from torch.nn.attention import flex_attention as flex

    length = torch.tensor(shape.lengths(), device="cuda")
    left = shape.mask if isinstance(shape.mask, int) else shape.T

    def allowed(b, h, query, key):
        if shape.mask == "padded":
            return key < length[b]
        return (key <= query) & (key >= query - left)

    torch.compiler.reset()  # which stops to compile a function anew after eight shapes
    attend, blocks = torch.compile(flex.flex_attention, dynamic=False), None
    if shape.mask != "full":
        batch = shape.B if shape.mask == "padded" else None
        blocks = flex.create_block_mask(allowed, batch, None, shape.T, shape.S, device="cuda")
    return partial(attend, block_mask=blocks)


def memory(library: str, shape: Shape) -> Callable[[], float]:
    """Returns ``peak()``, which returns the bytes of a pass, forward and backward, beyond its operands.

    Compilation is included, libraries are not.
    """
    build = _torch if library.startswith("PyTorch") else _jax
    build(library, replace(shape, T=128, S=128), True)(1)
    call = build(library, shape, True)

    def peak() -> float:
        trim_heap()  # what came before would serve the call unseen
        before = contest.memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        call(1)
        return contest.memory("VmHWM") - before

    return peak
