"""Summarization: an encoder-decoder writes the summary of a text, scored by ROUGE."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from crossattn.train.evaluate import ROUGE, rouge_scores
from experiments.errors import SettingsError
from experiments.tasks.copied import copied
from experiments.tasks.texts import TextTask
from experiments.tasks.translation import Evaluation, TranslationTask

_LEADS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_SENTENCE = re.compile(r"(?<=[.!?])\s")


class SummarizationTask(TranslationTask):
    """An encoder-decoder, and pairs of a text and its summary."""

    sections = {**TranslationTask.sections, "evaluate": Evaluation}
    metrics = (*TextTask.metrics, *ROUGE)
    scored = ROUGE
    written = "text"

    def check_scores(self) -> None:
        """Scores references of the validation split, to find what cannot be scored early.

        Raises:
          SettingsError: a reference has no word of ROUGE.
          MissingPackage: rouge-score is not installed.
        """
        examples = self.examples("validation", max(self.config.evaluate.examples, 1))
        self.text_scores(examples, [example["target"] for example in examples])

    def text_scores(
        self, examples: Sequence[dict[str, Any]], texts: Sequence[str]
    ) -> dict[str, Any]:
        """Returns the means of ROUGE, and under "examples" those of each; a group is a family."""
        found = self._rouge(texts, [example["target"] for example in examples])
        groups = [str(e.get("family", e["id"])) for e in examples]
        own = {"group": groups, "weight": [1.0] * len(examples)}
        each = {name: values.tolist() for name, values in found.items()}
        return {name: float(x.mean()) for name, x in found.items()} | {"examples": own | each}

    def simple_texts(self, examples: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
        """Returns texts that need no model, by the name of the baseline.

        They are summaries of training texts, the first sentence (lead-1), and the first words, as many as
        have the best ROUGE-L on validation.
        """
        texts, lead = [example["source"] for example in examples], self._lead()
        return copied(self.examples("train"), texts) | {
            "lead_1": [_SENTENCE.split(text.strip(), 1)[0] for text in texts],
            "lead_words": [_first(text, lead) for text in texts],
        }

    def _lead(self) -> int:
        """Returns the number of first words with the best ROUGE-L on the validation split."""
        examples = self.examples("validation")
        right = [example["target"] for example in examples]

        def score(count: int) -> float:
            said = [_first(example["source"], count) for example in examples]
            return float(self._rouge(said, right)["rougeL"].mean())

        return max(_LEADS, key=score)

    def _rouge(self, texts: Sequence[str], references: Sequence[str]) -> dict[str, np.ndarray]:
        try:
            return rouge_scores(texts, references)
        except ValueError as error:
            raise SettingsError(
                f"config.data.name is {self.config.data.name!r}: {error}; take task 'translation' for other"
                " scripts."
            ) from error


def _first(text: str, count: int) -> str:
    return " ".join(text.split()[:count])
