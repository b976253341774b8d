"""Sound to text: a Whisper that goes on learning from recordings and their texts, scored by word errors."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np

from crossattn import decode
from crossattn.data.features import SoundWindow, Text
from crossattn.data.pipeline import EvalBatches, feature_eval_batches
from crossattn.data.sources import MappedSource
from crossattn.train.evaluate import word_error_rate
from crossattn.train.sharding import everywhere, mesh_of, rows_on, spread_batch
from experiments import keys
from experiments.errors import SettingsError
from experiments.keys import NAME_OF_PRETRAINED, Key
from experiments.tasks.base import Sums
from experiments.tasks.texts import TextTask

_TEXT = (
    "data.name", "data.data_dir", "data.batch_size", "data.target_len", "loss.label_smoothing",
    "loss.z_loss", "loss.chunks",
)  # fmt: skip

KEYS = {name: keys.TEXT[name] for name in _TEXT} | {
    "data.options.min_words": Key(
        int, "asterisk: the fewest words of a prompt.", "[1, inf)", needed=False
    ),
    "data.options.max_seconds": Key(
        float, "asterisk: the longest prompt.", "(0, inf)", needed=False
    ),
    "evaluate.examples": Key(
        int, "Validation recordings written down while training; 0 is none.", "[0, inf)"
    ),
    "evaluate.decoding.num_beams": Key(int, "1 is greedy.", "[1, inf)"),
    "evaluate.decoding.batch_size": Key(int, "Recordings written down together.", "[1, inf)"),
}


class TranscriptionTask(TextTask):
    """A Whisper, and examples {"id", "audio", "text"}."""

    metrics = (*TextTask.metrics, "wer")
    reads = ("source", "target_in", "target_segment_ids", "target_positions")
    takes_pretrained = True
    hears = True

    @classmethod
    def check(cls, config: Any) -> None:
        """Raises SettingsError where nothing is begun from, or the best metric is not measured."""
        if config.model.name != NAME_OF_PRETRAINED:
            raise SettingsError(
                f"config.model.name is {config.model.name!r}; a transcription begins from a Whisper:"
                f" {NAME_OF_PRETRAINED!r}, and its folder as config.init.from."
            )
        super().check(config)
        if config.checkpoint.best_metric == "wer" and not config.evaluate.examples:
            raise SettingsError(
                "config.checkpoint.best_metric is 'wer', which evaluate.examples of 1 or more measures."
            )

    @classmethod
    def _target_lengths(cls, config: Any) -> list[int]:
        return [config.data.target_len]

    def refuse_unready(self) -> None:
        """Beside that, raises MissingPackage where word errors cannot be counted."""
        if self.config.evaluate.examples:
            word_error_rate(["a"], ["a"])
        super().refuse_unready()

    def loss(self, params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, Sums]:
        """Cross-entropy of the text, language and task and end included."""
        model = self.bind(params)
        hidden, _ = model.hidden(
            batch["source"],
            batch["target_in"],
            target_segment_ids=batch["target_segment_ids"],
            target_positions=batch["target_positions"],
            key=key,
        )
        return self.cross_entropy(model, hidden, batch)

    @cached_property
    def features(self) -> dict[str, Any]:
        """A window of sound, and its text as the model was taught to write it."""
        config = self.model_config
        text = Text(self.corpus.tokenizer, self.config.data.target_len, predicted=True)
        return {"source": SoundWindow(config.max_frames, config.mels), "target": text}

    def train_iterator(self, shard_index: int, shard_count: int):
        shard = shard_index, shard_count
        return self.train_batches(self._examples("train"), self.features, shard, mode="pad")

    def eval_batches(self, split: str, mesh: Any) -> Iterable[Mapping[str, np.ndarray]]:
        rows = rows_on(mesh, self.config.data.batch_size)
        return (item.batch for item in self._batches(self._examples(split), rows))

    def evaluate(self, params: Any, step: int) -> dict[str, float]:
        """Loss on the validation split, and word errors of its first recordings."""
        scores = self.split_loss(params, "validation")
        if self.config.evaluate.examples:
            examples = self._examples("validation", self.config.evaluate.examples)
            written = self.transcripts(params, examples)
            scores["wer"] = word_error_rate([e["target"] for e in examples], written)
        return scores

    def report(
        self, params: Any, split: str, *, num_beams: int | None = None, limit: int | None = None
    ) -> dict[str, Any]:
        """Word errors, loss, and what was written."""
        examples = self._examples(split, limit)
        written = self.transcripts(params, examples, num_beams)
        said = [example["target"].strip() for example in examples]
        losses = self.split_loss(params, split)
        return {
            "split": split,
            "recordings": len(examples),
            "words": sum(len(text.split()) for text in said),
            "num_beams": num_beams or self.config.evaluate.decoding.num_beams,
            "wer": word_error_rate(said, written),
            f"{split}_loss": losses.pop("loss"),
            **losses,
            "samples": [
                {"id": e["id"], "transcript": text, "reference": reference}
                for e, text, reference in zip(examples, written, said, strict=True)
            ],
        }

    def transcripts(
        self, params: Any, examples: Sequence[dict[str, Any]], num_beams: int | None = None
    ) -> list[str]:
        """What the model writes of recordings, without times, in order."""
        mesh, options = mesh_of(params), self.config.evaluate.decoding
        frame, most = self.corpus.tokenizer.frame, self.config.data.target_len
        prefix = np.array([frame.start, *frame.before], np.int32)
        search = self.search(most, num_beams=num_beams or options.num_beams)
        generate = jax.jit(
            lambda p, source: decode.generate(self.bind(p), source, prefix=prefix, **search).tokens,
            out_shardings=everywhere(mesh),
        )
        texts = [""] * len(examples)
        for item in self._batches(examples, rows_on(mesh, options.batch_size)):
            source = spread_batch({"source": item.batch["source"]}, mesh)["source"]
            best = np.asarray(generate(params, source))[:, 0]
            for row in np.flatnonzero(item.indices >= 0):
                texts[item.indices[row]] = self.corpus.tokenizer.decode(best[row].tolist())
        return texts

    def _examples(self, split: str, count: int | None = None) -> Sequence[dict[str, Any]]:
        """Those of a split, or the first of them, as the features have their names."""
        source = self.corpus.split(split)
        count = len(source) if count is None else min(count, len(source))
        return MappedSource([source[i] for i in range(count)], _renamed)

    def _batches(self, examples: Sequence[dict[str, Any]], rows: int) -> EvalBatches:
        return feature_eval_batches(examples, self.features, batch_size=rows)

    def batch_shapes(self, multiple: int) -> dict[str, jax.ShapeDtypeStruct]:
        batch = next(self.train_iterator(0, 1))
        return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}


def _renamed(example: dict[str, Any]) -> dict[str, Any]:
    # Whisper was taught texts that begin with a blank.
    text = f" {example['text'].strip()}"
    return {"id": example["id"], "source": example["audio"], "target": text}
