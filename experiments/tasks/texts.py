"""The base of tasks on text: packed batches of a corpus, and the cross-entropy of their tokens.

A batch has ``SIDE_in``, ``SIDE_out`` or ``SIDE``, ``SIDE_segment_ids`` and ``SIDE_positions`` of each side
that the task reads.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossattn import decode, models
from crossattn.data import evaluation
from crossattn.data.features import Links, Text
from crossattn.data.packing import Bucket, length_buckets
from crossattn.data.pipeline import eval_batches, train_batches
from crossattn.train.evaluate import loss_scores
from crossattn.train.linear_loss import linear_cross_entropy
from crossattn.train.losses import cross_entropy, token_losses, weighted_sums
from crossattn.train.sharding import row_shares, rows_on
from experiments.errors import SettingsError
from experiments.keys import NAME_OF_PRETRAINED
from experiments.pretrained import Checkpoint
from experiments.settings import config_mesh, section_of
from experiments.tasks import base, readers
from experiments.tasks.alignment_loss import WITH_LINKS

_SEGMENTS = ("source_segment_ids", "target_segment_ids")
_POSITIONS = ("source_positions", "target_positions")
# Schemes of distances alone: places in the row give these too, and all rows share one bias, which takes less
# memory than one for each row.
_DISTANCES = ("relative", "alibi")
# Models of published checkpoints, by their input.
_READERS = {
    "text": "one that reads text",
    "sound": "one that hears, a whisper",
    "pictures": "one that reads pictures, a vision-encoder-decoder",
}


@dataclass(frozen=True)
class Generation:
    """Greedy generation, for a plan to compile.

    Attributes:
      function: takes the parameters and ``inputs``.
      inputs: shapes of the other arguments.
      length: the most tokens that it generates.
    """

    function: Callable[..., Any]
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    length: int


class TextTask(base.Task):
    """A task that learns tokens of a target, from a source or alone.

    Attributes:
      has_source: batches have a source.
      read: the kind of the source: text, sound or pictures.
      scored: metrics of written texts, which ``evaluate.examples`` asks for.
    """

    gives = ("vocab_size", "source_vocab_size", "max_length")
    metrics = ("loss", "nll", "perplexity", "accuracy")
    headline = ("nll", "min")
    tokenizes = True
    has_source = True
    read = "text"
    scored: tuple[str, ...] = ()

    def corpus_options(self) -> dict[str, Any]:
        return dict(side=self.config.data.get("side", "both"))

    def sizes(self) -> dict[str, Any]:
        return dict(
            vocab_size=self.corpus.tokenizer.vocab_size, max_length=self.config.data.target_len
        )

    def check_pretrained(self, checkpoint: Checkpoint) -> None:
        """Raises SettingsError also where the model has another kind of input, or too few positions."""
        super().check_pretrained(checkpoint)
        if _read_by(checkpoint.model.config) != self.read:
            raise SettingsError(
                f"{checkpoint.source} holds a {checkpoint.model.settings['model_type']}, which cannot be"
                f" trained as a {self.config.task}; expected {_READERS[self.read]}."
            )
        for side, longest in zip(("source", "target"), checkpoint.longest(), strict=True):
            length = self.config.data.get(f"{side}_len", 0)
            if longest is not None and length > longest:
                raise SettingsError(
                    f"config.data.{side}_len is {length}; the model in {checkpoint.source} has positions for"
                    f" {longest} tokens."
                )

    @classmethod
    def check(cls, config: Any) -> None:
        """Raises SettingsError also for ``loss.chunks`` and a best metric that do not fit."""
        super().check(config)
        metric = section_of(config, "checkpoint").get("best_metric")
        if metric in cls.scored and not config.evaluate.examples:
            raise SettingsError(
                f"config.checkpoint.best_metric is {metric!r}, which evaluate.examples of 1 or more measures;"
                " take 'loss', with best_mode 'min'."
            )
        _refuse_smoothed(config)
        chunks, lengths = config.loss.chunks, cls._target_lengths(config)
        if any(length % chunks for length in lengths):
            raise SettingsError(
                f"config.loss.chunks is {chunks}; expected a divisor of every length that data.target_len "
                f"makes in training and evaluation: {', '.join(map(str, lengths))}."
            )

    @classmethod
    def _target_lengths(cls, config: Any) -> list[int]:
        buckets = cls._buckets(config, fractions=evaluation.FRACTIONS)
        if config.data.get("mode") == "bucket":
            buckets = [*buckets, *cls._buckets(config)]
        return sorted({config.data.target_len, *(bucket.widths["target"] for bucket in buckets)})

    @classmethod
    def _buckets(cls, config: Any, **options: Any) -> list[Bucket]:
        return length_buckets(config.data.batch_size, cls._widths(config), **options)

    @classmethod
    def _widths(cls, config: Any) -> dict[str, int]:
        sides = ("source", "target") if cls.has_source else ("target",)
        return {side: config.data[f"{side}_len"] for side in sides}

    def refuse_unready(self) -> None:
        """Raises DataError where there is no validation split."""
        self.corpus.split("validation")

    def train_iterator(self, shard_index: int, shard_count: int) -> Any:
        return train_batches(
            self.corpus.train_pairs(),
            mode=self.config.data.mode,
            batch_multiple=row_shares(config_mesh(self.config)),
            **self.batching(shard_index, shard_count),
        )

    def numbered_batches(self, split: str, mesh: Any) -> evaluation.EvalBatches:
        data = self.config.data
        return eval_batches(
            self.corpus.split(split),
            self.corpus.tokenizer,
            target_tokenizer=self.corpus.target_tokenizer if self.has_source else None,
            batch_size=rows_on(mesh, data.batch_size),
            source_len=data.get("source_len", data.target_len),
            target_len=data.target_len,
            side=data.get("side", "both"),
            batch_multiple=row_shares(mesh),
        )

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        scores = loss_scores(sums)
        if "bits_per_token" in self.metrics:
            scores["bits_per_token"] = scores["nll"] / math.log(2)
        return scores

    def baselines(self, split: str) -> dict[str, float]:
        """Returns the nats per token of trigrams, and of trigrams beside a simple reader of the source."""
        source_of = self.source_of_text if self.has_source else None
        segments = lambda x: x["target_segment_ids"]  # noqa: E731
        return readers.scores(self, split, segments, self.told, source_of)

    def source_of_text(self, batch: Any, row: int, number: int) -> np.ndarray:
        """Returns what a baseline reads of the source of a row's text of that number: its tokens."""
        return batch["source"][row][batch["source_segment_ids"][row] == number]

    def loss(self, params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, base.Sums]:
        """Returns the summed loss of the tokens that count, given the source, and its sums."""
        model = self.bind(params)
        hidden, _ = self.read_source(model, batch, key)
        return self.cross_entropy(model, hidden, batch)

    def cross_entropy(self, model: Any, hidden: Any, batch: Any) -> tuple[jax.Array, base.Sums]:
        """Returns the ``token_loss`` of the targets, and its sums."""
        told, table = self.told(batch), None
        if self.checkpoint is not None:  # its output layer may have a bias
            hidden, table = model.output_product(hidden)
        return token_loss(model, hidden, self.labels(batch), told, self.config.loss, table)

    def losses_of_texts(self, losses: Callable, params: Any, split: str) -> dict[str, list[Any]]:
        """Returns ``outcomes`` of texts, one in each row; ``losses(params, batch)`` are ``sums_of_rows``."""
        examples = self.examples(split)
        weight, nll = self.of_examples(losses, params, split).tolist()
        every = ((i, examples[i]) for i in range(len(examples)))
        groups = [str(each.get("family", each.get("group", i))) for i, each in every]
        return {"group": groups, "weight": weight, "nll": nll}

    def labels(self, batch: Any) -> Any:
        """Returns the tokens [B T] that the model is to say at each place."""
        return batch["target_out"]

    def told(self, batch: Any) -> Any:
        """Returns the mask [B T] of the ``labels`` that the loss counts."""
        return batch["target_segment_ids"] > 0

    def read_source(self, model: Any, batch: Any, key: Any, return_weights: bool = False):
        """Returns the last vectors of an encoder-decoder, and the weights of cross-attention or None."""
        near = getattr(self.model_config, "positions", None) in _DISTANCES
        batch = self.seen(batch)
        return model.hidden(
            batch["source"],
            batch["target_in"],
            **{name: batch[name] for name in (_SEGMENTS if near else _SEGMENTS + _POSITIONS)},
            key=key,
            return_weights=return_weights,
        )

    def batch_rows(self, devices: int) -> list[int]:
        if self.config.data.get("mode") != "bucket":
            return [self.config.data.batch_size]
        return [bucket.rows for bucket in self._buckets(self.config, multiple=devices)]

    def search(self, max_new_tokens: int, **options: Any) -> dict[str, Any]:
        """Returns arguments of ``decode.generate``: the options, and those that a checkpoint asks for."""
        if self.checkpoint is None:
            return dict(max_new_tokens=max_new_tokens, **options)
        names = ("num_beams", "length_penalty")
        changes = {name: options.pop(name) for name in names if name in options}
        own = self.checkpoint.search(max_new_tokens, **changes)
        processors = (*own.pop("processors", ()), *options.pop("processors", ()))
        return own | options | {"processors": processors}

    def batch_shapes(self, multiple: int) -> dict[str, jax.ShapeDtypeStruct]:
        widths, rows = self._widths(self.config), self.config.data.batch_size
        if self.config.data.get("mode") == "bucket":
            rows = self._buckets(self.config, multiple=multiple)[-1].rows
        target: Any = Text(self.corpus.tokenizer, widths["target"], predicted=True)
        features = {"target": target}
        if self.has_source:
            features["source"] = Text(self.corpus.tokenizer, widths["source"])
        if self.config.loss.get("alignment") in WITH_LINKS:
            features["links"] = Links(features["source"], target)
        return base.shapes_of(base.feature_batch(features, rows))

    def generation(self, rows: int) -> Generation:
        held = self.checkpoint
        module = (models.find(self.config.model.name) if held is None else held.model).module
        if not hasattr(module, "prefill"):
            return super().generation(rows)
        data, read = self.config.data, self._widths(self.config).get("source", 0)
        asked = self.config.get("evaluate", {}).get("decoding", {}).get("max_new_tokens")
        length = asked or (min(data.target_len, 2 * read + 16) if read else data.target_len)
        shape = jax.ShapeDtypeStruct((rows, read), np.int32)

        def generate(params: Any, *source: Any) -> Any:
            batch = None if source else rows
            return decode.generate(self.bind(params), *source, batch=batch, max_new_tokens=length)

        return Generation(generate, (shape, shape) if read else (), length)


