"""Times the "chunked" backend over block sizes: where the table in ``crossattn/ops/blocks.py`` comes from.

    python -m experiments.bench.block_sizes

Forward, and forward with backward, for a long sequence, a batch of short ones, few queries of many keys
and many queries of few, with heads of 64 and 128; then, from which size on it beats the reference. Run it on
the platform that the table is for.
"""

from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import crossattn as xa
from crossattn.ops import blocks
from experiments.bench import contest

SHAPES = [
    (1, 4096, 4096, 64),
    (1, 2048, 2048, 128),
    (32, 256, 256, 64),
    (1, 256, 8192, 64),
    (1, 8192, 256, 64),
]
SIZES = [(32, 64), (64, 64), (64, 128), (128, 64), (128, 128), (64, 256), (256, 256), (512, 1024)]
LENGTHS = (128, 256, 512, 1024)
HEADS, ROUNDS = 8, 3


def main() -> None:
    """Measure and print."""
    print(f"{contest.machine()}; jax {jax.__version__} on {jax.default_backend()}\n")
    for batch, T, S, H in SHAPES:
        arrays, logits = operands(batch, T, S, H), batch * HEADS * T * S
        for title in ("forward", "forward and backward"):
            calls = {f"{a} x {b}": call(title, "chunked", arrays, (a, b)) for a, b in SIZES}
            seconds = contest.alternate(calls, ROUNDS)
            contest.show(f"{title}, [{batch}, {T}, {S}, {HEADS}, {H}]", seconds, "logits", logits)
    for length in LENGTHS:
        arrays, logits = operands(1, length, length, 64), HEADS * length**2
        calls = {b: call("forward and backward", b, arrays) for b in ("reference", "chunked")}
        seconds = contest.alternate(calls, ROUNDS)
        contest.show(
            f"{length} queries and keys, 2^{np.log2(logits):.0f} logits", seconds, "logits", logits
        )


def operands(batch: int, T: int, S: int, H: int):
    """q, k and v in float32."""
    random = np.random.default_rng(0)
    shapes = [(batch, length, HEADS, H) for length in (T, S, S)]
    return [jnp.asarray(random.normal(size=shape).astype(np.float32)) for shape in shapes]


def call(title: str, backend: str, arrays, sizes: tuple[int, int] | None = None):
    """A compiled call, traced with these block sizes."""
    attend = partial(xa.attend, backend=backend)
    if title != "forward":
        attend = jax.grad(
            lambda *x: jnp.sum(xa.attend(*x, backend=backend) ** 2), argnums=(0, 1, 2)
        )

    def plan(T: int, S: int, rows: int) -> blocks.Plan:
        queries, keys = sizes or (T, S)
        return blocks.Plan(T, S, min(queries, T), min(keys, S))

    with mock.patch.object(blocks, "plan", plan if sizes else blocks.plan):
        compiled = jax.jit(attend).lower(*arrays).compile()
    return lambda: jax.block_until_ready(compiled(*arrays))


if __name__ == "__main__":
    main()
