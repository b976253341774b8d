"""The base of tasks that write a text about a sound or a picture.

Such a task has its features, names the values of an example and scores the texts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from crossattn.data.pipeline import EvalBatches, feature_eval_batches
from crossattn.data.sources import MappedSource
from crossattn.train.sharding import mesh_of, rows_on, spread_batch
from experiments.errors import SettingsError
from experiments.tasks import protocols, sections
from experiments.tasks.base import Sums, Task
from experiments.tasks.texts import Generation, TextTask, sums_of_rows


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
      measured: name of the number of examples in ``report``.
    """

    sections: Any = {
        "data": WrittenData,
        "loss": sections.CrossEntropy,
        "evaluate": sections.WrittenEvaluation,
    }
    asks = protocols.CaptioningModel
    measured = "examples"
    memory = ("source",)
    truncation = "drop"

    @cached_property
    def features(self) -> dict[str, Any]:
        """The features of "source", of a fixed size, and of "target", which is predicted."""
        raise NotImplementedError

    def renamed(self, example: dict[str, Any]) -> dict[str, Any]:
        """Returns an example of the data with the names of the features, and its ``group`` of outcomes."""
        raise NotImplementedError

    def text_of(self, example: dict[str, Any]) -> str:
        """Returns the reference text of a renamed example."""
        return example["target"].strip()

    def prompts(
        self, examples: Sequence[dict[str, Any]], indices: Sequence[int]
    ) -> list[list[int]]:
        """Returns prompts of the decoder for some of the examples, all of one length."""
        frame = self.corpus.tokenizer.frame
        return [[frame.start, *frame.before]] * len(indices)

    def text_scores(
        self, examples: Sequence[dict[str, Any]], texts: Sequence[str]
    ) -> dict[str, float]:
        """Returns metrics of the texts that were written about renamed examples."""
        raise NotImplementedError

    @classmethod
    def _target_lengths(cls, config: Any) -> list[int]:
        return [config.data.target_len]

    def loss(self, params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, Sums]:
        model, batch = self.bind(params), self.seen(batch)
        return self.cross_entropy(model, self._read(model, batch, key)[0], batch)

    def _read(
        self, model: Any, batch: Any, key: jax.Array | None, return_weights: bool = False
    ) -> tuple[jax.Array, Any]:
        """Returns the decoder's last vectors, and the weights of cross-attention or None."""
        return model.hidden(
            batch["source"],
            batch["target_in"],
            target_segment_ids=batch["target_segment_ids"],
            target_positions=batch["target_positions"],
            key=key,
            return_weights=return_weights,
        )

    # Batches of features, not those of a corpus.
    train_iterator = Task.train_iterator
    numbered_batches = Task.numbered_batches
    batch_shapes = Task.batch_shapes

    def evaluate(self, params: Any, step: int) -> dict[str, float]:
        """Returns the loss of the validation split, and metrics of texts about its first examples."""
        scores = self.split_loss(params, "validation")
        if self.config.evaluate.examples:
            examples = self.examples("validation", self.config.evaluate.examples)
            scores |= self.text_scores(*self.texts(params, examples))
        return scores

    def report(
        self, params: Any, split: str, *, num_beams: int | None = None, limit: int | None = None
    ) -> dict[str, Any]:
        """Returns the metrics of texts, the loss, and the texts; examples that cannot be read are counted."""
        every = self.examples(split, limit)
        examples, written = self.texts(params, every, num_beams)
        losses = self.split_loss(params, split)
        right = [self.text_of(example) for example in examples]
        return {
            "split": split,
            self.measured: len(examples),
            **({"unreadable": left} if (left := len(every) - len(examples)) else {}),
            "words": sum(len(text.split()) for text in right),
            "num_beams": num_beams or self.config.evaluate.decoding.num_beams,
            **self.text_scores(examples, written),
            f"{split}_loss": losses.pop("loss"),
            **losses,
            "examples": self.outcomes(params, split),
            "samples": [
                {"id": e["id"], "group": e["group"], "text": text, "reference": reference}
                for e, text, reference in zip(examples, written, right, strict=True)
            ],
        }

    def outcomes(self, params: Any, split: str) -> dict[str, list[Any]]:
        """Returns the loss of each example without smoothing, times its tokens; a group is a family."""
        return self.losses_of_texts(self._losses, params, split)

    def _losses(self, params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        """Returns numbers of tokens [B] and their summed losses [B]."""
        model, batch = self.bind(params), self.seen(batch)
        hidden = self._read(model, batch, None)[0]
        return sums_of_rows(model.logits, hidden, batch["target_out"], self.told(batch))

    def texts(
        self, params: Any, examples: Sequence[dict[str, Any]], num_beams: int | None = None
    ) -> tuple[Sequence[dict[str, Any]], list[str]]:
        """Returns those of renamed examples that can be read, and what the model writes about each."""
        mesh, options = mesh_of(params), self.config.evaluate.decoding
        writer = self.writer(params, num_beams)
        texts: dict[int, str] = {}
        for item in self._batches(examples, rows_on(mesh, options.batch_size)):
            rows = np.flatnonzero(item.indices >= 0)
            if not len(rows):
                continue
            prompts = self.prompts(examples, item.indices[rows].tolist())
            prompts += [prompts[0]] * (len(item.indices) - len(rows))
            read = {"source": item.batch["source"], "prefix": np.array(prompts, np.int32)}
            written = writer(**spread_batch(read, mesh))[rows].tolist()
            for row, ids in zip(rows, written, strict=True):
                texts[int(item.indices[row])] = self.decoded(ids)
        read = sorted(texts)
        return MappedSource(read, examples.__getitem__), [texts[index] for index in read]

    def writer(self, params: Any, num_beams: int | None = None) -> Callable[..., np.ndarray]:
        """Returns a function from source [B ...] and prefix [B P] to the best tokens of each row [B T]."""
        beams = num_beams or self.config.evaluate.decoding.num_beams
        generate = self.generator(
            params, **self.search(self.config.data.target_len, num_beams=beams)
        )
        return lambda source, prefix: generate(
            self.seen({"source": source})["source"], prefix=prefix
        )

    def read_weights(self, params: Any) -> Callable[[Any, Any], np.ndarray]:
        """Returns a function from source [B ...] and tokens [B T] to weights [B T-1 S] of what is read.

        They are means over all layers and heads; row t belongs to the step that predicts token t+1.
        """
        read = self.head_weights(params)
        return lambda source, tokens: read(source, tokens).mean((0, 2))

    def head_weights(self, params: Any) -> Callable[[Any, Any], np.ndarray]:
        """Returns the function of ``read_weights`` with all layers and heads, [L B N T-1 S]."""

        def weights(p: Any, source: Any, tokens: Any) -> Any:
            return self.bind(p).hidden(source, tokens[:, :-1], return_weights=True)[1]

        call = jax.jit(weights)
        return lambda source, tokens: np.asarray(call(params, source, tokens))

    def decoded(self, ids: list[int]) -> str:
        """Returns the text of tokens."""
        return self.corpus.tokenizer.decode(ids)

    def examples(self, split: str, count: int | None = None) -> Sequence[dict[str, Any]]:
        """Returns the examples of a split, or the first of them, renamed."""
        return MappedSource(super().examples(split, count), self.renamed)

    def generation(self, rows: int) -> Generation:
        raise SettingsError(
            f"the generation of a {self.config.task} cannot be planned; plan its training."
        )

    def _batches(self, examples: Sequence[dict[str, Any]], rows: int) -> EvalBatches:
        return feature_eval_batches(examples, self.features, batch_size=rows)


def words_read(task: Any, ids: list[int], weights: np.ndarray) -> dict[str, np.ndarray]:
    """Averages attention [T ...] over the tokens ``ids`` of each word; a repeated word is numbered."""
    words, found = task.decoded(ids).split(), {}
    for word, own in enumerate(tokens_of_words(task.decoded, ids)):
        name, again = words[word], words[:word].count(words[word])
        found[f"{name} ({again + 1})" if again else name] = weights[own].mean(0)
    return found


def tokens_of_words(decoded: Callable[[list[int]], str], ids: list[int]) -> list[list[int]]:
    """Returns the numbers of the tokens of each word of a text."""
    rows, begun = list[list[int]](), 0
    for row in range(len(ids)):
        # A blank alone belongs to the next word, which begins with the token that adds one.
        count = len(decoded(ids[: row + 1]).split())
        if count > len(rows):
            rows.append([*range(begun, row + 1)])
            begun = row + 1
        elif rows and decoded([ids[row]]):
            rows[-1].append(row)
            begun = row + 1
    return rows
