"""The base of every task: a task has its features, loss and metrics, and the rest is here.

No launcher asks which task it has: differences between tasks are methods here.
A task on text begins from ``texts.TextTask``, which has tokenizers and batches too.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from crossattn import functional, models
from crossattn.data.examples import FeatureExamples
from crossattn.data.packing import Layout
from crossattn.data.pipeline import EvalBatches, feature_batches, feature_eval_batches
from crossattn.data.sources import open_source
from crossattn.train.config import TrainIterator
from crossattn.train.sharding import mesh_of, row_shares, rows_on, spread_batch
from crossattn.train.storage import Folder
from experiments.errors import SettingsError
from experiments.keys import NAME_OF_PRETRAINED
from experiments.pretrained import Checkpoint, open_checkpoint
from experiments.settings import model_config
from experiments.tasks.placement import config_mesh
from experiments.tasks.protocols import lacking

Sums = dict[str, jax.Array]


@dataclass(frozen=True)
class Generation:
    """Greedy generation, for a plan to compile.

    Attributes:
      function: of the parameters and of ``inputs``.
      inputs: shapes of what else it takes.
      length: the most tokens that are made.
      read: tokens of the source, whose keys and values are kept too.
    """

    function: Callable[..., Any]
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    length: int
    read: int


class Task:
    """The ``Task`` of the training loop, of the model that ``config.model.name`` names.

    Attributes:
      metrics: what ``evaluate`` gives, any of which may choose the best checkpoint.
      headline: the one by which models are compared, and whether "min" or "max" of it is best.
      sections: dataclasses of the config's sections that are the task's own: data, tokenizer, loss, evaluate.
      mode: how ``features`` become rows: pad, bucket or pack, see ``feature_batches``.
      gives: fields of the model's config that ``sizes`` may have, which are no keys of a config.
      asks: protocol that the model keeps, see ``protocols``; None asks nothing of it.
      takes_pretrained: whether ``config.model.name`` may be "pretrained".

    Args:
      config: the whole config, an ``ml_collections.ConfigDict`` that ``settings.check`` has passed.
      assets: folder of a run that has them already; None, or an empty one, makes them.
    """

    sections: Mapping[str, type] = {}
    mode = "pad"
    gives: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("loss",)
    headline: tuple[str, str] = ("loss", "min")
    asks: type | None = None
    takes_pretrained = False

    def __init__(self, config: Any, assets: Folder | None = None):
        self.config, self.assets = config, assets
        self._eval_sums = jax.jit(lambda params, batch: self.loss(params, batch, None)[1])

    # What a task says.

    def sizes(self) -> dict[str, Any]:
        """Fields of the model's config that come from the data, such as ``vocab_size``."""
        return {}

    def loss(self, params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, Sums]:
        """(loss summed over a batch, sums to report, "loss" and "weight" among them); no key, no dropout."""
        raise NotImplementedError

    @cached_property
    def features(self) -> Mapping[str, Any]:
        """Features of the values of an example, by their names, see ``crossattn.data.features``."""
        raise NotImplementedError

    def examples(self, split: str) -> Sequence[Any]:
        """The examples of a split."""
        data = self.config.data
        return open_source(
            data.name, split, data_dir=data.get("data_dir"), **data.get("options", {})
        )

    def train_iterator(self, shard_index: int, shard_count: int) -> TrainIterator:
        """One process's share of the rows of every batch, from the start of the data."""
        shard = shard_index, shard_count
        return self.train_batches(
            self.examples("train"), self.features, shard, mode=self.mode, truncation="cut"
        )

    def train_iterators(
        self, seeds: Sequence[int], shard_index: int, shard_count: int
    ) -> list[TrainIterator]:
        """``train_iterator`` as runs of these seeds have it."""
        found, before = [], self.config.seed
        for seed in seeds:
            self.config.seed = seed
            found.append(self.train_iterator(shard_index, shard_count))
        self.config.seed = before
        return found

    def train_batches(
        self, examples: Any, features: Mapping[str, Any], shard: tuple[int, int], **options: Any
    ) -> Any:
        """``feature_batches`` of a split as the config has them, for ``train_iterator``.

        Args:
          examples, features: see ``feature_batches``.
          shard: which process this is, of how many.
          options: ``mode``, ``truncation``, and others than the config's.
        """
        usual = dict(
            batch_size=self.config.data.batch_size,
            seed=self.config.seed,
            process_index=shard[0],
            process_count=shard[1],
            batch_multiple=row_shares(config_mesh(self.config)),
        )
        return feature_batches(examples, features, **usual | options)

    def eval_batches(self, split: str, mesh: Any) -> Iterable[Mapping[str, np.ndarray]]:
        """All batches of a split, once, the same in every process."""
        return (item.batch for item in self.numbered_batches(split, mesh))

    def numbered_batches(self, split: str, mesh: Any) -> EvalBatches:
        """The same with the numbers of the examples in their rows."""
        return feature_eval_batches(
            self.examples(split),
            self.features,
            batch_size=rows_on(mesh, self.config.data.batch_size),
            batch_multiple=row_shares(mesh),
        )

    # What a task may say otherwise.

    @classmethod
    def check(cls, config: Any) -> None:
        """Hold values of a config to one another.

        Raises:
          SettingsError: the model is none that this task can train.
        """
        asks = cls.asks_of(config)
        if config.model.name != NAME_OF_PRETRAINED:
            model = models.find(config.model.name)
            if asks is not None:
                refuse_unfit(
                    f"config.model.name is {model.name!r}", model.module, asks, config.task
                )
        elif not cls.takes_pretrained:
            raise SettingsError(
                f"config.model.name is {NAME_OF_PRETRAINED!r}, from which a {config.task} cannot begin; name"
                " an architecture, and what it takes from a checkpoint by init.take."
            )

    @classmethod
    def asks_of(cls, config: Any) -> type | None:
        """The protocol that the model of a config keeps."""
        return cls.asks

    def check_pretrained(self, checkpoint: Checkpoint) -> None:
        """Hold the checkpoint that a run begins from to this task.

        Raises:
          SettingsError: its model is none that this task can train.
        """
        if (asks := self.asks_of(self.config)) is not None:
            given = f"{checkpoint.source} holds a {checkpoint.model.settings['model_type']}"
            refuse_unfit(given, checkpoint.model.module, asks, self.config.task)

    def refuse_unready(self) -> None:
        """Raise what would only show after a folder was claimed, or after training: data, packages."""

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Metrics from the sums of a split."""
        weight, counts = sums["weight"] or 1.0, ("weight", "tokens")
        return {name: value / weight for name, value in sums.items() if name not in counts}

    def evaluate(self, params: Any, step: int) -> dict[str, float]:
        """Metrics of the validation split, while training."""
        return self.split_loss(params, "validation")

    def report(self, params: Any, split: str, **options: Any) -> dict[str, Any]:
        """All that is measured on a split, for ``experiments.evaluate``; its flags are the options.

        Raises:
          SettingsError: an option says nothing to this task.
        """
        if options:
            raise SettingsError(
                f"--{next(iter(options))} says nothing to a {self.config.task}; leave it out."
            )
        return self.split_loss(params, split)

    def baselines(self, split: str) -> dict[str, float]:
        """Metrics of a split without a model, as NAME_METRIC; {} where none is known."""
        return {}

    def samples(self, params: Any, split: str) -> Sequence[str]:
        """A few things that the model makes, for people to read."""
        return ()

    def save_assets(self, directory: Path) -> None:
        """Write what parameters need to be used, such as tokenizers."""

    def batch_rows(self, devices: int) -> list[int]:
        """Rows of the batches that training makes; devices and ``train.accumulate`` divide them."""
        return [self.config.data.batch_size]

    def without_data(self) -> "Task":
        """This task for a plan, which computes nothing and reads no data."""
        return self

    def batch_shapes(self, multiple: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a batch of training, the largest; a plan's rows are a multiple."""
        return shapes_of(feature_batch(self.features, self.config.data.batch_size))

    def generation(self, rows: int) -> Generation:
        """Greedy generation of so many rows.

        Raises:
          SettingsError: the task generates nothing.
        """
        raise SettingsError(f"a {self.config.task} generates nothing that could be planned.")

    # What all tasks have.

    @cached_property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint of a "pretrained" model; None of another."""
        if self.config.model.name != NAME_OF_PRETRAINED:
            return None
        checkpoint = open_checkpoint(self.config, self.assets)
        self.check_pretrained(checkpoint)
        return checkpoint

    @cached_property
    def model_config(self) -> Any:
        """The model's shape."""
        if self.checkpoint is not None:
            return self.checkpoint.model.config
        return model_config(self.config.model, **self.sizes())

    @cached_property
    def build(self) -> Any:
        """Makes the module: ``build(rngs)``."""
        if self.checkpoint is not None:
            return self.checkpoint.model
        module = models.find(self.config.model.name).module
        return lambda rngs: module(self.model_config, rngs=rngs)

    def bind(self, params: Any) -> Any:
        """The module holding ``params``."""
        return functional.bind(self.build, params)

    def init(self, key: jax.Array) -> Any:
        """Fresh parameters, a plain nested dict."""
        return functional.init(self.build, key)

    def logical_axes(self) -> Any:
        """Names of the axes of each parameter."""
        return functional.logical_axes(self.build)

    def split_loss(self, params: Any, split: str) -> dict[str, float]:
        """``scores`` of a split without dropout; every process has them, its devices compute their rows."""
        total: dict[str, float] = {}
        mesh = mesh_of(params)
        for batch in self.eval_batches(split, mesh):
            # One by one: programs that add up over several CPU devices deadlock when they overlap.
            sums = jax.device_get(self._eval_sums(params, spread_batch(batch, mesh)))
            for name, value in sums.items():
                total[name] = total.get(name, 0.0) + float(value)
        return self.scores(total)


def feature_batch(features: Mapping[str, Any], rows: int) -> dict[str, np.ndarray]:
    """A batch of rows that hold no example, of which a plan needs the shapes."""
    examples = FeatureExamples([{}], features, "cut")  # which is not read
    return dict(examples.fill(Layout.empty(rows, examples.widths)))


def shapes_of(batch: Mapping[str, np.ndarray]) -> dict[str, jax.ShapeDtypeStruct]:
    """Those of a batch."""
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}


def refuse_unfit(given: str, module: Any, asks: type, task: str) -> None:
    """Hold the class of a model to the protocol of a task.

    Raises:
      SettingsError: it lacks a method, or an argument of one.
    """
    if found := lacking(module, asks):
        raise SettingsError(
            f"{given} and cannot be trained as a {task}: {module.__name__} {found}."
        )
