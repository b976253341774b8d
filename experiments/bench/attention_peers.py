"""Attention functions that are timed side by side, each on operands of its own library.

A contestant is ``make(library) -> measure``; ``measure(name of a shape, backward, calls)`` gives the
seconds of each call. It runs in a process of its own.
"""

import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

CONTESTANTS = (
    "crossattn", "crossattn chunked", "naive", "jax.nn", "flax.nnx", "tokamax", "PyTorch SDPA",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Operands [B, T or S, N, H] and what may be read: full, causal, padded, or a window's width."""

    B: int
    T: int
    S: int
    N: int
    H: int
    mask: str | int = "full"

    @property
    def flops(self) -> float:
        """Of the two products of the forward pass, were there no mask."""
        return 4.0 * self.B * self.N * self.T * self.S * self.H

    def lengths(self) -> np.ndarray:
        """Keys that the rows of a padded batch may read, a third up to all."""
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
    """``measure`` of a library; the first call with a shape makes its operands and compiles."""
    build = _torch if library == "PyTorch SDPA" else _jax
    ready: dict[tuple[str, bool], Callable[[], object]] = {}

    def measure(name: str, backward: bool, calls: int) -> list[float]:
        if (name, backward) not in ready:
            ready.clear()  # the operands of one shape at a time
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
    """Whether the whole matrix of logits is in memory."""
    return library in ("naive", "flax.nnx") or (library == "jax.nn" and platform != "gpu")


def missing(library: str) -> str | None:
    """Why a contestant cannot take part, or None."""
    module = {"PyTorch SDPA": "torch", "tokamax": "tokamax"}.get(library)
    try:
        if module:
            __import__(module)
    except Exception as error:  # a library for another version of JAX fails in its own way
        return f"{type(error).__name__}: {error}"
    return None


def _jax(library: str, shape: Shape, backward: bool) -> Callable[[], object]:
    import jax
    import jax.numpy as jnp

    from experiments.launch import keep_heap

    keep_heap()
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    q, k, v, d_out = (jnp.asarray(x, dtype) for x in shape.operands())
    peers = {"naive": _naive, "jax.nn": _jax_nn, "flax.nnx": _flax, "tokamax": _tokamax}
    function = peers.get(library, _ours)
    attend = function(shape, library)
    if backward:

        def both(q, k, v, d_out):
            out, pull = jax.vjp(attend, q, k, v)
            return out, pull(d_out)

        compiled = jax.jit(both)
        return lambda: jax.block_until_ready(compiled(q, k, v, d_out))
    forward = jax.jit(attend)
    return lambda: jax.block_until_ready(forward(q, k, v))


def _ours(shape: Shape, library: str) -> Callable[..., Any]:
    import crossattn as xa

    mask = None
    if shape.mask == "causal":
        mask = xa.masks.causal()
    elif shape.mask == "padded":
        mask = xa.masks.lengths(shape.lengths())
    elif isinstance(shape.mask, int):
        mask = xa.masks.window(shape.mask, 0)
    backend = library.partition(" ")[2] or None
    return lambda q, k, v: xa.attend(q, k, v, mask, backend=backend)


def _jax_nn(shape: Shape, library: str) -> Callable[..., Any]:
    import jax

    options: dict[str, Any] = {"is_causal": shape.mask == "causal"}
    if shape.mask == "padded":
        options["key_value_seq_lengths"] = shape.lengths()
    if isinstance(shape.mask, int):
        options |= {"local_window_size": (shape.mask, 0), "is_causal": True}
    if jax.default_backend() == "gpu":
        options["implementation"] = "cudnn"
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **options)


def _matrix(shape: Shape) -> Any:
    """What may be read, [B or 1, 1, T or 1, S]."""
    query, key = np.arange(shape.T)[:, None], np.arange(shape.S)
    if shape.mask == "padded":
        return (key < shape.lengths()[:, None])[:, None, None]
    if shape.mask == "full":
        return None
    left = shape.T if shape.mask == "causal" else int(shape.mask)
    return ((key <= query) & (key >= query - left))[None, None]


def _naive(shape: Shape, library: str) -> Callable[..., Any]:
    """The equation as it stands in the paper."""
    import jax
    import jax.numpy as jnp

    mask = _matrix(shape)

    def attend(q, k, v):
        logits = jnp.einsum("btnh,bsnh->bnts", q, k) * shape.H**-0.5
        logits = logits if mask is None else jnp.where(mask, logits, -jnp.inf)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), v)

    return attend


def _flax(shape: Shape, library: str) -> Callable[..., Any]:
    from flax import nnx

    mask = _matrix(shape)
    return lambda q, k, v: nnx.dot_product_attention(q, k, v, mask=mask)


def _tokamax(shape: Shape, library: str) -> Callable[..., Any]:
    import jax
    import tokamax
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # else tokamax parses this program's arguments as its own
    options: dict[str, Any] = {"is_causal": shape.mask == "causal"}
    if isinstance(shape.mask, int):
        options |= {"local_window_size": (shape.mask, 0), "is_causal": True}
    if shape.mask == "padded":
        options["mask"] = _matrix(shape)
    if jax.default_backend() == "cpu":
        options["implementation"] = "xla_chunked"
    return lambda q, k, v: tokamax.dot_product_attention(q, k, v, **options)


def _torch(library: str, shape: Shape, backward: bool) -> Callable[[], object]:
    import torch

    gpu = torch.cuda.is_available()
    place: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16} if gpu else {}
    # [B, N, T, H] in memory, as its kernels want it.
    moved = [torch.tensor(x).transpose(1, 2).contiguous().to(**place) for x in shape.operands()]
    q, k, v, d_out = moved
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
    """``peak()``: bytes that forward and backward of a shape take beyond operands and library.

    The resident size of this process is sampled every millisecond; what compiling takes is in it.
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
