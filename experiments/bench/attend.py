"""Times ``attend`` against attention of JAX, Flax, tokamax and PyTorch.

    python -m experiments.bench.attend [--quick] [--only=NAME] [--json=FILE]

Each contestant has a process of its own; calls alternate and medians are compared. float32 on CPU,
bfloat16 but for one row on a GPU, where contestants compile side by side, and a time is the mean of ten calls
that are queued together. Backward passes are timed with the forward pass that they need. Peak memory on a CPU
is measured in further processes, for forward and backward together.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import launch
from experiments.bench import contest
from experiments.bench.attention_peers import (
    CONTESTANTS,
    ON_GPU,
    Shape,
    contestant,
    memory,
    missing,
    quadratic,
)
from experiments.options import Options

CPU_SHAPES = {
    "self 64, padded": Shape(32, 64, 64, 8, 64, "padded"),
    "self 64": Shape(32, 64, 64, 8, 64),
    "self 256": Shape(8, 256, 256, 8, 64),
    "self 1024": Shape(1, 1024, 1024, 8, 64),
    "self 2048, wide heads": Shape(1, 2048, 2048, 8, 128),
    "self 4096": Shape(1, 4096, 4096, 8, 64),
    "causal 4096": Shape(1, 4096, 4096, 8, 64, "causal"),
    "window 256 of 4096": Shape(1, 4096, 4096, 8, 64, 256),
    "cross 256 to 8192": Shape(1, 256, 8192, 8, 64),
    "cross 64 to 16384": Shape(1, 64, 16384, 8, 64),
    "causal 16384": Shape(1, 16384, 16384, 8, 64, "causal"),
    "window 256 of 16384": Shape(1, 16384, 16384, 8, 64, 256),
}
# 16,384 tokens and 2,048 columns, as in the FlashAttention papers.
GPU_SHAPES = {
    f"{mask} {T}, head size {H}": Shape(16384 // T, T, T, 2048 // H, H, mask, "bfloat16")
    for mask in ("full", "causal")
    for T in (512, 2048, 16384)
    for H in (64, 128)
} | {
    "padded 2048": Shape(8, 2048, 2048, 16, 128, "padded", "bfloat16"),
    "window 512 of 16384": Shape(1, 16384, 16384, 16, 128, 512, "bfloat16"),
    "cross 256 to 16384": Shape(1, 256, 16384, 16, 128, "full", "bfloat16"),
    "float32, causal 2048": Shape(8, 2048, 2048, 16, 128, "causal"),
}
MEMORY = {f"self {n}": Shape(1, n, n, 8, 64) for n in (2048, 4096, 8192)}
LONG = Shape(1, 65536, 65536, 1, 64)
# Seconds: shorter calls run five times a round; longer calls have three rounds.
SHORT_CALL, LONG_CALL = 0.1, 3.0
MOST_LOGITS = 2**29  # for contestants whose memory is quadratic


def main() -> None:
    """Measures, prints, and writes a file if --json names one."""
    parser = Options(__doc__)
    parser.add_argument("--only", default="", help="shapes whose names contain this")
    parser.add_argument("--quick", action="store_true", help="the small shapes, three rounds")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    options = parser.parse_args()
    # Contestants share a GPU, so none of them may reserve most of its memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    gpu = jax.default_backend() == "gpu"
    largest = 2**23 if options.quick else np.inf
    shapes = {
        name: shape
        for name, shape in (GPU_SHAPES if gpu else CPU_SHAPES).items()
        if options.only in name and shape.logits <= largest
    }
    results: dict[str, Any] = {"machine": contest.machine(), "device": jax.devices()[0].device_kind}
    results["gemm_gflops"] = gemm_peak()
    print(f"{results['machine']}; {results['device']}; jax {jax.__version__}")
    print(f"matrix products reach {results['gemm_gflops']:.0f} GFLOP/s here\n")
    reasons = {name: missing(name) for name in (*CONTESTANTS, *(ON_GPU if gpu else ()))}
    players = [name for name, reason in reasons.items() if reason is None]
    for name, reason in reasons.items():
        if reason:
            print(f"{name} takes no part: {reason}")
    results["seconds"] = []
    for row in timed(shapes, players, 3 if options.quick else 5):
        results["seconds"].append(row)
        keep(results, options.json)  # after each row, in case that the run is cut short
    if not (options.quick or options.only or gpu):
        results["bytes"] = peaks(players)
        results["long"] = long()
        keep(results, options.json)


def keep(results: dict[str, Any], path: Path | None) -> None:
    """Writes the results so far."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def gemm_peak() -> float:
    """Measures GFLOP/s of a square matrix product, the best of nine."""
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    n = 8192 if jax.default_backend() == "gpu" else 2048
    x, product = jnp.ones((n, n), dtype), jax.jit(lambda x: x @ x)
    seconds = contest.alternate({"product": lambda: product(x).block_until_ready()}, 9, warmup=1)
    return 2 * n**3 / min(seconds["product"]) / 1e9


