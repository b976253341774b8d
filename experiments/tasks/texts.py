"""The base of tasks on text: tokenizers and packed batches of a corpus, cross-entropy of tokens.

A batch has ``SIDE_in``, ``SIDE_out`` or ``SIDE``, ``SIDE_segment_ids`` and
``SIDE_positions`` of each side that the task reads.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from crossattn import decode
from crossattn.data import evaluation
from crossattn.data.examples import collate
from crossattn.data.features import Links, Text
from crossattn.data.packing import Bucket, Layout, length_buckets
from crossattn.data.pipeline import eval_batches
from crossattn.train.evaluate import loss_scores
from crossattn.train.linear_loss import linear_cross_entropy
from crossattn.train.losses import cross_entropy
from crossattn.train.sharding import row_shares, rows_on
from crossattn.train.storage import Folder
from experiments.errors import SettingsError
from experiments.pretrained import Checkpoint
from experiments.tasks import base
from experiments.tasks.corpus import Corpus, PretrainedCorpus, UnreadCorpus
from experiments.tasks.ngrams import targets, trigrams

_SEGMENTS = ("source_segment_ids", "target_segment_ids")
_POSITIONS = ("source_positions", "target_positions")
# Schemes that see distances alone. Within a segment, places in the row give these too, and one bias for all
# rows takes their number times less memory than one for each.
_DISTANCES = ("relative", "alibi")


READERS = {
    "text": "one that reads text",
    "sound": "one that hears, a whisper",
    "pictures": "one that reads pictures, a vision-encoder-decoder",
}
"""Models of published checkpoints, by what they read."""


class TextTask(base.Task):
    """A task that learns tokens of a target, from a source or alone.

    Attributes:
      has_source: batches have a source.
      read: what the source is, a key of ``READERS``.
      corpus: its texts and tokenizers.
    """

    gives = ("vocab_size", "source_vocab_size", "max_length")
    metrics = ("loss", "nll", "perplexity", "accuracy")
    headline = ("nll", "min")
    has_source = True
    read = "text"

    def __init__(self, config: Any, assets: Folder | None = None):
        super().__init__(config, assets)
        self.corpus: Any = self._open()

    def _open(self) -> Corpus:
        return self._corpus(side=self.config.data.get("side", "both"))

    def _corpus(self, **options: Any) -> Corpus:
        """The corpus of the config, under the tokenizers of the checkpoint that it begins from, if any."""
        if self.checkpoint is not None:
            return PretrainedCorpus(self.config, self.checkpoint, **options)
        return Corpus(self.config, self.assets, **options)

    def check_pretrained(self, checkpoint: Checkpoint) -> None:
        """Beside what every task holds: it reads what the task has, and has positions for the lengths.

        Raises:
          SettingsError: its model is none that this task can train, or is too small.
        """
        super().check_pretrained(checkpoint)
        if _read_by(checkpoint.model.config) != self.read:
            raise SettingsError(
                f"{checkpoint.source} holds a {checkpoint.model.settings['model_type']}, which cannot be"
                f" trained as a {self.config.task}; expected {READERS[self.read]}."
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
        """Beside what every task holds: the loss cuts every length that batches come in.

        Raises:
          SettingsError: ``loss.chunks`` does not divide one.
        """
        super().check(config)
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
        """The greatest lengths of the sides that the task reads."""
        sides = ("source", "target") if cls.has_source else ("target",)
        return {side: config.data[f"{side}_len"] for side in sides}

    def refuse_unready(self) -> None:
        """Raises DataError where there is no validation split."""
        self.corpus.split("validation")

    def train_iterator(self, shard_index: int, shard_count: int):
        return self.corpus.train_iterator(shard_index, shard_count)

    def eval_batches(self, split: str, mesh: Any) -> Iterable[Mapping[str, np.ndarray]]:
        data = self.config.data
        batches = eval_batches(
            self.corpus.split(split),
            self.corpus.tokenizer,
            target_tokenizer=self.corpus.target_tokenizer if self.has_source else None,
            batch_size=rows_on(mesh, data.batch_size),
            source_len=data.get("source_len", data.target_len),
            target_len=data.target_len,
            side=data.get("side", "both"),
            batch_multiple=row_shares(mesh),
        )
        return (item.batch for item in batches)

    def save_assets(self, directory: Path) -> None:
        self.corpus.save(directory)

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        return loss_scores(sums)

    def baselines(self, split: str) -> dict[str, float]:
        """Nats a token of counted trigrams, which see what stands before it in the target and no more."""
        train, other = (
            list(targets(map(self._with_told, self.eval_batches(name, None)), "told"))
            for name in ("train", split)
        )
        return {"trigrams_nll": trigrams(train, other)}

    def _with_told(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {**batch, "told": batch["target_segment_ids"] * np.asarray(self.told(batch))}

    def cross_entropy(self, model: Any, hidden: Any, batch: Any) -> tuple[jax.Array, base.Sums]:
        """Label-smoothed cross-entropy of the targets, as ``config.loss`` says, and the count of tokens."""
        told, table = self.told(batch), None
        if self.checkpoint is not None:  # whose output layer may have a bias
            hidden, table = model.output_product(hidden)
        return token_loss(model, hidden, batch["target_out"], told, self.config.loss, table)

    def told(self, batch: Any) -> Any:
        """Tokens of ``target_out`` that the loss is of, Bool [B T]."""
        return batch["target_segment_ids"] > 0

    def read_source(self, model: Any, batch: Any, key: Any, return_weights: bool = False):
        """``hidden`` of an encoder-decoder: the last vectors, and the weights of cross-attention or None."""
        near = getattr(self.model_config, "positions", None) in _DISTANCES
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

    def without_data(self) -> "TextTask":
        if self.checkpoint is None:
            self.corpus = UnreadCorpus(self.config)
        return self

    def search(self, max_new_tokens: int, **options: Any) -> dict[str, Any]:
        """Arguments of ``decode.generate``: the options, and of a checkpoint what it asks for itself."""
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
        if self.config.loss.get("alignment") == "gold":
            features["links"] = Links(features["source"], target)
        nothing = dict.fromkeys(features, ())
        return base.shapes_of(collate(features, Layout.empty(rows, widths), nothing))

    def generation(self, rows: int) -> base.Generation:
        """Greedy generation of so many rows."""
        data, read = self.config.data, self._widths(self.config).get("source", 0)
        asked = self.config.get("evaluate", {}).get("decoding", {}).get("max_new_tokens")
        length = asked or (min(data.target_len, 2 * read + 16) if read else data.target_len)
        if not read:
            return base.Generation(
                lambda p: decode.generate(self.bind(p), batch=rows, max_new_tokens=length),
                (), length, 0,
            )  # fmt: skip
        shape = jax.ShapeDtypeStruct((rows, read), np.int32)

        def translate(params: Any, source: Any, segment_ids: Any) -> Any:
            return decode.generate(self.bind(params), source, segment_ids, max_new_tokens=length)

        return base.Generation(translate, (shape, shape), length, read)


def token_loss(
    model: Any, hidden: Any, labels: Any, told: Any, options: Any, table: Any = None
) -> tuple[jax.Array, base.Sums]:
    """Cross-entropy of the labels [B T] that are told, as ``config.loss`` says, and the count of tokens.

    Args:
      model: has ``output_table``, or ``logits`` alone, of which all are held at once.
      hidden, labels, told: vectors, tokens, and those that the loss is of.
      options: ``config.loss``.
      table: of the output layer; None is the model's.
    """
    smoothed = dict(label_smoothing=options.label_smoothing, z_loss=options.z_loss)
    if table is None and not hasattr(model, "output_table"):
        loss, sums = cross_entropy(model.logits(hidden), labels, told, **smoothed)
    else:
        table = model.output_table() if table is None else table
        loss, sums = linear_cross_entropy(
            hidden, table, labels, told, chunks=options.chunks, **smoothed
        )
    return loss, sums | {"tokens": sums["weight"]}


def _read_by(config: Any) -> str:
    """The kind of input that a model of this config reads."""
    if hasattr(config, "max_frames"):
        return "sound"
    return "pictures" if hasattr(getattr(config, "encoder", None), "image_size") else "text"
