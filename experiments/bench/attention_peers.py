"""Attention functions of several libraries, each timed on arrays of its own library."""

import importlib
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import crossattn as xa
from experiments.launch import keep_heap

CONTESTANTS = (
    "crossattn", "crossattn chunked", "naive", "jax.nn", "flax.nnx", "tokamax", "PyTorch SDPA",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Operands [B, T or S, N, H], and a mask: full, causal, padded, or the width of a window."""

    B: int
    T: int
    S: int
    N: int
    H: int
    mask: str | int = "full"

    @property
    def flops(self) -> float:
        """FLOPs of both products of the forward pass without a mask."""
        return 4.0 * self.B * self.N * self.T * self.S * self.H

    def lengths(self) -> np.ndarray:
        """Valid keys of each row of a padded batch, from a third to all."""
        return np.linspace(self.S // 3, self.S, self.B).astype(np.int32)

    def operands(self) -> list[np.ndarray]:
        """q, k, v and the gradient of the output, float32."""
        random = np.random.default_rng(0)
        lengths = (self.T, self.S, self.S, self.T)
        return [random.standard_normal((self.B, n, self.N, self.H), np.float32) for n in lengths]

    def __str__(self) -> str:
        kind = f"window {self.mask}" if isinstance(self.mask, int) else self.mask
        return f"[{self.B}, {self.T}, {self.S}, {self.N}, {self.H}] {kind}"


def contestant(library: str, shapes: dict[str, Shape]) -> Callable[[str, bool, int], list[float]]:
    """``measure(name of a shape, backward, calls)``, which returns the seconds of each call.

    The first call with a shape makes its operands and compiles.
    """
    build = _torch if library == "PyTorch SDPA" else _jax
    ready: dict[tuple[str, bool], Callable[[], object]] = {}

    def measure(name: str, backward: bool, calls: int) -> list[float]:
        if (name, backward) not in ready:
            ready.clear()  # memory holds the operands of one shape
            ready[name, backward] = build(library, shapes[name], backward)
            ready[name, backward]()
        seconds = []
        for _ in range(calls):
            start = time.perf_counter()
            ready[name, backward]()
            seconds.append(time.perf_counter() - start)
        return seconds

    return measure


def quadratic(library: str, platform: str) -> bool:
    """Whether the library has the whole matrix of logits in memory."""
    return library in ("naive", "flax.nnx") or (library == "jax.nn" and platform != "gpu")


def missing(library: str) -> str | None:
    """The reason why a contestant cannot take part, or None."""
    try:
        importlib.import_module({"PyTorch SDPA": "torch", "tokamax": "tokamax"}.get(library, "jax"))
    except Exception as error:  # a library for another version of JAX fails in its own way
        return f"{type(error).__name__}: {error}"
    return None


def _jax(library: str, shape: Shape, backward: bool) -> Callable[[], object]:
    keep_heap()
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    q, k, v, d_out = (jnp.asarray(x, dtype) for x in shape.operands())
    peers = {"naive": _naive, "jax.nn": _jax_nn, "flax.nnx": _flax, "tokamax": _tokamax}
    if library in peers:
        attend = peers[library](shape)
    else:
        attend = _ours(shape, backend=library.partition(" ")[2] or None)
    if not backward:
        forward = jax.jit(attend)
        return lambda: jax.block_until_ready(forward(q, k, v))

    @jax.jit
    def both(q, k, v, d_out):
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(d_out)

    return lambda: jax.block_until_ready(both(q, k, v, d_out))


def _ours(shape: Shape, backend: str | None) -> Callable[..., Any]:
    mask = None
    if shape.mask == "causal":
        mask = xa.masks.causal()
    elif shape.mask == "padded":
        mask = xa.masks.lengths(shape.lengths())
    elif isinstance(shape.mask, int):
        mask = xa.masks.window(shape.mask, 0)
    return lambda q, k, v: xa.attend(q, k, v, mask, backend=backend)


def _fused_options(shape: Shape) -> dict[str, Any]:
    """Causal masks and windows, in the words of ``jax.nn``, which tokamax shares."""
    if isinstance(shape.mask, int):
        return {"local_window_size": (shape.mask, 0), "is_causal": True}
    return {"is_causal": shape.mask == "causal"}


def _jax_nn(shape: Shape) -> Callable[..., Any]:
    options = _fused_options(shape)
    if shape.mask == "padded":
        options["key_value_seq_lengths"] = shape.lengths()
    if jax.default_backend() == "gpu":
        options["implementation"] = "cudnn"
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **options)


def _tokamax(shape: Shape) -> Callable[..., Any]:
    import tokamax
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # else tokamax parses the arguments of this program
    options = _fused_options(shape)
    if shape.mask == "padded":
        options["mask"] = _matrix(shape)
    if jax.default_backend() == "cpu":
        options["implementation"] = "xla_chunked"
    return lambda q, k, v: tokamax.dot_product_attention(q, k, v, **options)


def _matrix(shape: Shape) -> Any:
    """The mask as an array [B or 1, 1, T or 1, S], True for keys that a query may read."""
    query, key = np.arange(shape.T)[:, None], np.arange(shape.S)
    if shape.mask == "padded":
        return (key < shape.lengths()[:, None])[:, None, None]
    if shape.mask == "full":
        return None
    left = shape.T if shape.mask == "causal" else int(shape.mask)
    return ((key <= query) & (key >= query - left))[None, None]


def _naive(shape: Shape) -> Callable[..., Any]:
    """The equation of the paper."""
    mask = _matrix(shape)

    def attend(q, k, v):
        logits = jnp.einsum("btnh,bsnh->bnts", q, k) * shape.H**-0.5
        logits = logits if mask is None else jnp.where(mask, logits, -jnp.inf)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), v)

    return attend


def _flax(shape: Shape) -> Callable[..., Any]:
    mask = _matrix(shape)
    return lambda q, k, v: nnx.dot_product_attention(q, k, v, mask=mask)


def _torch(library: str, shape: Shape, backward: bool) -> Callable[[], object]:
    import torch

    gpu = torch.cuda.is_available()
    place: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16} if gpu else {}
    # Its kernels want [B, N, T, H] in memory.
    q, k, v, d_out = (
        torch.tensor(x).transpose(1, 2).contiguous().to(**place) for x in shape.operands()
    )
    options: dict[str, Any] = {"is_causal": shape.mask == "causal"}
    if shape.mask not in ("full", "causal"):
        options["attn_mask"] = torch.tensor(_matrix(shape), device=q.device)

    def forward():
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    def call():
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


def memory(library: str, shape: Shape) -> Callable[[], float]:
    """``peak()``, which returns the bytes of a forward and backward pass beyond operands and library.

    It samples the resident size of this process every millisecond, compilation included.
    """
    build = _torch if library == "PyTorch SDPA" else _jax
    build(library, replace(shape, T=128, S=128), True)()
    call = build(library, shape, True)

    def peak() -> float:
        before, most, done = _resident(), [0.0], threading.Event()

        def watch() -> None:
            while not done.wait(0.001):
                most[0] = max(most[0], _resident())

        watcher = threading.Thread(target=watch)
        watcher.start()
        call()
        done.set()
        watcher.join()
        return most[0] - before

    return peak


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return float(pages * resource.getpagesize())
