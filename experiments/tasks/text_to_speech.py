"""Text to sound: a model whose decoder gives frames of a spectrogram, scored against recordings.

Two kinds of scores. ``mel`` and ``diagonal`` are of frames that follow the true ones before them, in
training and for the choice of a checkpoint. ``spoken_...`` are of frames that follow the model's own, until
its stop: a mean difference along the best alignment in time (``warped``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from crossattn import decode
from crossattn.data.errors import DataError
from crossattn.data.features import Letters, Vectors
from crossattn.data.features.sound import frames_of, samples_of
from crossattn.data.mel import HOP, RATE
from crossattn.decode.speech.timing import warp
from crossattn.nn.sublayers import split
from crossattn.train.alignment_losses import diagonal_attention, relative_distance
from crossattn.train.sharding import everywhere, mesh_of
from crossattn.types import Count, NonNegative, Positive, Rate
from experiments.errors import SettingsError
from experiments.tasks import base, protocols, sections
from experiments.tasks.forced_alignment import letter_times
from experiments.tasks.times import AlignmentInTime, refuse_other_times, times_loss

NEAR = 0.1 + 1e-6
"""Relative distance from the diagonal, and of lengths, that is counted as near: a tenth, rounded or not."""

_TOGETHER = 64  # recordings in memory


@dataclass(frozen=True, kw_only=True)
class SpeechData(sections.Recordings):
    """Recordings of one voice, and what they say.

    Attributes:
      letters: those that texts are written in; capitals are read as small ones.
      source_len: the most letters of a text, its end included.
      max_frames: the longest recording, in hundredths of a second.
      mode: like lengths in a batch, or all batches of one shape.
      timed_by: the voice of espeak-ng, such as fr, that says each text too, so that recordings without times
        of letters get them (``experiments.tasks.forced_alignment``); None takes the examples' own.
    """

    letters: str
    source_len: sections.Length
    max_frames: Annotated[int, "[1, 6000]"]
    mode: Literal["bucket", "pad"] = "bucket"
    timed_by: str | None = None


@dataclass(frozen=True, kw_only=True)
class SpeechLoss(AlignmentInTime):
    """The loss of frames, stops and attention.

    Attributes:
      stop: weight of the loss of stops.
      stop_last: weight of the last step among them, which is one of many.
      alignment: what teaches attention: nothing, the diagonal, or the times of letters, which examples have.
      unseen: share of the steps that are not told the frame before them, in training.
    """

    stop: NonNegative = 1.0
    stop_last: Positive = 5.0
    alignment: Literal["none", "diagonal", "times"] = "diagonal"
    unseen: Rate = 0.0


@dataclass(frozen=True)
class SpeechEvaluation:
    """Texts that are spoken in ``experiments.evaluate``.

    Attributes:
      examples: the most texts; 0 is none.
      batch_size: texts spoken together.
      threshold: the probability of a stop that ends a text.
      dropout: whether the prenet drops features in decoding too.
    """

    examples: sections.Number = 1000
    batch_size: Count = 32
    threshold: sections.Share = 0.5
    dropout: bool = True


@dataclass(frozen=True)
class Spoken:
    """What a model says.

    Attributes:
      frames: [F M].
      weights: cross-attention [steps S], the mean over layers and heads; a step has F / steps frames.
      stopped: whether the model stopped.
    """

    frames: Float[np.ndarray, "F M"]
    weights: Float[np.ndarray, "T S"]
    stopped: bool


class TextToSpeechTask(base.Task):
    """A model of frames, and examples {"id", "text", "audio"}, whose values may have other names."""

    sections = {"data": SpeechData, "loss": SpeechLoss, "evaluate": SpeechEvaluation}
    asks = protocols.SpeechModel
    gives = ("vocab_size",)
    memory = ("source",)
    truncation = "drop"
    metrics = ("loss", "mel", "diagonal", "stop")
    headline = ("mel", "min")

    def __init__(self, config: Any, assets: Any = None):
        super().__init__(config, assets)
        self.mode = config.data.get("mode", "bucket")
        self.options = SpeechLoss(**config.get("loss", {}))
        self._timed = self.options.alignment == "times"
        self._framed: dict[str, list[dict[str, Any]]] = {}

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        voice = config.data.get("timed_by")
        alignment = SpeechLoss(**config.get("loss", {})).alignment
        if voice is not None and alignment != "times":
            raise SettingsError(
                f"config.data.timed_by is {voice!r}, but config.loss.alignment is {alignment!r}, which reads"
                " no times of letters; take 'times', or leave timed_by None."
            )

    def refuse_unready(self) -> None:
        """Raises DataError where examples lack a value."""
        own = self._timed and self.config.data.get("timed_by") is None
        times = ["times"] if own else []
        self.corpus.refuse_lacking(*SpeechData.names(self.config.data), *times)

    def sizes(self) -> dict[str, Any]:
        return {"vocab_size": self.letters.vocab_size}

    @cached_property
    def letters(self) -> Letters:
        """The feature of a text."""
        return Letters(self.config.data.letters, self.config.data.source_len)

    @property
    def max_steps(self) -> int:
        """The most groups of frames of a recording."""
        return -(-self.config.data.max_frames // self.model_config.group)

    @cached_property
    def features(self) -> dict[str, Any]:
        """The features of a text, and of groups of frames."""
        size = self.model_config.group * self.model_config.mels
        found: dict[str, Any] = {"source": self.letters, "target": Vectors(size, self.max_steps)}
        return found | ({"place": Vectors(1, self.max_steps)} if self._timed else {})

    def examples(self, split: str, count: int | None = None) -> Sequence[Any]:
        """Returns examples {"id", "source", "target"}, and "place" of known times; all are computed once."""
        every, framed = self.corpus.split(split), self._framed.setdefault(split, [])
        asked = range(len(every))[:count]
        for start in range(len(framed), len(asked), _TOGETHER):
            own = [every[i] for i in asked[start : start + _TOGETHER]]
            found = [self._with_frames(example) for example in own]
            framed += self._with_places(own, found) if self._timed else found
        return framed[:count]

    def _with_frames(self, example: Mapping[str, Any]) -> dict[str, Any]:
        sound, text = (example[name] for name in SpeechData.names(self.config.data))
        try:
            target = self.grouped(frames_of(sound, self.model_config.mels))
        except DataError as error:
            raise DataError(f"example {example['id']}: {error}") from None
        return {"id": example["id"], "source": text, "target": target}

    def _with_places(
        self, examples: Sequence[Mapping[str, Any]], framed: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        found = []
        for times, of_one in zip(self._times(examples), framed, strict=True):
            seconds = (
                (np.arange(len(of_one["target"])) + 0.5) * self.model_config.group * HOP / RATE
            )
            # A letter is read from its begin on, by its middle half a letter later.
            place = np.interp(seconds, times, np.arange(len(times))) - 0.5
            found.append(of_one | {"place": place[:, None].astype(np.float32)})
        return found

    def _times(self, examples: Sequence[Mapping[str, Any]]) -> list[np.ndarray]:
        """Returns when each letter of the examples begins, and the last ends."""
        sound, text = SpeechData.names(self.config.data)
        voice, data_dir = (self.config.data.get(name) for name in ("timed_by", "data_dir"))
        if voice is not None:
            texts = [self.letters.text(example[text]) for example in examples]
            sounds = [samples_of(example[sound]) for example in examples]
            return letter_times(texts, sounds, voice, data_dir)
        for example in examples:
            refuse_other_times(example, self.letters.length(example[text]) - 1)
        return [np.asarray(example["times"]) for example in examples]

    def grouped(self, frames: Float[np.ndarray, "F M"]) -> Float[np.ndarray, "T G"]:
        """Returns groups of frames, the last filled with the least value."""
        R = self.model_config.group
        more = -len(frames) % R
        filled = np.pad(frames, [(0, more), (0, 0)], constant_values=frames.min())
        return filled.reshape(-1, R * frames.shape[1])

    def loss(self, params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, base.Sums]:
        model, options, batch = self.bind(params), self.options, self.seen(batch)
        keys = split(key, 3)
        target, there = batch["target"], batch["target_segment_ids"]
        letters = batch["source_segment_ids"]
        before = jnp.pad(target[:, :-1], [(0, 0), (1, 0), (0, 0)])
        if keys[2] is not None:
            seen = jax.random.bernoulli(keys[2], 1.0 - options.unseen, there.shape)
            before = jnp.where(seen[..., None], before, 0.0)
        hidden, weights = model.hidden(
            batch["source"],
            before,
            source_segment_ids=letters,
            target_segment_ids=there,
            key=keys[0],
            return_weights=True,
        )
        groups, stop = model.logits(hidden)
        refined = model.refine(groups, there, keys[1])
        valid = there > 0

        def total(of_steps: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(valid, of_steps, 0.0))

        def error(groups: jax.Array) -> jax.Array:
            return total(jnp.abs(groups - target).mean(-1))

        def square(groups: jax.Array) -> jax.Array:
            return total(jnp.square(groups - target).mean(-1))

        last = valid & ~jnp.pad(valid[:, 1:], [(0, 0), (0, 1)])
        of_stop = jax.nn.softplus(jnp.where(last, -stop, stop))
        stops = total(of_stop * jnp.where(last, options.stop_last, 1.0))
        attention = weights.mean((0, 2))
        mel = error(refined)
        loss = mel + square(refined) + error(groups) + square(groups) + options.stop * stops
        if self._timed:
            loss = loss + times_loss(weights, batch, letters, options)
        elif options.alignment == "diagonal":
            far_from_it, _ = diagonal_attention(attention, there, letters)
            loss = loss + options.alignment_weight * far_from_it
        far = relative_distance(there, letters)
        place = jnp.argmax(attention, axis=-1)[..., None]
        near = total(jnp.take_along_axis(far, place, axis=-1)[..., 0] <= NEAR)
        weight = valid.sum().astype(jnp.float32)
        sums = dict(loss=loss, mel=mel, diagonal=near, stop=total(of_stop), weight=weight)
        return loss, jax.lax.stop_gradient(sums)

    def speaker(
        self, params: Any, rows: int, max_steps: int | None = None, letters: int | None = None
    ) -> Callable[[Sequence[str], int], list[Spoken]]:
        """Returns a function of up to so many texts, and a seed, to what the model says.

        Args:
          params: of the model.
          rows: texts spoken together.
          max_steps: the most groups of frames; None is the longest recording's. Memory grows with it.
          letters: the longest text, its end included; None is ``config.data.source_len``.
        """
        options = SpeechEvaluation(**self.config.get("evaluate", {}))
        steps, width = max_steps or self.max_steps, letters or self.letters.max_length
        search = decode.UntilStop(steps, options.threshold, capture=decode.Capture())

        def run(params: Any, source: Any, segment_ids: Any, key: Any) -> Any:
            key = key if options.dropout else None
            model, given = self.bind(params), self.seen({"source": source})
            found = decode.generate_frames(
                model, given["source"], segment_ids, search=search, key=key
            )
            return found.groups, found.lengths, found.stopped, found.weights.mean((2, 3))

        call = jax.jit(run, out_shardings=everywhere(mesh_of(params)))

        def speak(texts: Sequence[str], seed: int = 0) -> list[Spoken]:
            source = np.zeros((rows, width), np.int32)
            feature = Letters(self.letters.letters, width)
            for row, text in enumerate(texts):
                ids = feature.prepare(text)
                source[row, : len(ids)] = ids
            source[len(texts) :] = source[:1]
            there = (source > 0).astype(np.int32)
            found = call(params, source, there, jax.random.key(seed))
            return [
                Spoken(
                    groups[:length].reshape(-1, self.model_config.mels),
                    weights[:length, : there[row].sum()],
                    bool(stopped),
                )
                for row, (groups, length, stopped, weights) in enumerate(
                    zip(*map(np.asarray, found), strict=True)
                )
            ][: len(texts)]

        return speak

    def report(self, params: Any, split: str, **options: Any) -> dict[str, Any]:
        """Returns losses, and scores of spoken texts: the shares are of steps, and of texts."""
        limit = options.pop("limit", None)
        found = super().report(params, split, **options)
        count = self.config.get("evaluate", {}).get("examples", SpeechEvaluation.examples)
        examples = self.examples(split, count if limit is None else min(count, limit))
        if not examples:
            return found
        rows = self.config.get("evaluate", {}).get("batch_size", SpeechEvaluation.batch_size)
        speak, spoken = self.speaker(params, rows), []
        for start in range(0, len(examples), rows):
            texts = [example["source"] for example in examples[start : start + rows]]
            spoken += speak(texts, start)
        scores = [self.score(s, e["target"]) for s, e in zip(spoken, examples, strict=True)]
        steps = np.array([len(each.weights) for each in spoken], float)
        return found | {
            "spoken_warped": float(np.mean([score["mel"] for score in scores])),
            "spoken_diagonal": float(
                np.average([score["diagonal"] for score in scores], weights=steps)
            ),
            "spoken_stopped_near": float(np.mean([score["near"] for score in scores])),
            "spoken_texts": len(scores),
        }

    def score(self, spoken: Spoken, target: Float[np.ndarray, "T G"]) -> dict[str, float]:
        """Returns the difference along the best alignment, and the shares of what is near."""
        (T, S), true = spoken.weights.shape, len(target)
        far = np.abs(np.arange(T) / T - spoken.weights.argmax(-1) / S)
        return {
            "mel": warped(spoken.frames, target.reshape(-1, self.model_config.mels)),
            "diagonal": float(np.mean(far <= NEAR)),
            "near": float(spoken.stopped and abs(T - true) <= NEAR * true),
        }

    def baselines(self, split: str) -> dict[str, float]:
        """Returns scores of what says nothing new.

        The mean frame of the training split; the last frame again; and the recording of the most similar
        training sentence, by its letters in threes, stretched to the length for ``mel`` and warped for
        ``spoken_warped``.
        """
        train, examples, M = self.examples("train"), self.examples(split), self.model_config.mels
        mean = np.mean([e["target"].reshape(-1, M).mean(0) for e in train], axis=0)
        near = nearest([e["source"] for e in train], [e["source"] for e in examples])
        sums, warps = dict(mean_frame=0.0, frame_before=0.0, nearest_sentence=0.0), []
        for example, other in zip(examples, near, strict=True):
            target, R = example["target"].reshape(-1, M), self.model_config.group
            before = np.repeat(np.pad(target[R - 1 :: R], [(1, 0), (0, 0)])[:-1], R, axis=0)
            said = train[other]["target"].reshape(-1, M)
            stretched = said[np.arange(len(target)) * len(said) // len(target)]
            for name, guess in zip(sums, (mean, before, stretched), strict=True):
                sums[name] += float(np.abs(target - guess).mean(-1).sum())
            warps.append((np.abs(target - mean).mean(), warped(said, target)))
        frames = sum(example["target"].size // M for example in examples) or 1
        found = {f"{name}_mel": value / frames for name, value in sums.items()}
        flat, other = np.mean(warps, axis=0)
        return found | {
            "mean_frame_spoken_warped": float(flat),
            "nearest_sentence_spoken_warped": float(other),
        }


def warped(said: Float[np.ndarray, "F M"], target: Float[np.ndarray, "T M"]) -> float:
    """Returns the mean absolute difference along the alignment in time with the least sum.

    Frames of either side may be repeated, and none is left out; the mean is over the steps of the path.

    Source: dynamic time warping, Sakoe and Chiba 1978.
    """
    cost = np.stack([np.abs(frame - target).mean(-1) for frame in said.astype(np.float64)])
    return float(cost[warp(cost)].mean())


def nearest(known: Sequence[str], asked: Sequence[str]) -> list[int]:
    """Returns the index of the most similar known text for each, by the cosine of letters in threes."""

    def threes(text: str) -> list[str]:
        padded = f"  {text} "
        return [padded[i : i + 3] for i in range(len(padded) - 2)]

    names: dict[str, int] = {}
    for text in (*known, *asked):
        for each in threes(text):
            names.setdefault(each, len(names))

    def vectors(texts: Sequence[str]) -> np.ndarray:
        found = np.zeros((len(texts), len(names)), np.float32)
        for row, text in enumerate(texts):
            np.add.at(found[row], [names[each] for each in threes(text)], 1)
        return found / np.maximum(np.linalg.norm(found, axis=-1, keepdims=True), 1e-9)

    return (vectors(asked) @ vectors(known).T).argmax(-1).tolist()
