"""The base of every task: a task has its features, loss and metrics, and the rest is here.

Differences between tasks are methods here, and no launcher asks for the name of its task. ``texts.TextTask``
is the base of tasks whose loss is a cross-entropy of tokens.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from crossattn import decode, functional, models
from crossattn.data.examples import FeatureExamples
from crossattn.data.packing import Layout
from crossattn.data.pipeline import EvalBatches, feature_eval_batches, train_batches
from crossattn.train.config import TrainIterator
from crossattn.train.sharding import everywhere, mesh_of, row_shares, rows_on, spread_batch
from crossattn.train.storage import Folder
from experiments.errors import SettingsError
from experiments.keys import NAME_OF_PRETRAINED
from experiments.pretrained import Checkpoint, open_checkpoint
from experiments.settings import config_mesh, model_config
from experiments.tasks import watching
from experiments.tasks.corpus import Corpus, PretrainedCorpus, UnreadCorpus
from experiments.tasks.protocols import lacking

Sums = dict[str, jax.Array]

CACHE_MIB = 128
"""MiB of prepared examples that training, and each evaluated split, keeps."""


class Task:
    """The ``Task`` of the training loop, with the model that ``config.model.name`` names.

    Attributes:
      metrics: names of the scores of ``evaluate``, any of which may choose the best checkpoint.
      headline: the metric that compares models, and whether "min" or "max" of it is best.
      sections: dataclasses of the config's sections that are the task's own: data, tokenizer, loss, evaluate.
      memory: values of a batch that the model reads by cross-attention; those of blind models are 0.
      mode, truncation: options of training batches, see ``pipeline``: pad, bucket or pack; cut or drop.
      gives: fields of the model's config that ``sizes`` may have, which are no keys of a config.
      asks: protocol that the model keeps, see ``protocols``; None is none.
      takes_pretrained: whether ``config.model.name`` may be "pretrained".
      tokenizes: whether the run has tokenizers.
      corpus: the data, with their tokenizers.

    Args:
      config: the whole config, an ``ml_collections.ConfigDict`` that ``settings.check`` has passed.
      assets: folder of a run with tokenizers; None, or an empty one, trains them.
    """

    sections: Mapping[str, type] = {}
    memory: tuple[str, ...] = ()
    mode, truncation = "pad", "cut"
    gives: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("loss",)
    headline: tuple[str, str] = ("loss", "min")
    asks: type | None = None
    takes_pretrained = False
    tokenizes = False

    def __init__(self, config: Any, assets: Folder | None = None):
        self.config, self.assets = config, assets
        self._evaluated: dict[Any, EvalBatches] = {}
        self._eval_sums = jax.jit(lambda params, batch: self.loss(params, batch, None)[1])
        options = self.corpus_options()
        self.corpus: Any = (
            Corpus(config, assets, **options)
            if self.checkpoint is None
            else PretrainedCorpus(config, self.checkpoint, **options)
        )

    # Methods that each task defines.

    def corpus_options(self) -> dict[str, Any]:
        """Returns the options of ``Corpus``."""
        return {}

    def sizes(self) -> dict[str, Any]:
        """Returns fields of the model's config that the data determine, such as ``vocab_size``."""
        return {}

    def loss(self, params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, Sums]:
        """Returns the loss summed over a batch, and sums to report, "loss" and "weight" among them.

        Without a key there is no dropout.
        """
        raise NotImplementedError

    @cached_property
    def features(self) -> Mapping[str, Any]:
        """The features of an example's values by their names, see ``crossattn.data.features``."""
        raise NotImplementedError

    def examples(self, split: str, count: int | None = None) -> Sequence[Any]:
        """Returns the examples of a split, or the first ``count``."""
        examples = self.corpus.split(split)
        if count is None or count >= len(examples):
            return examples
        return [examples[index] for index in range(count)]

    def train_iterator(self, shard_index: int, shard_count: int) -> TrainIterator:
        """Returns one process's share of the rows of every batch, from the start of the data."""
        return self.train_batches(self._kept, (shard_index, shard_count))

    def trained(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Returns the examples that are trained on, and their features."""
        return self.examples("train"), self.features

    @cached_property
    def _kept(self) -> FeatureExamples:
        """The examples that are trained on, prepared once for the iterators of all seeds."""
        return self.prepared(*self.trained())

    def prepared(self, examples: Any, features: Mapping[str, Any]) -> FeatureExamples:
        """Returns examples to train on, with a cache."""
        return FeatureExamples(examples, features, self.truncation, CACHE_MIB)

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

    def train_batches(self, examples: FeatureExamples, shard: tuple[int, int]) -> Any:
        """Returns batches of examples, with the batch size, seed and mesh of the config.

        Args:
          examples: see ``prepared``.
          shard: index and number of the processes.
        """
        shares = row_shares(config_mesh(self.config))
        return train_batches(
            examples, mode=self.mode, batch_multiple=shares, **self.batching(*shard)
        )

    def batching(self, shard_index: int, shard_count: int) -> dict[str, Any]:
        """Returns arguments of every training iterator: batch size, seed and share of the process."""
        return dict(
            batch_size=self.config.data.batch_size,
            seed=self.config.seed,
            process_index=shard_index,
            process_count=shard_count,
        )

    def eval_batches(self, split: str, mesh: Any) -> Iterable[Mapping[str, np.ndarray]]:
        """Yields all batches of a split once, the same in every process."""
        return (item.batch for item in self.numbered_batches(split, mesh))

    def numbered_batches(self, split: str, mesh: Any) -> EvalBatches:
        """Returns the same batches, with the indices of the examples in their rows; made once for a mesh."""
        if (split, mesh) not in self._evaluated:
            given = self.evaluated(split)
            self._evaluated[split, mesh] = self.batches_of(*given, mesh, cache_mib=CACHE_MIB)
        return self._evaluated[split, mesh]

    def batches_of(
        self, examples: Any, features: Mapping[str, Any], mesh: Any, **options: int
    ) -> EvalBatches:
        """Returns ``feature_eval_batches`` with the batch size of the config, for the devices of a mesh."""
        shape = dict(
            batch_size=rows_on(mesh, self.config.data.batch_size), batch_multiple=row_shares(mesh)
        )
        return feature_eval_batches(examples, features, **shape, **options)

    def evaluated(self, split: str) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Returns the examples of a split, as they are evaluated, and their features."""
        return self.examples(split), self.features

    def attention(self, params: Any, step: int, folder: Folder | None) -> dict[str, float]:
        """Computes what heads do in a validation batch, see ``watching``, and draws it into the folder."""
        found = watching.of_heads(self, params)
        watching.draw(found, step, folder)
        return {
            f"attention/{site}/{name}": float(x.mean())
            for site, numbers in found.items()
            for name, x in numbers.items()
        }

    # Methods that a task may override.

    @classmethod
    def check(cls, config: Any) -> None:
        """Raises SettingsError where values of a config exclude each other, or the model does not fit."""
        if config.model.name != NAME_OF_PRETRAINED:
            model = models.find(config.model.name)
            given = f"config.model.name is {model.name!r}"
            _refuse_unfit(given, model.module, cls.asks_of(config), config.task)
        elif not cls.takes_pretrained:
            raise SettingsError(
                f"config.model.name is {NAME_OF_PRETRAINED!r}, from which a {config.task} cannot begin; name"
                " an architecture, and what it takes from a checkpoint by init.take."
            )

    @classmethod
    def asks_of(cls, config: Any) -> tuple[type, ...]:
        """Returns the protocols that the model of a config keeps."""
        return () if cls.asks is None else (cls.asks,)

    def check_pretrained(self, checkpoint: Checkpoint) -> None:
        """Raises SettingsError where this task cannot train the model of a checkpoint."""
        given = f"{checkpoint.source} holds a {checkpoint.model.settings['model_type']}"
        asks = self.asks_of(self.config)
        _refuse_unfit(given, checkpoint.model.module, asks, self.config.task)

    def refuse_unready(self) -> None:
        """Raises errors of data and packages before the run claims its folder."""

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Returns metrics from the sums of a split."""
        weight, counts = sums["weight"] or 1.0, ("weight", "tokens")
        return {name: value / weight for name, value in sums.items() if name not in counts}

    def evaluate(self, params: Any, step: int) -> dict[str, float]:
        """Returns metrics of the validation split, during training."""
        return self.split_loss(params, "validation")

    def report(self, params: Any, split: str, **options: Any) -> dict[str, Any]:
        """Returns all results of a split; raises SettingsError for a flag that the task does not take."""
        if options:
            raise SettingsError(
                f"--{next(iter(options))} says nothing to a {self.config.task}; leave it out."
            )
        examples = self.outcomes(params, split)
        return self.split_loss(params, split) | ({"examples": examples} if examples else {})

    def outcomes(self, params: Any, split: str) -> dict[str, list[Any]]:
        """Returns metrics of each example of a split, for ``experiments.compare``; {} is none.

        "weight" are the units of each example, "group" those that are drawn together; every other list is a
        metric times the weight.
        """
        return {}

    def of_examples(self, values: Callable, params: Any, split: str) -> np.ndarray:
        """Returns numbers [k examples] of a split; ``values(params, batch)`` are k arrays [rows]."""
        mesh = mesh_of(params)
        call = jax.jit(values, out_shardings=everywhere(mesh))  # which each process can read
        found: Any = None
        for item in self.numbered_batches(split, mesh):
            rows = item.indices >= 0
            own = np.stack(jax.device_get(call(params, spread_batch(item.batch, mesh))))
            if found is None:
                found = np.zeros((len(own), len(self.examples(split))))
            found[:, item.indices[rows]] = own[:, rows]
        return found

    def baselines(self, split: str) -> dict[str, float]:
        """Returns scores of baselines on a split, as NAME_METRIC; {} is none."""
        return {}

    def headline_baselines(self, split: str) -> dict[str, float]:
        """Returns those of ``baselines`` whose metric is that of ``headline``, and maybe others."""
        return self.baselines(split)

    def samples(self, params: Any, split: str) -> Sequence[str]:
        """Returns a few outputs of the model, for people to read."""
        return ()

    def save_assets(self, directory: Path) -> None:
        """Writes the tokenizers."""
        if self.tokenizes:
            self.corpus.save(directory)

    def batch_rows(self, devices: int) -> list[int]:
        """Returns the rows of training batches, which devices and ``train.accumulate`` divide."""
        return [self.config.data.batch_size]

    def without_data(self) -> "Task":
        """Returns this task for a plan, which reads no data."""
        if self.tokenizes and self.checkpoint is None:
            self.corpus = UnreadCorpus(self.config)
        return self

    def batch_shapes(self, multiple: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of the largest training batch, whose rows are a multiple."""
        return shapes_of(feature_batch(self.features, self.config.data.batch_size))

    def generation(self, rows: int) -> Any:
        """Returns a ``texts.Generation`` of so many rows; raises SettingsError where there is none."""
        raise SettingsError(f"a {self.config.task} generates nothing that could be planned.")

    # Methods of all tasks.

    @cached_property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint of a "pretrained" model; None for another model."""
        if self.config.model.name != NAME_OF_PRETRAINED:
            return None
        checkpoint = open_checkpoint(self.config, self.assets)
        self.check_pretrained(checkpoint)
        return checkpoint

    @cached_property
    def model_config(self) -> Any:
        """The config of the model."""
        if self.checkpoint is not None:
            return self.checkpoint.model.config
        return model_config(self.config.model, **self.sizes())

    @cached_property
    def build(self) -> Any:
        """The function that makes the module, ``build(rngs)``."""
        if self.checkpoint is not None:
            return self.checkpoint.model
        module = models.find(self.config.model.name).module
        return lambda rngs: module(self.model_config, rngs=rngs)

    def bind(self, params: Any) -> Any:
        """Returns the module with ``params``."""
        return functional.bind(self.build, params)

    def init(self, key: jax.Array) -> Any:
        """Returns fresh parameters, a plain nested dict."""
        return functional.init(self.build, key)

    def logical_axes(self) -> Any:
        """Returns the names of the axes of each parameter."""
        return functional.logical_axes(self.build)

    def split_loss(
        self, params: Any, split: str, change: Callable[[Any], Any] | None = None
    ) -> dict[str, float]:
        """Returns ``scores`` of a split without dropout, the same in every process.

        Args:
          params: of the model.
          split: train, validation or test.
          change: of each batch, such as ``shuffled``.
        """
        total: dict[str, float] = {}
        mesh = mesh_of(params)
        for batch in self.eval_batches(split, mesh):
            batch = batch if change is None else change(batch)
            # One by one: programs that add up over several CPU devices deadlock when they overlap.
            sums = jax.device_get(self._eval_sums(params, spread_batch(batch, mesh)))
            for name, value in sums.items():
                total[name] = total.get(name, 0.0) + float(value)
        return self.scores(total)

    def seen(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns what the model reads of a batch: if it is blind, memories of 0, of the same lengths."""
        if not self.config.data.get("blind", False):
            return batch
        return {**batch, **{name: batch[name] * 0 for name in self.memory if name in batch}}

    def shuffled(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a batch in which each example has the memory of another, with its length.

        The other is half of the batch away: neighbours are of one length, and may be captions of one picture.
        """
        rows = np.flatnonzero(self.present(batch))
        order = np.arange(len(self.present(batch)))
        order[rows] = np.roll(rows, len(rows) // 2)
        ends = ("", "_segment_ids", "_positions")
        names = [name + end for name in self.memory for end in ends if name + end in batch]
        return {**batch, **{name: np.asarray(batch[name])[order] for name in names}}

    def present(self, batch: Mapping[str, Any]) -> np.ndarray:
        """Returns which rows [B] of a batch have an example."""
        if "valid" in batch:
            return np.asarray(batch["valid"] > 0)
        segments = next(x for name, x in batch.items() if name.endswith("_segment_ids"))
        return np.asarray(np.any(segments, axis=-1))

    def generator(self, params: Any, **search: Any) -> Callable[..., np.ndarray]:
        """Returns a function from arguments of ``decode.generate`` to the best tokens of each row [B T].

        Args:
          params: of the model; on a mesh, every process gets all rows.
          search: arguments of ``decode.generate`` that are the same in each call.
        """
        call = jax.jit(
            lambda params, source, given: decode.generate(
                self.bind(params), *source, **given, **search
            ).tokens[:, 0],
            out_shardings=everywhere(mesh_of(params)),
        )
        return lambda *source, **given: np.asarray(call(params, source, given))


def feature_batch(features: Mapping[str, Any], rows: int) -> dict[str, np.ndarray]:
    """Returns a batch of empty rows, of which a plan needs the shapes."""
    examples = FeatureExamples([{}], features, "cut")  # which is not read
    return dict(examples.fill(Layout.empty(rows, examples.widths)))


def shapes_of(batch: Mapping[str, np.ndarray]) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a batch."""
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}


def _refuse_unfit(given: str, module: Any, asks: Sequence[type], task: str) -> None:
    if found := lacking(module, *asks):
        raise SettingsError(
            f"{given} and cannot be trained as a {task}: {module.__name__} {found}."
        )
