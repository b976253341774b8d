"""Sound to text: a Whisper that is fine-tuned on recordings and their texts, scored by word errors."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from crossattn.data.features import SoundWindow, Text
from crossattn.train.evaluate import word_error_rate
from experiments.errors import SettingsError
from experiments.keys import NAME_OF_PRETRAINED
from experiments.tasks.texts import TextTask
from experiments.tasks.written import WritesText


class TranscriptionTask(WritesText):
    """A Whisper, and examples {"id", "audio", "text"}."""

    metrics = (*TextTask.metrics, "wer")
    scored = ("wer",)
    measured = "recordings"
    takes_pretrained = True
    read = "sound"

    @classmethod
    def check(cls, config: Any) -> None:
        """Raises SettingsError also where the model is none of a checkpoint."""
        if config.model.name != NAME_OF_PRETRAINED:
            raise SettingsError(
                f"config.model.name is {config.model.name!r}; a transcription begins from a Whisper:"
                f" {NAME_OF_PRETRAINED!r}, and its folder as config.init.from."
            )
        super().check(config)

    def refuse_unready(self) -> None:
        """Raises MissingPackage also where word errors cannot be counted."""
        if self.config.evaluate.examples:
            word_error_rate(["a"], ["a"])
        super().refuse_unready()

    @cached_property
    def features(self) -> dict[str, Any]:
        """The features of a window of sound, and of its text."""
        config = self.model_config
        text = Text(self.corpus.tokenizer, self.config.data.target_len, predicted=True)
        return {"source": SoundWindow(config.max_frames, config.mels), "target": text}

    def renamed(self, example: dict[str, Any]) -> dict[str, Any]:
        text = f" {example['text'].strip()}"  # Whisper's texts begin with a blank
        group = example["id"]
        return {"id": example["id"], "group": group, "source": example["audio"], "target": text}

    def text_scores(
        self, examples: Sequence[dict[str, Any]], texts: Sequence[str]
    ) -> dict[str, float]:
        return {"wer": word_error_rate([example["target"] for example in examples], texts)}
