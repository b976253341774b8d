"""Settings of a run, and the protocols of its task and data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import jax

from crossattn.train import xla
from crossattn.train.members import Member, members_of
from crossattn.train.optim import OptimConfig
from crossattn.train.sharding import MeshConfig
from crossattn.types import Count, Rate

LEAST = ("loss", "nll", "wer", "aer", "mel", "mse", "bits_per_byte", "bits_per_token")
"""Ends of the names of metrics of which less is better."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Settings of checkpoints and of resuming.

    Attributes:
      every: steps between checkpoints.
      keep: number of the newest that stay.
      best_metric: metric of the evaluation whose best checkpoint stays too.
      best_mode: which value of that metric is best.
      resume: "auto" resumes from the newest checkpoint if there is one, "must" refuses to start anew, "never"
        first moves the old run aside.

    Raises:
      ValueError: the best loss would be the greatest.
    """

    every: Count = 1000
    keep: Count = 2
    best_metric: str | None = None
    best_mode: Literal["max", "min"] = "max"
    resume: str = "auto"

    def __post_init__(self):
        if self.best_mode == "max" and (self.best_metric or "").endswith(LEAST):
            raise ValueError(
                f"best_metric is {self.best_metric!r} and best_mode 'max'; expected 'min', as less is better."
            )


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a run.

    Attributes:
      steps: optimiser steps in all; a later start may raise it.
      seed: seed of parameters, dropout and the order of the data.
      seeds: runs that are trained as one program, with the seeds from ``seed`` on.
      sweep: numbers of the optimiser that are trained as one program, "optim.learning_rate=1e-3,2e-3".
      accumulate: microbatches of a batch.
      ema_decay: decay of the averaged parameters; None is no average.
      prng: JAX's random implementation; None is its default.
      log_every: steps between lines of the log.
      eval_every: steps between evaluations, 0 for only at the end.
      compute_dtype: dtype that a step casts the float32 parameters to.
      offload_optimizer: keeps the optimiser's state in host memory between steps; needs a mesh.
      profile_first, profile_steps: the first step, counted from 1, and the number of steps that
        ``jax.profiler`` traces; None is none.
      attention_stats: logs and draws at evaluations what each head does, see ``WatchedTask``.
      xla_flags: flags to compile the step with, "NAME=VALUE,...", see ``xla``.
    """

    steps: Count
    optim: OptimConfig = field(default_factory=OptimConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    seed: Annotated[int, "[0, 4294967295]"] = 0
    seeds: Count = 1
    sweep: str | None = None
    accumulate: Count = 1
    ema_decay: Rate | None = None
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    prng: Literal["threefry2x32", "rbg", "unsafe_rbg"] | None = None
    offload_optimizer: bool = False
    xla_flags: str | None = None
    profile_first: Count | None = None
    profile_steps: Count = 5
    log_every: Count = 100
    eval_every: Annotated[int, "[0, inf)"] = 0
    attention_stats: bool = False

    def __post_init__(self):
        if self.steps < 1 or self.log_every < 1 or self.checkpoint.every < 1:
            raise ValueError(
                f"steps ({self.steps}), log_every ({self.log_every}) and checkpoint.every"
                f" ({self.checkpoint.every}) must be 1 or more"
            )
        if self.checkpoint.resume not in ("auto", "must", "never"):
            raise ValueError(f"resume is {self.checkpoint.resume!r}; use auto, must or never")
        xla.flags(self.xla_flags)
        for member in self.members:  # what is wrong with a sweep shows now
            replace(self.optim, **member.optim)

    @property
    def members(self) -> tuple[Member, ...]:
        """The runs that are trained as one program; none where there is one run."""
        return members_of(self.seed, self.seeds, self.sweep)


@runtime_checkable
class TrainIterator(Protocol):
    """Endless batches with a position that can be saved: a JSON-able value or bytes."""

    def __next__(self) -> Mapping[str, Any]: ...

    def get_state(self) -> Any:
        """Returns the position."""
        ...

    def set_state(self, state: Any) -> None:
        """Continues from a position."""
        ...


@runtime_checkable
class Task(Protocol):
    """Parameters, loss, data and metrics of a run. Every process calls every method."""

    def init(self, key: jax.Array) -> Any:
        """Returns fresh parameters, a plain nested dict; called inside jit."""

    def logical_axes(self) -> Any:
        """Returns a tuple of axis names for each parameter, in the same structure."""

    def loss(self, params: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, dict]:
        """Returns (loss summed over a batch, sums to report); called inside jit.

        The loop divides the loss by the sum "weight", and counts the optional sum "tokens".
        """
        ...

    def train_iterator(self, shard_index: int, shard_count: int) -> TrainIterator:
        """Returns this process's share of the rows of every batch, from the start of the data."""
        ...

    def evaluate(self, params: Any, step: int) -> dict[str, float]:
        """Computes metrics on held-out data; the loop passes averaged parameters if there are any."""
        ...

    def save_assets(self, directory: Path) -> None:
        """Writes tokenizers and other files that inference needs; the main process only."""


@runtime_checkable
class WatchedTask(Task, Protocol):
    """A task whose attention can be watched, as ``train.attention_stats`` asks."""

    def attention(self, params: Any, step: int, folder: Any) -> dict[str, float]:
        """Computes metrics of attention on held-out data, and draws them into the folder if there is one."""
        ...


@runtime_checkable
class TaskOfMembers(Task, Protocol):
    """A task whose data can be iterated by several seeds, as ``train.seeds`` and ``train.sweep`` ask."""

    def train_iterators(
        self, seeds: Sequence[int], shard_index: int, shard_count: int
    ) -> Sequence[TrainIterator]:
        """Returns ``train_iterator`` of each seed."""
        ...
