"""Text to image: a model says what is noise in a noisy picture, and reads the caption to do so.

A share of the training captions is not read at all, so that one model is the conditional and the
unconditional one that guidance goes between. Pictures of scenes (``shapes/scenes``) are read back from their
pixels: a picture is right if it has all that its caption says and nothing else.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from crossattn.data import scenes
from crossattn.data.errors import DataError
from crossattn.data.features import Image, Text
from crossattn.decode import diffusion
from crossattn.rows import own_rows
from crossattn.train.storage import write_whole
from crossattn.types import Count, NonNegative, Rate
from experiments.errors import SettingsError
from experiments.intervals import Interval, ratio
from experiments.tasks import base, protocols, sections
from experiments.tasks.augmentation import augmented_as
from experiments.tasks.copied import nearest

PROCESSES: dict[str, diffusion.Process] = {
    "flow": diffusion.Flow(), "data_flow": diffusion.DataFlow(), "ddpm": diffusion.DDPM(),
}  # fmt: skip
SAMPLERS: dict[str, Callable[[int], diffusion.Sampler]] = {
    "euler": lambda steps: diffusion.Euler(steps),
    "ddim": lambda steps: diffusion.DDIM(steps, clip=1.0),
    "ancestral": lambda steps: diffusion.DDIM(steps, eta=1.0, clip=1.0),
}
_GUIDANCE = (0.0, 1.0, 3.0, 5.0)  # of a report
_DRAWN = 500  # captions of a report, at most
_FITTED = 4000  # training pictures that baselines are fitted to
_LARGEST = 3072  # numbers of a picture that baselines are fitted to
_WORDS = "words.json"
_NAMED, _LONGEST = 12, 40  # words that an error names, and letters of one
_NO_VELOCITY = (
    "the sampler is 'euler', which follows the velocity of a flow, and loss.process is 'ddpm'; expected"
    " 'ddim' or 'ancestral'."
)


@dataclass(frozen=True, kw_only=True)
class TextToImageData(sections.Pictures, sections.Data):
    """Pictures with captions.

    Attributes:
      text_len: the most tokens of a caption, its end included.
    """

    text_len: sections.Length


@dataclass(frozen=True)
class DiffusionLoss:
    """The loss of noisy pictures.

    Attributes:
      process: flow, whose velocity the model predicts; data_flow, whose picture it predicts; or ddpm, whose
        noise it predicts.
      unread: share of the training captions that are not read.
    """

    process: Literal["flow", "data_flow", "ddpm"]
    unread: Rate


@dataclass(frozen=True)
class DrawnEvaluation:
    """Pictures that are drawn while training.

    Attributes:
      examples: validation captions of which a picture is drawn and read back; 0 is none.
      guidance: 0 ignores the caption, 1 follows it, more exaggerates it.
      sampler: euler of a flow, ddim, or ancestral, which draws new noise in each step.
      steps: from noise to a picture.
      batch_size: pictures drawn together.
    """

    examples: sections.Number
    guidance: NonNegative
    sampler: Literal["euler", "ddim", "ancestral"]
    steps: Count
    batch_size: Count


class TextToImageTask(base.Task):
    """A ``PixArt``, or another model that reads captions and denoises, and examples {"image", "caption"}.

    ``mse`` is of the velocity or the noise (of a data_flow, see ``diffusion.DataFlow``), with times and noise
    that are the same in each evaluation; ``right`` is the share of drawn scenes that are what their captions
    say.
    """

    sections = {
        "data": TextToImageData,
        "tokenizer": sections.Tokenizer,
        "loss": DiffusionLoss,
        "evaluate": DrawnEvaluation,
    }
    gives = ("vocab_size", "max_length", "image_size", "channels")
    metrics = ("loss", "mse", "right")
    headline = ("mse", "min")
    asks = protocols.TextToImageModel
    memory = ("caption",)
    tokenizes = True

    def corpus_options(self) -> dict[str, Any]:
        return dict(side="caption", whole=True)

    @classmethod
    def check(cls, config: Any) -> None:
        """Raises SettingsError also where a sampler, a best metric or a picture's size does not fit."""
        super().check(config)
        evaluate, sides = config.evaluate, (config.data.height, config.data.width)
        if evaluate.sampler == "euler" and config.loss.process == "ddpm":
            raise SettingsError(_NO_VELOCITY)
        if config.checkpoint.get("best_metric") == "right" and not evaluate.examples:
            raise SettingsError(
                "config.checkpoint.best_metric is 'right', which evaluate.examples of 1 or more measures;"
                " take 'mse'."
            )
        if config.checkpoint.get("best_metric") == "right" and not _reads_back(config.data):
            raise SettingsError(
                "config.checkpoint.best_metric is 'right', which is measured on shapes/scenes of"
                f" {scenes.SIDE} by {scenes.SIDE} pixels alone; take 'mse'."
            )
        patch = config.model.get("patch_size", 1)
        if any(side % patch for side in sides):
            raise SettingsError(
                f"config.data.height and width are {sides[0]} and {sides[1]}; expected multiples of "
                f"model.patch_size, {patch}."
            )

    def refuse_unready(self) -> None:
        """Raises DataError where examples lack a picture or a caption."""
        self.corpus.refuse_lacking("image", "caption")

    @cached_property
    def features(self) -> dict[str, Any]:
        data = self.config.data
        return {
            "image": Image(data.height, data.width, unreadable=data.get("unreadable", "refuse")),
            "caption": Text(self.corpus.tokenizer, data.text_len),
        }

    def sizes(self) -> dict[str, Any]:
        data = self.config.data
        return dict(
            vocab_size=self.corpus.tokenizer.vocab_size,
            max_length=data.text_len,
            image_size=(data.height, data.width),
            channels=3,
        )

    @property
    def process(self) -> diffusion.Process:
        """The process of the noise."""
        return PROCESSES[self.config.loss.process]

    @property
    def reads_back(self) -> bool:
        """Whether pictures can be read back: those of scenes, in their own size."""
        return _reads_back(self.config.data)

    def loss(self, params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, base.Sums]:
        """Returns the sum of each picture's mean squared error; without a key noise and times are fixed."""
        model, batch = self.bind(params), self.seen(batch)
        segments = batch["caption_segment_ids"]
        keys = jax.random.split(jax.random.key(0) if key is None else key, 3)
        if key is not None:
            rate, rows = self.config.loss.unread, len(segments)
            unread = own_rows(lambda n: jax.random.bernoulli(keys[0], rate, (n, 1)), rows)
            segments = jnp.where(unread, 0, segments)
        inner = None if key is None else keys[1]
        predict = lambda x, time: model(x, time, batch["caption"], segments, key=inner)  # noqa: E731
        image = augmented_as(self.config.data, batch["image"], key)
        return self._error(predict, image, batch["valid"], keys[2])

    def _error(
        self, predict: diffusion.Predict, image: jax.Array, valid: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, base.Sums]:
        """Returns the error of a model of noisy pictures, at times and with noise that the key draws."""
        keys, rows = jax.random.split(key), len(image)
        time = own_rows(lambda n: jax.random.uniform(keys[0], (n,)), rows)
        noise = own_rows(lambda n: jax.random.normal(keys[1], (n, *image.shape[1:])), rows)
        x, target = diffusion.noised(self.process, image, noise, time)
        each = self.process.weight(time) * jnp.square(predict(x, time) - target).mean((1, 2, 3))
        there = valid > 0
        loss = jnp.where(there, each, 0).sum()
        sums = {"loss": loss, "mse": loss, "weight": there.sum().astype(jnp.float32)}
        return loss, jax.lax.stop_gradient(sums)

    def evaluate(self, params: Any, step: int) -> dict[str, float]:
        """Returns the loss of the validation split, and the share of right pictures of its first captions."""
        found = self.split_loss(params, "validation")
        count = self.config.evaluate.examples
        if count and self.reads_back:
            found["right"] = self.right(params, "validation", count).value
        return found

    def report(self, params: Any, split: str, *, limit: int | None = None) -> dict[str, Any]:
        """Returns the loss, and the share of right pictures at several guidances."""
        found: dict[str, Any] = self.split_loss(params, split)
        if self.reads_back:
            count = min(limit or _DRAWN, len(self.examples(split)))
            for guidance in _GUIDANCE:
                name = f"right_guidance_{guidance:g}"
                share = self.right(params, split, count, guidance=guidance)
                found |= {name: share.value, **share.bounds(name)}
            found["pictures"] = count
        return found

    def right(self, params: Any, split: str, count: int, **options: Any) -> Interval:
        """Returns the share of the first captions of a split whose pictures show what they say.

        Its interval is a bootstrap over captions, pictures of one caption drawn together.
        """
        texts = [example["caption"] for example in self.examples(split, count)]
        drawn = self.draw(params, texts, **options)
        shown = [scenes.shows(x, text) for x, text in zip(drawn, texts, strict=True)]
        return ratio(shown, np.ones(len(texts)), texts)

    def baselines(self, split: str) -> dict[str, float]:
        """Returns scores of what reads no words, and of what draws nothing.

        ``linear_mse`` is the error of the best model that is linear in the noisy picture, where a picture has
        at most 3,072 numbers. ``nearest_right``, where pictures can be read back, is the share of captions
        that are shown by the picture of the training caption with the most similar words.
        """
        data, found = self.config.data, {}
        # A covariance has the square of a picture's numbers, and its axes take the cube in time:
        # 75 MB at 32 by 32 pixels, 19 GB at 128 by 128.
        if 3 * data.height * data.width <= _LARGEST:
            found["linear_mse"] = self._linear_error(split)
        if self.reads_back:
            found["nearest_right"] = self._copied_right(split)
        return found

    def _linear_error(self, split: str) -> float:
        train = self.examples("train", _FITTED)
        pictures = [self.features["image"].prepare(each["image"]).ravel() for each in train]
        mean = np.mean(pictures, 0)
        variances, axes = np.linalg.eigh(np.cov(np.stack(pictures), rowvar=False))

        def linear(x: jax.Array, time: jax.Array) -> jax.Array:
            a, s = (rate[:, None] for rate in self.process.rates(time))
            along = (x.reshape(len(x), -1) - a * mean) @ axes / (a**2 * variances + s**2)
            data, noise = mean + (along * a * variances) @ axes.T, (along * s) @ axes.T
            return self.process.target(data, noise).reshape(x.shape)

        key = jax.random.split(jax.random.key(0), 3)[2]  # as in the loss
        call = jax.jit(lambda batch: self._error(linear, batch["image"], batch["valid"], key)[1])
        sums = [jax.device_get(call(batch)) for batch in self.eval_batches(split, None)]
        total = {name: sum(float(own[name]) for own in sums) for name in sums[0]}
        return total["mse"] / total["weight"]

    def _copied_right(self, split: str) -> float:
        known = [
            {"source": each["caption"], "target": each["image"]} for each in self.examples("train")
        ]
        texts = [each["caption"] for each in self.examples(split, _DRAWN)]
        copied = [pixels(self.features["image"].prepare(x)) for x in nearest(known, texts)]
        return float(
            np.mean([scenes.shows(x, text) for x, text in zip(copied, texts, strict=True)])
        )

    def draw(
        self,
        params: Any,
        texts: Sequence[str],
        *,
        seed: int = 0,
        **options: Any,
    ) -> np.ndarray:
        """Draws a picture of each text, uint8 [n H W 3]; for ``options`` see ``drawer``."""
        drawer, size = self.drawer(params, **options), self.config.evaluate.batch_size
        found = []
        for start in range(0, len(texts), size):
            own = list(texts[start : start + size])
            x = drawer(own + [own[-1]] * (size - len(own) if start else 0), seed + start)
            found.append(x[: len(own)])
        return pixels(np.concatenate(found))

    def drawer(
        self,
        params: Any,
        *,
        guidance: float | None = None,
        sampler: str | None = None,
        steps: int | None = None,
        return_path: bool = False,
    ) -> Callable[[Sequence[str], int], Any]:
        """Returns a function from texts and a seed to pictures [n H W 3], -1 to 1, as ``diffusion.sample``.

        Args:
          params: of the model.
          guidance, sampler, steps: None is the config's.
          return_path: also return the pictures before each step, their times, and the attention of each step
            [steps L n N P S] of patches to tokens.
        """
        usual = self.config.evaluate
        scale = usual.guidance if guidance is None else guidance
        way = SAMPLERS[sampler or usual.sampler](steps or usual.steps)

        def draw(params: Any, tokens: Any, segments: Any, key: Any) -> Any:
            model = self.bind(params)
            read, unread = model.read(tokens, segments), model.read(tokens, segments * 0)
            predict = diffusion.guided(
                lambda x, time: model.denoise(x, time, read),
                lambda x, time: model.denoise(x, time, unread),
                scale,
            )
            noise_key, key = jax.random.split(key)
            data = self.config.data
            noise = jax.random.normal(noise_key, (len(tokens), data.height, data.width, 3))
            given: dict[str, Any] = dict(process=self.process, sampler=way)
            found = diffusion.sample(predict, noise, key, **given, return_path=return_path)
            if not return_path:
                return found
            x, path, times = found

            def weigh(_: None, step: Any) -> tuple[None, Any]:
                time = jnp.full(len(tokens), step[1])
                return None, model.denoise(step[0], time, read, return_weights=True)[1]

            return x, path, times, jax.lax.scan(weigh, None, (path, times))[1]

        call = jax.jit(draw)

        def drawn(texts: Sequence[str], seed: int) -> Any:
            batch = self.seen(self.captions(texts))
            given = batch["caption"], batch["caption_segment_ids"]
            return jax.device_get(call(params, *given, jax.random.key(seed)))

        return drawn

    @cached_property
    def words(self) -> frozenset[str]:
        """The words of the training captions, which a run keeps with its tokenizer."""
        kept = None if self.assets is None else self.assets / _WORDS
        if kept is not None and kept.exists():
            return frozenset(json.loads(kept.read_bytes()))
        texts = (example["caption"] for example in self.examples("train"))
        return frozenset(word for text in texts for word in text.lower().split())

    def save_assets(self, directory: Path) -> None:
        """Writes the tokenizer, and the words of the training captions."""
        super().save_assets(directory)
        write_whole(directory / _WORDS, json.dumps(sorted(self.words), ensure_ascii=False) + "\n")

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        side = self.config.model.patch_size
        return self.config.data.height // side, self.config.data.width // side

    def check_sampler(self, name: str | None) -> None:
        """Raises SettingsError for a sampler that the process of the run does not fit."""
        if name == "euler" and self.config.loss.process == "ddpm":
            raise SettingsError(_NO_VELOCITY)

    def refuse_unknown(self, text: str) -> None:
        """Raises DataError for an empty text, words that training lacks, and a text that is too long."""
        words = text.lower().split()
        if not words:
            raise DataError(
                "the text is empty; expected a caption, such as those of the training data"
            )
        if unknown := [word for word in words if word not in self.words]:
            some = sorted(self.words)
            more = ", ..." if len(some) > _NAMED else ""
            raise DataError(
                f"the text has {unknown[0][:_LONGEST]!r}, which no training caption has; expected of their "
                f"words: {', '.join(some[:_NAMED])}{more}"
            )
        tokens, most = self.features["caption"].lengths([text])[0], self.config.data.text_len
        if tokens > most:
            raise DataError(
                f"the text has {tokens} tokens; the run reads {most} at most, so cut it"
            )

    def decoded(self, ids: Sequence[int]) -> str:
        """Returns the text of tokens."""
        return self.corpus.tokenizer.decode(list(ids))

    def captions(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """Returns the arrays of captions."""
        feature = self.features["caption"]
        ids = np.zeros((len(texts), self.config.data.text_len), np.int32)
        segments = np.zeros_like(ids)
        for row, own in enumerate(feature.prepare_many(texts)[0]):
            ids[row, : len(own)], segments[row, : len(own)] = own, 1
        return {"caption": ids, "caption_segment_ids": segments}


def _reads_back(data: Any) -> bool:
    return data.name == "shapes/scenes" and data.height == data.width == scenes.SIDE


def pixels(pictures: np.ndarray) -> np.ndarray:
    """Returns pictures of values from -1 to 1 as uint8; values beyond are cut."""
    return np.rint(np.clip(np.asarray(pictures, np.float32) / 2 + 0.5, 0, 1) * 255).astype(np.uint8)
