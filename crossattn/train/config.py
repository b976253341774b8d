"""What a run is asked to do, and what the loop needs of a task: values and protocols only."""

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


@dataclass(frozen=True)
class CheckpointConfig:
    """When a run is saved, and what it goes on from.

    Attributes:
      every: steps between checkpoints.
      keep: how many of the newest stay.
      best_metric: metric of the evaluation whose best checkpoint stays too.
      best_mode: which value of that metric is best.
      resume: "auto" goes on from what is there, "must" refuses to start anew, "never" puts the old run aside
        first.
    """

    every: Count = 1000
    keep: Count = 2
    best_metric: str | None = None
    best_mode: Literal["max", "min"] = "max"
    resume: str = "auto"


@dataclass(frozen=True)
class TrainConfig:
    """How long a run is, and how its step is computed.

    Attributes:
      steps: optimiser steps in all; a run may be given more later.
      seed: of parameters, dropout and the order of the data.
      seeds: runs that are trained as one program, with the seeds from ``seed`` on.
      sweep: numbers of the optimiser that are trained as one program, "optim.learning_rate=1e-3,2e-3".
      accumulate: parts that a batch is computed in.
      ema_decay: of averaged parameters; None keeps none.
      prng: JAX's random implementation; None is its default.
      log_every: steps between lines of the log.
      eval_every: steps between evaluations, 0 for only at the end.
      compute_dtype: what parameters are cast to for a step; they stay float32.
      offload_optimizer: the optimiser's state lies in the hosts' memory between steps; of a mesh.
      profile_first, profile_steps: which steps, counted from 1, ``jax.profiler`` traces; None is none.
      xla_flags: that the step is compiled with, "NAME=VALUE,...", see ``xla``.
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
    """Endless batches whose position can be saved: a JSON-able value or bytes."""

    def __next__(self) -> Mapping[str, Any]: ...

    def get_state(self) -> Any:
        """Where it stands."""
        ...

    def set_state(self, state: Any) -> None:
        """Go on from there."""
        ...


@runtime_checkable
class Task(Protocol):
    """What is trained, on what, and how it is judged. Every process calls every method."""

    def init(self, key: jax.Array) -> Any:
        """Fresh parameters, a plain nested dict; called inside jit."""

    def logical_axes(self) -> Any:
        """A tuple of axis names for each parameter, in the same structure."""

    def loss(self, params: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, dict]:
        """(loss summed over a batch, sums to report, "weight" among them); called inside jit.

        "weight" is what the loss is divided by; "tokens", where there is one, is counted.
        """
        ...

    def train_iterator(self, shard_index: int, shard_count: int) -> TrainIterator:
        """This process's share of the rows of every batch, from the start of the data."""
        ...

    def evaluate(self, params: Any, step: int) -> dict[str, float]:
        """Metrics on held-out data, with the averaged parameters where there are any."""
        ...

    def save_assets(self, directory: Path) -> None:
        """Writes what the parameters need to be used (tokenizers, ...); the main process only."""


@runtime_checkable
class TaskOfMembers(Task, Protocol):
    """A task whose data can be iterated by several seeds, as ``train.seeds`` and ``train.sweep`` ask."""

    def train_iterators(
        self, seeds: Sequence[int], shard_index: int, shard_count: int
    ) -> Sequence[TrainIterator]:
        """``train_iterator`` of each seed."""
        ...
