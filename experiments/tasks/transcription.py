"""Sound to text, in the language that is spoken or in another, by a Whisper; scored by word errors.

The Whisper is a checkpoint that is fine-tuned, or it begins from nothing and the task trains a tokenizer.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from crossattn import models
from crossattn.data.features import SoundWindow, Text, Vectors
from crossattn.data.mel import HOP, RATE
from crossattn.models.whisper import STRIDE
from crossattn.train.evaluate import translation_scores, word_error_rate, word_errors
from crossattn.types import Rate
from experiments.errors import SettingsError
from experiments.intervals import ratio
from experiments.keys import NAME_OF_PRETRAINED
from experiments.tasks import sections
from experiments.tasks.augmentation import warped
from experiments.tasks.base import Sums
from experiments.tasks.texts import TextTask
from experiments.tasks.times import AlignmentInTime, refuse_other_times, times_loss
from experiments.tasks.written import WritesText, WrittenData

_COMPARED = 48  # frames to which sounds are stretched, to find the nearest


@dataclass(frozen=True, kw_only=True)
class TranscriptionData(sections.Recordings, WrittenData):
    """Sounds with texts.

    Attributes:
      warp: frequencies are stretched in training by a factor of at most ``exp(warp)`` either way, as those
        of other voices.
    """

    warp: Rate = 0.0


@dataclass(frozen=True, kw_only=True)
class TranscriptionLoss(AlignmentInTime, sections.CrossEntropy):
    """The loss of tokens and of attention."""


class TranscriptionTask(WritesText):
    """A Whisper, and examples {"id", "audio", "text"}, whose values may have other names.

    With ``loss.alignment="times"``, examples have "times" too, see ``experiments.tasks.times``.
    """

    sections = WritesText.sections | {
        "data": TranscriptionData,
        "tokenizer": sections.Tokenizer,
        "loss": TranscriptionLoss,
    }
    metrics = (*TextTask.metrics, "wer", "chrf")
    scored = ("wer", "chrf")
    measured = "recordings"
    takes_pretrained = True
    read = "sound"

    @classmethod
    def check(cls, config: Any) -> None:
        """Raises SettingsError also where the model does not hear."""
        super().check(config)
        name = config.model.name
        if name != NAME_OF_PRETRAINED and not hasattr(models.find(name).config, "max_frames"):
            raise SettingsError(
                f"config.model.name is {name!r}, which does not hear; expected 'whisper', or"
                f" {NAME_OF_PRETRAINED!r} and the folder of a Whisper as config.init.from."
            )

    @property
    def timed(self) -> bool:
        """Whether attention learns the times of tokens."""
        return self.config.loss.get("alignment", "none") == "times"

    def corpus_options(self) -> dict[str, Any]:
        return dict(side=TranscriptionData.names(self.config.data)[1], whole=True)

    def refuse_unready(self) -> None:
        """Raises DataError where examples lack a value, and MissingPackage without packages of scores."""
        if self.config.evaluate.examples:
            self.text_scores([{"target": "a"}], ["a"])
        times = ["times"] if self.timed else []
        self.corpus.refuse_lacking(*TranscriptionData.names(self.config.data), *times)

    @cached_property
    def features(self) -> dict[str, Any]:
        """The features of a window of sound, and of its text."""
        config = self.model_config
        length = self.config.data.target_len
        text = Text(self.corpus.tokenizer, length, predicted=True)
        found = {"source": SoundWindow(config.max_frames, config.mels), "target": text}
        return found | ({"place": Vectors(1, length)} if self.timed else {})

    def renamed(self, example: dict[str, Any]) -> dict[str, Any]:
        sound, written = (example[name] for name in TranscriptionData.names(self.config.data))
        text = f" {written.strip()}"  # Whisper's texts begin with a blank
        group = example.get("family", example["id"])
        found = {"id": example["id"], "group": group, "source": sound, "target": text}
        if not self.timed:
            return found
        refuse_other_times(example, len(text) - 1)  # the blank is none
        return found | {"place": self._places(text, example["times"])}

    def _places(self, text: str, times: Float[np.ndarray, " ends"]) -> Float[np.ndarray, "T 1"]:
        """Returns the encoder's vector in the middle of each predicted token; the end's is the last."""
        tokenizer = self.corpus.tokenizer
        _, spans = tokenizer.encode_with_spans(text)
        frame = tokenizer.frame
        # The blank that begins the text is said with the first letter.
        middles = times[np.clip(spans - 1, 0, len(times) - 1)].mean(-1)
        ends = [[times[0]] * len(frame.before), middles, [times[-1]] * len(frame.after)]
        return (np.concatenate(ends)[:, None] * RATE / HOP / STRIDE).astype(np.float32)

    def loss(self, params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, Sums]:
        if key is not None and (warp := self.config.data.get("warp", 0.0)):
            heard = warped(batch["source"], jax.random.fold_in(key, 1), warp)
            batch = {**batch, "source": heard}
        if not self.timed:
            return super().loss(params, batch, key)
        model, batch = self.bind(params), self.seen(batch)
        hidden, weights = self._read(model, batch, key, return_weights=True)
        loss, sums = self.cross_entropy(model, hidden, batch)
        options, there = TranscriptionLoss(**self.config.loss), batch["target_segment_ids"]
        sound = jnp.ones((len(there), weights.shape[-1]), jnp.int32)
        loss = loss + times_loss(weights, batch, sound, options)
        return loss, sums | {"loss": jax.lax.stop_gradient(loss)}

    def text_scores(
        self, examples: Sequence[dict[str, Any]], texts: Sequence[str]
    ) -> dict[str, float]:
        """Returns word errors in percent, and chrF."""
        right = [example["target"] for example in examples]
        chrf = translation_scores([text.strip() for text in texts], [x.strip() for x in right])[
            "chrf"
        ]
        return {"wer": word_error_rate(right, texts), "chrf": float(chrf)}

    def report(self, params: Any, split: str, **options: Any) -> dict[str, Any]:
        """Returns the report of written texts, and the interval of word errors, sentences drawn whole."""
        found = super().report(params, split, **options)
        samples = found["samples"]
        right, said, groups = ([e[k] for e in samples] for k in ("reference", "text", "group"))
        errors, words = word_errors(right, said).T
        return found | ratio(100.0 * errors, words, groups).bounds("wer")

    def headline_baselines(self, split: str) -> dict[str, float]:
        """Returns the nats per token of trigrams, deaf and hearing, without texts and their scores."""
        return super().baselines(split)

    def source_of_text(self, batch: Any, row: int, number: int) -> np.ndarray:
        """Returns the spectrum of a row, which a baseline reads, in a fixed number of frames."""
        return _stretched(batch["source"][row])

    def baselines(self, split: str) -> dict[str, float]:
        """Returns scores of the most frequent training text, and of that of the most similar sound."""
        found, examples = super().baselines(split), self.examples(split)
        train = self.examples("train")
        told = [train[i]["target"] for i in range(len(train))]
        frequent = Counter(told).most_common(1)[0][0]
        nearest = self._nearest([each["source"] for each in examples])
        texts = {"most_frequent": [frequent] * len(examples), "nearest": [told[i] for i in nearest]}
        for name, written in texts.items():
            scores = self.text_scores(examples, written)
            found |= {f"{name}_{metric}": score for metric, score in scores.items()}
        return found

    def _nearest(self, sounds: Sequence[Any]) -> np.ndarray:
        """Returns the numbers of the training sounds that are most similar, as spectra of one length."""
        train, prepared = self.examples("train"), self.features["source"].prepare
        known = np.stack([_stretched(prepared(train[i]["source"])) for i in range(len(train))])
        return np.array([(known @ _stretched(prepared(sound))).argmax() for sound in sounds])


def _stretched(window: np.ndarray) -> np.ndarray:
    """Returns a sound's spectrum [F M] in a fixed number of frames, centred, of length 1."""
    frames = window[: 1 + np.flatnonzero(np.abs(window).sum(1))[-1]]
    rows = np.linspace(0, len(frames) - 1, _COMPARED).round().astype(int)
    vector = (frames[rows] - frames.mean(0)).ravel()
    return vector / max(float(np.linalg.norm(vector)), 1e-9)