def token_loss(
    model: Any, hidden: Any, labels: Any, told: Any, options: Any, table: Any = None
) -> tuple[jax.Array, base.Sums]:
    """Returns the label-smoothed cross-entropy of tokens, and sums to report.

    Args:
      model: has ``losses``, of a mixture; or ``output_table``; or ``logits`` alone, and then all logits are
        in memory at once.
      hidden, labels, told: vectors [B T D], tokens [B T], and their weights, or the mask of those that count.
      options: ``config.loss``.
      table: the output layer; None is the model's.
    """
    smoothed = dict(label_smoothing=options.label_smoothing, z_loss=options.z_loss)
    if hasattr(model, "losses"):
        nll, correct = model.losses(hidden, labels, chunks=options.chunks)
        sums = weighted_sums((nll, nll, correct), told.astype(np.float32))
        loss, sums = sums["loss"], jax.lax.stop_gradient(sums)
    elif table is None and not hasattr(model, "output_table"):
        loss, sums = cross_entropy(model.logits(hidden), labels, told, **smoothed)
    else:
        table = model.output_table() if table is None else table
        loss, sums = linear_cross_entropy(
            hidden, table, labels, told, chunks=options.chunks, **smoothed
        )
    return loss, sums | {"tokens": sums["weight"]}


