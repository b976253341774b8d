"""Times the "chunked" backend over block sizes, for the table in ``ops/blockwise/blocks.py``.

    python -m experiments.bench.block_sizes

Forward and backward passes apart, on long and short sequences, several head sizes and masks; sizes of the
table are in brackets. Then forward and backward pass of "chunked" and of the reference, by length. Takes a
quarter of an hour on two CPU cores.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import crossattn as xa
from crossattn.ops.blockwise import blocks
from crossattn.ops.masks import Mask
from experiments.bench import contest
from experiments.options import Options

HEADS, ROUNDS = 8, 5
SIZES = [(64, 64), (128, 128), (256, 256), (256, 512), (512, 256), (512, 512), (512, 1024)]
MOST_LOGITS = 1 << 23  # in a block, over all heads and examples
LENGTHS = (128, 256, 512, 1024)


class Case(NamedTuple):
    """Operands [B, T, S, ``HEADS``, H] and a mask."""

    B: int
    T: int
    S: int
    H: int
    masked: str = "no mask"

    @property
    def title(self) -> str:
        return f"[{self.B}, {self.T}, {self.S}, {HEADS}, {self.H}], {self.masked}"

    @property
    def mask(self) -> Mask | None:
        lengths = np.random.default_rng(0).integers(self.S // 4, self.S + 1, self.B)
        kinds = {
            "causal": xa.masks.causal(),
            "window of 256": xa.masks.window(255, 0),
            "padded": xa.masks.lengths(lengths),
        }
        return kinds.get(self.masked)

    def operands(self) -> list[jax.Array]:
        """q, k and v in float32."""
        random = np.random.default_rng(0)
        shapes = [(self.B, length, HEADS, self.H) for length in (self.T, self.S, self.S)]
        return [jnp.asarray(random.standard_normal(shape, np.float32)) for shape in shapes]

    def sizes(self) -> Iterator[tuple[int, int]]:
        """Block sizes that fit the matrix, each once."""
        fitting = dict.fromkeys((min(a, self.T), min(b, self.S)) for a, b in SIZES)
        return (size for size in fitting if self.B * HEADS * size[0] * size[1] <= MOST_LOGITS)


CASES = [
    Case(1, 4096, 4096, 64),
    Case(1, 4096, 4096, 64, "causal"),
    Case(1, 4096, 4096, 64, "window of 256"),
    Case(1, 2048, 2048, 128),
    Case(1, 2048, 2048, 32),
    Case(1, 2048, 2048, 64, "causal"),
    Case(1, 1024, 1024, 64),
    Case(1, 1024, 1024, 64, "causal"),
    Case(4, 1024, 1024, 64),
    Case(32, 256, 256, 64),
    Case(32, 256, 256, 64, "padded"),
    Case(4, 256, 2048, 64, "padded"),
    Case(1, 256, 8192, 64),
    Case(1, 8192, 256, 64),
]


def main() -> None:
    """Measures and prints."""
    Options(__doc__).parse_args()
    print(f"{contest.machine()}; jax {jax.__version__} on {jax.default_backend()}\n", flush=True)
    for case in CASES:
        for title, compiled in (("forward", forward), ("backward", backward)):
            calls = {name(size, case): compiled(case, size) for size in case.sizes()}
            seconds = contest.alternate(calls, ROUNDS, warmup=1)
            logits = case.B * HEADS * case.T * case.S
            contest.show(f"{title}, {case.title}", seconds, "logits", logits)
    for length in LENGTHS:
        case, logits = Case(1, length, length, 64), HEADS * length**2
        calls = {b: whole(case, b) for b in ("reference", "chunked")}
        seconds = contest.alternate(calls, ROUNDS)
        contest.show(f"{length} queries and keys", seconds, "logits", logits)


def name(size: tuple[int, int], case: Case) -> str:
    """The sizes; those of the table in brackets."""
    plan = blocks.plan(case.T, case.S, case.B * HEADS, case.mask)
    text = f"{size[0]} x {size[1]}"
    return f"[{text}]" if size == (plan.queries, plan.keys) else text


def forward(case: Case, size: tuple[int, int]) -> Callable[[], object]:
    """A compiled call with these block sizes."""
    operands = case.operands()
    with cut(size):
        attend = partial(xa.attend, mask=case.mask, backend="chunked")
        compiled = jax.jit(attend).lower(*operands).compile()
    return lambda: jax.block_until_ready(compiled(*operands))


def backward(case: Case, size: tuple[int, int]) -> Callable[[], object]:
    """A compiled backward pass with these block sizes."""
    attend = partial(xa.attend, mask=case.mask, backend="chunked")
    with cut(size):
        out, pull = jax.jit(lambda *x: jax.vjp(attend, *x))(*case.operands())
        compiled = jax.jit(lambda pull, out: pull(out)).lower(pull, out).compile()
    return lambda: jax.block_until_ready(compiled(pull, out))


def whole(case: Case, backend: str) -> Callable[[], object]:
    """A compiled forward and backward pass of a backend."""
    operands = case.operands()
    squares = jax.grad(lambda *x: jnp.sum(xa.attend(*x, backend=backend) ** 2), argnums=(0, 1, 2))
    compiled = jax.jit(squares).lower(*operands).compile()
    return lambda: jax.block_until_ready(compiled(*operands))


def cut(size: tuple[int, int]):
    """A context that cuts matrices into blocks of this size."""
    return mock.patch.object(blocks, "plan", lambda T, S, *_: blocks.Plan(T, S, *size))


if __name__ == "__main__":
    main()