def timed(shapes: dict[str, Shape], players: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    """Yields median seconds by contestant for each shape and direction; prints their ratios to ours."""
    with contextlib.ExitStack() as stack:
        calls = {
            name: stack.enter_context(contest.elsewhere(contestant, name, shapes))
            for name in players
        }
        for name, shape in shapes.items():
            for backward in (False, True):
                if jax.default_backend() == "gpu":
                    compile_ahead(calls, name, shape, backward)
                seconds = compare(calls, name, shape, backward, rounds)
                row = {"shape": name, "sizes": str(shape), "backward": backward} | seconds
                show(row, shape)
                yield row


def compile_ahead(calls, name: str, shape: Shape, backward: bool) -> None:
    """Lets contestants compile a call side by side, each in its own process; ``compare`` reports refusals."""

    def once(player: str) -> None:
        with contextlib.suppress(Exception):
            calls[player](name, backward, 1)

    with ThreadPoolExecutor(len(calls)) as threads:
        list(threads.map(once, [player for player in calls if fits(player, shape)]))


def compare(calls, name: str, shape: Shape, backward: bool, rounds: int) -> dict[str, Any]:
    """Returns median seconds by contestant, of 21 calls, 5 long ones or 3 very long ones; on a GPU of 5."""
    each: dict[str, list[float]] = {}
    for player, measure in calls.items():
        if not fits(player, shape):
            continue
        try:
            each[player] = measure(name, backward, 1)
        except Exception as error:  # each library refuses in its own way
            if player == CONTESTANTS[0]:
                raise
            print(f"{player} takes no part in {name}: {str(error).splitlines()[0][:200]}")
    longest = max(max(seconds) for seconds in each.values())
    cpu = jax.default_backend() == "cpu"
    for _ in range(rounds - 1 if longest < LONG_CALL else 2):
        for player in each:
            if cpu:
                time.sleep(0.1)
            each[player] += calls[player](name, backward, 5 if cpu and longest < SHORT_CALL else 1)
    return {player: float(np.median(s)) for player, s in each.items()}


def fits(player: str, shape: Shape) -> bool:
    """Returns whether memory holds the matrix of logits, if the contestant makes one."""
    return shape.logits <= MOST_LOGITS or not quadratic(player, shape.dtype)


def show(row: dict[str, Any], shape: Shape) -> None:
    """Prints our time, and the others' as multiples of it."""
    own = row["crossattn"]
    rate = (3.5 if row["backward"] else 1) * shape.flops / own / 1e9
    names = (*CONTESTANTS[1:], *ON_GPU)
    others = "  ".join(f"{p} {row[p] / own:.2f}x" for p in names if p in row)
    what = "fwd+bwd" if row["backward"] else "forward"
    print(f"{row['shape']:<22} {row['sizes']:<34} {what}  {own * 1e3:9.2f} ms", end="")
    print(f"  {rate:5.0f} GFLOP/s of the unmasked matrix | {others}", flush=True)


def peaks(players: list[str]) -> dict[str, dict[str, float]]:
    """Measures peak bytes beyond the operands, for forward and backward pass."""
    rows: dict[str, dict[str, float]] = {}
    for name, shape in MEMORY.items():
        rows[name] = {}
        for player in players:
            if not fits(player, shape):
                continue
            with contest.elsewhere(memory, player, shape) as peak:
                rows[name][player] = peak()
        text = "  ".join(f"{player} {x / 2**20:.0f} MiB" for player, x in rows[name].items())
        print(f"memory, {name:<12} forward+backward | {text}", flush=True)
    return rows


def long() -> dict[str, float]:
    """Measures seconds and peak bytes of 65,536 queries and keys."""
    with contest.elsewhere(contestant, "crossattn", {"long": LONG}) as measure:
        measure("long", True, 1)
        seconds = measure("long", True, 1)[0]
    with contest.elsewhere(memory, "crossattn", LONG) as peak:
        most = peak()
    print(f"{LONG}: forward+backward {seconds:.1f} s, {most / 2**20:.0f} MiB beyond the operands")
    return {"seconds": seconds, "bytes": most}


if __name__ == "__main__":
    launch.script(main)
