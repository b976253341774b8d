"""Times the "chunked" backend over block sizes, for the table in ``ops/blockwise/blocks.py``.

    python -m experiments.bench.block_sizes

Forward and backward passes apart, on long and short sequences, several head sizes and masks; sizes of the
table are in brackets. Then forward and backward pass of "chunked" and of the reference, by length. Takes a
quarter of an hour on two CPU cores.
"""

from collections.abc import Callable
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp

import crossattn as xa
from crossattn.ops.blockwise import blocks
from experiments import launch
from experiments.bench import contest
from experiments.bench.attention_peers import Shape
from experiments.options import Options

ROUNDS = 5
SIZES = [(64, 64), (128, 128), (256, 256), (256, 512), (512, 256), (512, 512), (512, 1024)]
MOST_LOGITS = 1 << 23  # in a block, over all heads and examples
LENGTHS = (128, 256, 512, 1024)
SHAPES = [
    Shape(1, 4096, 4096, 8, 64),
    Shape(1, 4096, 4096, 8, 64, "causal"),
    Shape(1, 4096, 4096, 8, 64, 255),
    Shape(1, 2048, 2048, 8, 128),
    Shape(1, 2048, 2048, 8, 32),
    Shape(1, 2048, 2048, 8, 64, "causal"),
    Shape(1, 1024, 1024, 8, 64),
    Shape(1, 1024, 1024, 8, 64, "causal"),
    Shape(4, 1024, 1024, 8, 64),
    Shape(32, 256, 256, 8, 64),
    Shape(32, 256, 256, 8, 64, "padded"),
    Shape(4, 256, 2048, 8, 64, "padded"),
    Shape(1, 256, 8192, 8, 64),
    Shape(1, 8192, 256, 8, 64),
]


def main() -> None:
    """Measures and prints."""
    Options(__doc__).parse_args()
    print(f"{contest.machine()}; jax {jax.__version__} on {jax.default_backend()}\n", flush=True)
    for shape in SHAPES:
        for title, compiled in (("forward", forward), ("backward", backward)):
            calls = {name(size, shape): compiled(shape, size) for size in sizes(shape)}
            seconds = contest.alternate(calls, ROUNDS, warmup=1)
            contest.show(f"{title}, {shape}", seconds, "logits", shape.logits)
    for length in LENGTHS:
        shape = Shape(1, length, length, 8, 64)
        calls = {b: whole(shape, b) for b in ("reference", "chunked")}
        seconds = contest.alternate(calls, ROUNDS)
        contest.show(f"{length} queries and keys", seconds, "logits", shape.logits)


def sizes(shape: Shape) -> list[tuple[int, int]]:
    """Lists the block sizes that fit the matrix, each once."""
    fitting = dict.fromkeys((min(a, shape.T), min(b, shape.S)) for a, b in SIZES)
    return [(a, b) for a, b in fitting if shape.B * shape.N * a * b <= MOST_LOGITS]


def name(size: tuple[int, int], shape: Shape) -> str:
    """Formats block sizes, those of the table in brackets."""
    plan = blocks.plan(shape.T, shape.S, shape.B * shape.N, shape.term())
    text = f"{size[0]} x {size[1]}"
    return f"[{text}]" if size == (plan.queries, plan.keys) else text


def forward(shape: Shape, size: tuple[int, int]) -> Callable[[], object]:
    """Returns a compiled call with these block sizes."""
    operands = qkv(shape)
    with cut(size):
        attend = partial(xa.attend, mask=shape.term(), backend="chunked")
        compiled = jax.jit(attend).lower(*operands).compile()
    return lambda: jax.block_until_ready(compiled(*operands))


def backward(shape: Shape, size: tuple[int, int]) -> Callable[[], object]:
    """Returns a compiled backward pass with these block sizes."""
    attend = partial(xa.attend, mask=shape.term(), backend="chunked")
    with cut(size):
        out, pull = jax.jit(lambda *x: jax.vjp(attend, *x))(*qkv(shape))
        compiled = jax.jit(lambda pull, out: pull(out)).lower(pull, out).compile()
    return lambda: jax.block_until_ready(compiled(pull, out))


def whole(shape: Shape, backend: str) -> Callable[[], object]:
    """Returns a compiled forward and backward pass of a backend."""
    operands = qkv(shape)
    squares = jax.grad(lambda *x: jnp.sum(xa.attend(*x, backend=backend) ** 2), argnums=(0, 1, 2))
    compiled = jax.jit(squares).lower(*operands).compile()
    return lambda: jax.block_until_ready(compiled(*operands))


def qkv(shape: Shape) -> list[jax.Array]:
    """Returns the operands of the forward pass."""
    return [jnp.asarray(x) for x in shape.operands()[:3]]


def cut(size: tuple[int, int]):
    """Returns a context that cuts matrices into blocks of this size."""
    return mock.patch.object(blocks, "plan", lambda T, S, *_: blocks.Plan(T, S, *size))


if __name__ == "__main__":
    launch.script(main)