def sums_of_rows(
    logits: Callable, hidden: Any, labels: Any, told: Any, chunks: int = 1
) -> tuple[jax.Array, jax.Array]:
    """Returns the numbers of the tokens that count [B] and their summed losses [B], without smoothing.

    Args:
      logits: of vectors [B T D], of which a part in ``chunks`` is in memory at a time.
      hidden, labels, told: vectors [B T D], tokens [B T], and the mask [B T] of those that count.
    """
    count = min(chunks, labels.shape[-1])
    parts = (jnp.array_split(x, count, axis=1) for x in (hidden, labels))
    nll = [token_losses(logits(x), y, 0.0, 0.0)[0][1] for x, y in zip(*parts, strict=True)]
    return told.sum(-1), (jnp.concatenate(nll, -1) * told).sum(-1)


def _refuse_smoothed(config: Any) -> None:
    """Refuses terms of the loss that a model with a loss of its own does not have."""
    name = config.model.name
    if name == NAME_OF_PRETRAINED or not hasattr(models.find(name).module, "losses"):
        return
    for key in ("label_smoothing", "z_loss"):
        if config.loss.get(key):
            raise SettingsError(
                f"config.loss.{key} is {config.loss[key]:g}; a {name!r} mixes two distributions, whose loss"
                " is -log p alone: expected 0."
            )


def _read_by(config: Any) -> str:
    if hasattr(config, "max_frames"):
        return "sound"
    return "pictures" if hasattr(getattr(config, "encoder", None), "image_size") else "text"
