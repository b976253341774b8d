"""Denoising: an encoder-decoder that fills in the spans taken out of a text, or continues a prefix.

Source: Raffel et al. 2020, "Exploring the limits of transfer learning with a unified text-to-text
transformer".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np

from crossattn.data.corruption import Objective, PrefixLM, SpanCorruption
from crossattn.data.denoising import denoising_eval_batches, make_denoising_iterator
from crossattn.data.evaluation import EvalBatch
from crossattn.train.sharding import mesh_of, rows_on, spread_batch
from crossattn.types import Count
from experiments.keys import NAME_OF_PRETRAINED
from experiments.settings import build
from experiments.tasks import protocols, sections
from experiments.tasks.texts import TextTask

_MULTIPLE = 128  # divides the vocabulary, for accelerators and meshes


@dataclass(frozen=True, kw_only=True)
class DenoisingData(sections.TextData):
    """Texts, and how they are corrupted.

    Attributes:
      side: which side is learnt.
      source_len: the most tokens of a source, its end included.
      objective: fill in spans that were taken out, or continue a prefix.
      density: share of the tokens that is taken out.
      span: mean tokens of a span.
      sentinels: tokens beyond the tokenizer's that mark spans.
    """

    side: Literal["source", "target"]
    source_len: sections.Length
    objective: Literal["span_corruption", "prefix_lm"]
    density: sections.Share
    span: Annotated[float, "[1, inf)"]
    sentinels: Count


class DenoisingTask(TextTask):
    """An encoder-decoder, and texts; ``crossattn.data.corruption`` makes source and target of each."""

    sections = {
        "data": DenoisingData,
        "tokenizer": sections.Tokenizer,
        "loss": sections.CrossEntropy,
        "evaluate": sections.PlannedEvaluation,
    }
    metrics = (*TextTask.metrics, "bits_per_token")
    asks = protocols.TranslationModel
    memory = ("source",)

    @classmethod
    def check(cls, config: Any) -> None:
        if config.model.name != NAME_OF_PRETRAINED:  # which the task refuses
            objective(config.data, config.tokenizer.vocab_size)
        super().check(config)

    @classmethod
    def _target_lengths(cls, config: Any) -> list[int]:
        return [config.data.target_len]

    def corpus_options(self) -> dict[str, Any]:
        return dict(side=self.config.data.side, whole=True)

    @cached_property
    def objective(self) -> Objective:
        """The objective, whose sentinels follow the tokenizer's tokens."""
        return objective(self.config.data, self.corpus.tokenizer.vocab_size)

    def sizes(self) -> dict[str, Any]:
        data = self.config.data
        return dict(
            vocab_size=vocabulary(self.corpus.tokenizer.vocab_size, data.sentinels),
            max_length=max(data.source_len, data.target_len),
        )

    def train_iterator(self, shard_index: int, shard_count: int):
        shard = self.batching(shard_index, shard_count)
        return make_denoising_iterator(self.corpus.train_pairs(), self.objective, **shard)

    def numbered_batches(self, split: str, mesh: Any) -> Sequence[EvalBatch]:
        rows = rows_on(mesh, self.config.data.batch_size)
        return list(
            denoising_eval_batches(self.corpus.pairs(split), self.objective, batch_size=rows)
        )

    def samples(self, params: Any, split: str) -> Sequence[str]:
        """Returns texts of a split as the model read and filled them, and the original, in three lines."""
        mesh = mesh_of(params)
        item = self.numbered_batches(split, mesh)[0]
        # The first text of each row.
        alone = {name: x * (item.batch[f"{name.partition('_')[0]}_segment_ids"] == 1)
                 for name, x in item.batch.items()}  # fmt: skip
        batch = spread_batch(self.seen(alone), mesh)
        write = self.generator(params, max_new_tokens=self.config.data.target_len)
        written = write(batch["source"], batch["source_segment_ids"])
        return [
            self._described(alone["source"][row], written[row], alone["target_out"][row])
            for row in np.flatnonzero(item.indices >= 0)
        ]

    def _described(self, source: np.ndarray, written: np.ndarray, wanted: np.ndarray) -> str:
        tokenizer, size = self.corpus.tokenizer, self.corpus.tokenizer.vocab_size
        read = source[source > 0]
        shown = "".join(
            " ___" if token >= size else tokenizer.tokens([token])[0].replace("▁", " ")
            for token in read[:-1].tolist()
        )
        texts = [self.objective.filled(read, target[target > 0]) for target in (written, wanted)]
        filled, was = tokenizer.decode_batch(text.tolist() for text in texts)
        return f"read:    {shown.strip()}\nwritten: {filled}\nwas:     {was}"


def objective(data: Any, vocab_size: int) -> Objective:
    """Returns the objective of the section ``data`` with a tokenizer of so many tokens.

    Raises:
      SettingsError: lengths or sentinels do not suffice.
    """
    lengths = {"source_len": data.source_len, "target_len": data.target_len}
    if data.objective == "prefix_lm":
        return build(PrefixLM, "data", lengths)
    noise = {name: data[name] for name in ("sentinels", "density", "span")}
    return build(SpanCorruption, "data", lengths | noise, vocab_size=vocab_size)


def vocabulary(tokens: int, sentinels: int) -> int:
    """Returns the vocabulary of the model, T5's 32,128 for 32,000 tokens and 100 sentinels."""
    return -(-(tokens + sentinels) // _MULTIPLE) * _MULTIPLE
