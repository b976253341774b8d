"""Times the training step of a config on the devices that are here, with random full rows and no data.

    python -m experiments.bench.steps --config=configs/wmt14_de_en.py
    python -m experiments.bench.steps --config=configs/wmt14_de_en.py --torch
    python -m experiments.bench.steps --config=experiments/bench/published.py:vit_b16

The step is that of ``train``, of all seeds where a run has several; the batch has the sizes of the config.
Prints seconds of a step, tokens or rows of a seed a second, MFU and memory; ``experiments.plan`` estimates
the same for devices that are not here. ``--torch`` also times a Marian of ``transformers`` with the sizes of
a translator on the same arrays.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from absl import flags

from crossattn.train.program import Program, make_program
from crossattn.train.sharding import make_mesh, put_batch, row_shares, spread_batch
from experiments import flops, launch
from experiments.bench import contest
from experiments.bench.translation_step import torch_step
from experiments.plan.compiling import unread_task
from experiments.plan.report import amount
from experiments.settings import train_config

_STEPS = flags.DEFINE_integer("timed_steps", 20, "Steps that are timed together.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("timed_rounds", 5, "How often they are timed.", lower_bound=1)
_TORCH = flags.DEFINE_bool("torch", False, "Time a translator of PyTorch, too.")
_PROFILE = flags.DEFINE_string("profile", None, "Write a trace of three steps into this folder.")
FLAGS = (launch.CONFIG, _STEPS, _ROUNDS, _TORCH, _PROFILE)


def main(arguments: Sequence[str]) -> None:
    """Measures and prints."""
    if arguments:
        raise launch.Refused(f"got {' '.join(arguments)}; expected only flags, see --help.")
    config = launch.required_config()
    values, task = train_config(config), unread_task(config)
    mesh = make_mesh(values.mesh, jax.devices())
    program = make_program(task, values, mesh)
    shapes = task.batch_shapes(row_shares(mesh))
    batch = filled(shapes, config.get("tokenizer", {}).get("vocab_size", 2))
    given = batch_of_all(batch, program, len(values.members))
    device = jax.devices()[0]
    print(
        f"{contest.machine()}; {jax.device_count()} x {device.device_kind}; jax {jax.__version__}"
    )
    start = time.perf_counter()
    call = stepping(program, given)
    call(1)
    compiled = time.perf_counter() - start
    seconds = timed(call)
    tokens = sum(x.size for name, x in batch.items() if name.endswith("positions"))
    what, count = ("tokens", tokens) if tokens else ("rows", len(next(iter(batch.values()))))
    show("crossattn", seconds, what, count)
    peak = flops.at_peak(task)
    if peak is not None:
        mfu = peak(program.target.params, shapes) / float(np.median(seconds))
        print(f"  MFU {100 * mfu:.1f} %")
    stats = device.memory_stats() or {}
    used = stats.get("peak_bytes_in_use")
    print(f"  first step after {compiled:.1f} s" + (f", peak {amount(used)}" if used else ""))
    if _PROFILE.value:
        with jax.profiler.trace(_PROFILE.value):
            call(3)
    if _TORCH.value:
        if config.model.name != "transformer":
            raise launch.Refused("--torch times a translator; the model is no transformer.")
        make = partial(torch_step, narrow=config.model.dtype == "bfloat16", **sizes(config))
        with contest.elsewhere(make, batch) as other:
            show("PyTorch Marian", timed(other), what, count)


def sizes(config: Any) -> dict[str, Any]:
    """Returns the sizes of a translator as ``models.marian`` names them."""
    model = config.model
    names = {"dim": "dim", "heads": "num_heads", "mlp": "mlp_dim", "layers": "encoder_layers"}
    named = {name: model[key] for name, key in names.items()}
    return named | {"dropout": model.dropout_rate, "vocabulary": config.tokenizer.vocab_size}


def filled(shapes: dict[str, jax.ShapeDtypeStruct], vocabulary: int) -> dict[str, np.ndarray]:
    """Draws a batch whose rows are full: one text each, or one picture."""
    random, batch = np.random.default_rng(0), {}
    for name, shape in shapes.items():
        if name.endswith("segment_ids") or name == "valid":
            batch[name] = np.ones(shape.shape, shape.dtype)
        elif name.endswith("positions"):
            batch[name] = np.broadcast_to(np.arange(shape.shape[1], dtype=shape.dtype), shape.shape)
        elif np.issubdtype(shape.dtype, np.integer):
            highest = vocabulary if name.startswith(("source", "target")) else 2
            batch[name] = random.integers(1, highest, shape.shape).astype(shape.dtype)
        else:
            batch[name] = random.random(shape.shape, np.float32)
    return batch


def batch_of_all(batch: dict[str, np.ndarray], program: Program, members: int) -> Any:
    """Places a batch on the devices, once for each member of a run that has members."""
    if not members:
        return jax.device_put(spread_batch(batch, program.mesh))
    copies = {name: np.stack([x] * members) for name, x in batch.items()}
    return jax.device_put(put_batch(copies, program.mesh, True, program.along))


def stepping(program: Program, given: Any) -> Callable[[int], None]:
    """Returns a call of so many steps, of which each waits for the one before."""
    state: Any = jax.jit(program.fresh, out_shardings=program.sharding)(program.key)

    def call(count: int) -> None:
        nonlocal state
        for _ in range(count):
            state, metrics = program.step(state, given)
        jax.block_until_ready((state, metrics))

    return call


def timed(call: Callable[[int], None]) -> list[float]:
    """Returns seconds of a step, the mean of several that are queued, for each round."""
    call(3)
    seconds = []
    for _ in range(_ROUNDS.value):
        start = time.perf_counter()
        call(_STEPS.value)
        seconds.append((time.perf_counter() - start) / _STEPS.value)
    return seconds


def show(name: str, seconds: list[float], what: str, count: int) -> None:
    """Prints the median and the range."""
    median = float(np.median(seconds))
    low, high = min(seconds) * 1e3, max(seconds) * 1e3
    print(
        f"{name}: {median * 1e3:.2f} ms a step ({low:.2f} to {high:.2f}), {count / median:,.0f} {what}/s",
        flush=True,
    )


if __name__ == "__main__":
    launch.run(main)
