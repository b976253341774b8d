"""The base of tasks that write a text of a sound or of a picture.

Such a task has its features, names the values of an example, and scores the texts; the rest is here.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from crossattn import decode
from crossattn.data.pipeline import EvalBatches, feature_eval_batches
from crossattn.data.sources import MappedSource
from crossattn.train.sharding import everywhere, mesh_of, rows_on, spread_batch
from experiments.errors import SettingsError
from experiments.settings import section_of
from experiments.tasks import protocols, sections
from experiments.tasks.base import Generation, Sums, feature_batch, shapes_of
from experiments.tasks.texts import TextTask


@dataclass(frozen=True, kw_only=True)
class WrittenData(sections.Data):
    """Examples with a text each.

    Attributes:
      target_len: the most tokens of a target, its end included.
    """

    target_len: sections.Length


class WritesText(TextTask):
    """An encoder-decoder, and examples {"id", "source", "target"} whose source is of a fixed size.

    Attributes:
      scored: metrics of the texts that are written, which ``evaluate.examples`` asks for.
      measured: what ``report`` calls the examples.
    """

    sections: Any = {
        "data": WrittenData,
        "loss": sections.CrossEntropy,
        "evaluate": sections.WrittenEvaluation,
    }
    asks = protocols.CaptioningModel
    scored: tuple[str, ...] = ()
    measured = "examples"

    # What such a task says.

    @cached_property
    def features(self) -> dict[str, Any]:
        """Features of "source", of a fixed size, and of "target", which is predicted."""
        raise NotImplementedError

    def renamed(self, example: dict[str, Any]) -> dict[str, Any]:
        """An example of the data as the features have its names."""
        raise NotImplementedError

    def text_of(self, example: dict[str, Any]) -> str:
        """The text that should be written of a renamed example."""
        return example["target"].strip()

    def prompts(
        self, examples: Sequence[dict[str, Any]], indices: Sequence[int]
    ) -> list[list[int]]:
        """Prompts of the decoder for some of the examples, all of one length."""
        frame = self.corpus.tokenizer.frame
        return [[frame.start, *frame.before]] * len(indices)

    def text_scores(
        self, examples: Sequence[dict[str, Any]], texts: Sequence[str]
    ) -> dict[str, float]:
        """Metrics of what was written of some renamed examples."""
        raise NotImplementedError

    # What they share.

    @classmethod
    def check(cls, config: Any) -> None:
        """Raises SettingsError where the best metric is not measured."""
        super().check(config)
        metric = section_of(config, "checkpoint").get("best_metric")
        if metric in cls.scored and not config.evaluate.examples:
            raise SettingsError(
                f"config.checkpoint.best_metric is {metric!r}, which evaluate.examples of 1 or more measures."
            )

    @classmethod
    def _target_lengths(cls, config: Any) -> list[int]:
        return [config.data.target_len]

    def loss(self, params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, Sums]:
        """Cross-entropy of the text, its end included."""
        model = self.bind(params)
        hidden, _ = model.hidden(
            batch["source"],
            batch["target_in"],
            target_segment_ids=batch["target_segment_ids"],
            target_positions=batch["target_positions"],
            key=key,
        )
        return self.cross_entropy(model, hidden, batch)

    def train_iterator(self, shard_index: int, shard_count: int):
        shard = shard_index, shard_count
        return self.train_batches(self.examples("train"), self.features, shard, mode="pad")

    def eval_batches(self, split: str, mesh: Any) -> Iterable[Mapping[str, np.ndarray]]:
        rows = rows_on(mesh, self.config.data.batch_size)
        return (item.batch for item in self._batches(self.examples(split), rows))

    def evaluate(self, params: Any, step: int) -> dict[str, float]:
        """Loss on the validation split, and metrics of texts of its first examples."""
        scores = self.split_loss(params, "validation")
        if self.config.evaluate.examples:
            examples = self.examples("validation", self.config.evaluate.examples)
            scores |= self.text_scores(examples, self.texts(params, examples))
        return scores

    def report(
        self, params: Any, split: str, *, num_beams: int | None = None, limit: int | None = None
    ) -> dict[str, Any]:
        """Metrics of texts, loss, and what was written."""
        examples = self.examples(split, limit)
        written = self.texts(params, examples, num_beams)
        losses = self.split_loss(params, split)
        right = [self.text_of(example) for example in examples]
        return {
            "split": split,
            self.measured: len(examples),
            "words": sum(len(text.split()) for text in right),
            "num_beams": num_beams or self.config.evaluate.decoding.num_beams,
            **self.text_scores(examples, written),
            f"{split}_loss": losses.pop("loss"),
            **losses,
            "samples": [
                {"id": e["id"], "text": text, "reference": reference}
                for e, text, reference in zip(examples, written, right, strict=True)
            ],
        }

    def texts(
        self, params: Any, examples: Sequence[dict[str, Any]], num_beams: int | None = None
    ) -> list[str]:
        """Texts that the model writes of renamed examples, in order."""
        mesh, options = mesh_of(params), self.config.evaluate.decoding
        writer = self.writer(params, num_beams)
        texts = [""] * len(examples)
        for item in self._batches(examples, rows_on(mesh, options.batch_size)):
            rows = np.flatnonzero(item.indices >= 0)
            if not len(rows):
                continue
            prompts = self.prompts(examples, item.indices[rows].tolist())
            prompts += [prompts[0]] * (len(item.indices) - len(rows))
            read = {"source": item.batch["source"], "prefix": np.array(prompts, np.int32)}
            for row, ids in zip(rows, writer(**spread_batch(read, mesh))[rows], strict=True):
                texts[item.indices[row]] = self.decoded(ids.tolist())
        return texts

    def writer(self, params: Any, num_beams: int | None = None) -> Any:
        """(source [B ...], prefix [B P]) -> tokens of the best text of each row [B T]."""
        search = self.search(
            self.config.data.target_len,
            num_beams=num_beams or self.config.evaluate.decoding.num_beams,
        )
        generate = jax.jit(
            lambda p, source, prefix: decode.generate(
                self.bind(p), source, prefix=prefix, **search
            ).tokens[:, 0],
            out_shardings=everywhere(mesh_of(params)),
        )
        return lambda source, prefix: np.asarray(generate(params, source, prefix))

    def decoded(self, ids: list[int]) -> str:
        """The text of tokens."""
        return self.corpus.tokenizer.decode(ids)

    def examples(self, split: str, count: int | None = None) -> Sequence[dict[str, Any]]:
        """Those of a split, or the first of them, as the features have their names."""
        source = self.corpus.split(split)
        count = len(source) if count is None else min(count, len(source))
        if count < len(source):
            source = [source[i] for i in range(count)]
        return MappedSource(source, self.renamed)

    def generation(self, rows: int) -> Generation:
        """Raises SettingsError: a plan feeds tokens alone."""
        raise SettingsError(
            f"what a {self.config.task} writes cannot be planned; plan its training."
        )

    def _batches(self, examples: Sequence[dict[str, Any]], rows: int) -> EvalBatches:
        return feature_eval_batches(examples, self.features, batch_size=rows)

    def batch_shapes(self, multiple: int) -> dict[str, jax.ShapeDtypeStruct]:
        return shapes_of(feature_batch(self.features, self.config.data.batch_size))
