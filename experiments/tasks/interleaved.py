"""Interleaved pictures and captions: a language model that reads pictures learns from examples in its row.

A row is ``<s> <image> caption </s> <image> caption </s> ...``. A model whose ``hidden`` takes no ``images``
learns the text alone. An image takes ``image_tokens`` places of the row, a property of the model's config; 1
without one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossattn import models
from crossattn.data.examples import FeatureExamples
from crossattn.data.features import Image, Text
from crossattn.data.packing import Layout
from crossattn.data.sources import MappedSource
from crossattn.data.tokenizers import BOS, PAD, UNK
from crossattn.decode.config import right_aligned
from crossattn.train.evaluate import translation_scores
from crossattn.train.sharding import mesh_of, rows_on, spread_batch
from crossattn.types import Count
from experiments.errors import SettingsError
from experiments.settings import model_config
from experiments.tasks import base, protocols, sections
from experiments.tasks.augmentation import augmented_as
from experiments.tasks.ngrams import trigrams
from experiments.tasks.texts import token_loss

IMAGE = UNK
"""The token of an image. No text has it, because tokenizers fall back on bytes."""

SHOTS = (0, 2, 4)
"""Numbers of examples before the captions that ``report`` scores."""

_SAMPLED = 4  # rows that ``samples`` shows


@dataclass(frozen=True, kw_only=True)
class InterleavedData(sections.Pictures, sections.Data):
    """Pictures with captions, several a row.

    Attributes:
      examples: pictures with captions in a row.
      text_len: the most tokens of a caption, its end included.
    """

    examples: Count
    text_len: sections.Length


class InterleavedTask(base.Task):
    """A ``Flamingo`` or a ``Llava``, or a ``Decoder`` that reads no picture, and captioned pictures.

    ``nll_shuffled`` is the loss where every row has the pictures of another.
    """

    sections = {
        "data": InterleavedData,
        "tokenizer": sections.Tokenizer,
        "loss": sections.CrossEntropy,
    }
    gives = ("vocab_size", "max_length", "image_size")
    metrics = ("loss", "nll", "nll_shuffled")
    headline = ("nll", "min")
    tokenizes = True
    languages: tuple[str, ...] = ()

    @property
    def memory(self) -> tuple[str, ...]:
        """The pictures, if the model reads any."""
        return ("images",) if self._sees else ()

    def corpus_options(self) -> dict[str, Any]:
        return dict(side="caption", whole=True)

    @classmethod
    def check(cls, config: Any) -> None:
        """Raises SettingsError also where ``loss.chunks`` does not divide the length of rows."""
        super().check(config)
        length = config.data.examples * (config.data.text_len + _image_tokens(config))
        if length % config.loss.chunks:
            raise SettingsError(
                f"config.loss.chunks is {config.loss.chunks}; expected a divisor of the length of rows, "
                f"{length}."
            )

    @classmethod
    def asks_of(cls, config: Any) -> type:
        """Returns the protocol of a model that reads pictures, or of one that does not."""
        return protocols.InterleavedModel if _sees(config) else protocols.LanguageModel

    def refuse_unready(self) -> None:
        """Raises DataError where examples have no picture or no caption."""
        self.corpus.refuse_lacking("image", "caption")

    @cached_property
    def _sees(self) -> bool:
        return _sees(self.config)

    @cached_property
    def _image_tokens(self) -> int:
        return _image_tokens(self.config)

    def sizes(self) -> dict[str, Any]:
        data = self.config.data
        sizes: dict[str, Any] = dict(
            vocab_size=self.corpus.tokenizer.vocab_size,
            max_length=data.examples * (data.text_len + self._image_tokens),
        )
        return sizes | (dict(image_size=(data.height, data.width)) if self._sees else {})

    def loss(self, params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, base.Sums]:
        model, told = self.bind(params), batch["shots"] >= 0
        if self._sees:
            batch = batch | {"images": augmented_as(self.config.data, batch["images"], key)}
        hidden = self._hidden(model, batch, key)
        loss, sums = token_loss(model, hidden, batch["target_out"], told, self.config.loss)
        if key is None:
            shuffled = self._shuffled_nll(model, batch) if self._sees else sums["nll"]
            sums |= {"nll_shuffled": shuffled}
        return loss, sums

    def _hidden(self, model: Any, batch: Any, key: Any = None) -> jax.Array:
        batch = self.seen(batch)
        given = {name: batch[name] for name in ("images", "image_positions") if self._sees}
        return model.hidden(
            batch["target_in"], segment_ids=batch["target_segment_ids"], **given, key=key
        )

    def _shuffled_nll(self, model: Any, batch: Any) -> jax.Array:
        others = batch | {"images": jnp.roll(batch["images"], 1, axis=0)}
        nll = _nll(model, self._hidden(model, others), batch)
        return jnp.where(batch["shots"] >= 0, nll, 0).sum()

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        scores = super().scores(sums)
        return {name: scores[name] for name in self.metrics}

    def baselines(self, split: str) -> dict[str, float]:
        """Returns the nats per token of trigrams counted in captions."""
        return trigrams(self, split, lambda batch: batch["shots"] + 1)

    @cached_property
    def features(self) -> dict[str, Any]:
        """The features of a picture, "source", and of its caption, "target"."""
        data = self.config.data
        return {
            "source": Image(data.height, data.width, unreadable=data.get("unreadable", "refuse")),
            "target": Text(self.corpus.tokenizer, data.text_len),
        }

    @property
    def _one_a_row(self) -> dict[str, Any]:
        return {"image": self.features["source"], "caption": self.features["target"]}

    def batch_shapes(self, multiple: int) -> dict[str, jax.ShapeDtypeStruct]:
        data = self.config.data
        alone = base.feature_batch(self._one_a_row, data.batch_size * data.examples)
        return base.shapes_of(interleaved(alone, data.examples, self._image_tokens))

    def train_iterator(self, shard_index: int, shard_count: int) -> "InterleavedBatches":
        data = self.config.data
        batches = self.train_batches(
            self.examples("train"),
            self._one_a_row,
            (shard_index, shard_count),
            batch_size=data.batch_size * data.examples,
            batch_multiple=data.examples,
        )
        return InterleavedBatches(batches, data.examples, self._image_tokens)

    def eval_batches(self, split: str, mesh: Any) -> Iterable[Mapping[str, np.ndarray]]:
        examples, count = self._shuffled(split), self.config.data.examples
        size = rows_on(mesh, self.config.data.batch_size) * count
        for first in range(0, len(examples), size):
            chosen = [examples[i] for i in range(len(examples))[first : first + size]]
            chosen += [None] * (size - len(chosen))
            yield interleaved(self._batch(chosen), count, self._image_tokens)

    def _shuffled(self, split: str) -> Sequence[Any]:
        """Returns the examples of a split in one random order, which says nothing about their lengths."""
        examples = self.examples(split)
        order = np.random.default_rng(0).permutation(len(examples)).tolist()
        return MappedSource(order, lambda index: examples[index])

    def _batch(self, examples: Sequence[Any]) -> dict[str, np.ndarray]:
        """Returns a batch with an example, or None, in each row."""
        rows = np.array([row for row, each in enumerate(examples) if each is not None], np.int64)
        prepared = FeatureExamples([examples[row] for row in rows], self._one_a_row, "cut")
        numbers, zeros = np.arange(len(rows)), np.zeros(len(rows), np.int64)
        starts = dict.fromkeys(prepared.widths, zeros)
        return prepared.fill(
            Layout(len(examples), prepared.widths, numbers, rows, starts, zeros + 1)
        )

    def report(self, params: Any, split: str, *, limit: int | None = None) -> dict[str, Any]:
        """Returns the losses of a split, and scores of its captions after 0, 2 and 4 examples.

        Every caption is the last of a row once, after K others with their pictures: ``nll_K_shot`` is its
        loss, ``nll_K_shot_shuffled`` the loss with another picture in place of its own, ``chrf_K_shot`` and
        ``bleu_K_shot`` score greedy captions.
        """
        results: dict[str, Any] = self.split_loss(params, split)
        own = jax.jit(self._last_nll)
        for count in [count for count in SHOTS if count < self.config.data.examples]:
            total: dict[str, float] = {}
            for batch in self._shots(split, count, mesh_of(params), limit):
                sums = jax.device_get(own(params, spread_batch(batch, mesh_of(params)), count))
                total = {name: total.get(name, 0.0) + float(x) for name, x in sums.items()}
            weight = total.pop("weight")
            results |= {name.format(count): x / weight for name, x in total.items()}
            said, right = self.texts(params, split, count, limit)
            scores = translation_scores(said, right)
            results |= {f"{name}_{count}_shot": scores[name] for name in ("chrf", "bleu")}
        return results

    def _shots(
        self, split: str, count: int, mesh: Any, limit: int | None
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yields rows whose last caption, after ``count`` others, is each of the first ``limit`` once.

        ``others`` are the images with another's in the last place. Rows are as long as those of training,
        so that one program serves every count.
        """
        examples, width = self._shuffled(split), self.config.data.examples
        size = rows_on(mesh, self.config.data.batch_size)

        def row(last: int, shown: int) -> list[Any]:
            chosen = [*range(last - count, last), shown]
            found: list[Any] = [examples[i % len(examples)] for i in chosen]
            return found + [None] * (width - len(found))

        every = range(len(examples))[:limit]
        for first in every[::size]:
            rows = every[first : first + size]
            empty = [None] * (width * (size - len(rows)))
            own, others = (
                self._batch([x for i in rows for x in row(i, i + step)] + empty) for step in (0, 1)
            )
            batch = interleaved(own, width, self._image_tokens)
            yield batch | {"others": others["image"].reshape(batch["images"].shape)}

    def _last_nll(self, params: Any, batch: Any, count: Any) -> base.Sums:
        """Returns summed losses of the captions after ``count`` others, with their and another's picture."""
        model, last = self.bind(params), batch["shots"] == count
        sums = {"weight": last.sum()}
        for name, images in (("nll_{}_shot", "images"), ("nll_{}_shot_shuffled", "others")):
            nll = _nll(model, self._hidden(model, batch | {"images": batch[images]}), batch)
            sums[name] = jnp.where(last, nll, 0).sum()
        return sums

    def texts(
        self, params: Any, split: str, count: int, limit: int | None = None
    ) -> tuple[list[str], list[str]]:
        """Returns captions written after so many examples, and the references."""
        data, tokenizer, mesh = self.config.data, self.corpus.tokenizer, mesh_of(params)
        width = 1 + data.examples * (data.text_len + self._image_tokens) - data.text_len
        write, said = self._writer(params, 1), []
        for batch in self._shots(split, count, mesh, limit):
            ends = batch["image_positions"][:, count] + self._image_tokens
            rows = zip(batch["target_in"], ends, strict=True)
            prompts = [row[: max(1, end)].tolist() for row, end in rows]
            given = {name: batch[name] for name in ("images", "image_positions")}
            given["prefix"], given["prefix_lengths"] = right_aligned(prompts, width)
            tokens = write(**spread_batch(given, mesh)).tolist()
            real = batch["image_positions"][:, count] >= 0
            said += [tokenizer.decode(tokens[row]) for row in np.flatnonzero(real)]
        examples = self._shuffled(split)
        return said, [examples[i]["caption"] for i in range(len(examples))[:limit]]

    def samples(self, params: Any, split: str) -> Sequence[str]:
        """Returns captions without examples, captions after as many as rows have, and the references."""
        if not self._sees:
            return ()
        alone, right = self.texts(params, split, 0, _SAMPLED)
        told, _ = self.texts(params, split, self.config.data.examples - 1, _SAMPLED)
        return [" | ".join(each) for each in zip(alone, told, right, strict=True)]

    # Methods that ``experiments.caption`` calls.

    def prompt_in(self, language: str | None) -> list[int]:
        """Returns the prompt of a caption without examples: the start, and the image."""
        return [BOS] + [IMAGE] * self._image_tokens

    def decoded(self, ids: list[int]) -> str:
        """Returns the text of tokens."""
        return self.corpus.tokenizer.decode(ids)

    def writer(self, params: Any, num_beams: int | None = None) -> Callable[[Any, Any], np.ndarray]:
        """Returns a function from pictures [B H W C] and prompts [B P] to the tokens of captions [B T].

        Raises:
          SettingsError: the model reads no pictures.
        """
        if not self._sees:
            raise SettingsError(
                f"config.model.name is {self.config.model.name!r}, which reads no pictures; name a run of a "
                "model that does."
            )
        write = self._writer(params, num_beams or 1)
        return lambda source, prefix: write(
            **_alone(source), prefix=prefix, prefix_lengths=np.full(len(prefix), prefix.shape[1])
        )

    def read_weights(self, params: Any) -> Callable[[Any, Any], np.ndarray]:
        """Returns a function from pictures [B H W C] and tokens [B T] to weights of patches [B T-1 h w].

        They are the model's ``patch_weights``; row t belongs to the step that predicts token t+1.
        """
        call = jax.jit(
            lambda p, tokens, given: self.bind(p).patch_weights(tokens, **given)[:, :, 0]
        )
        return lambda source, tokens: np.asarray(call(params, tokens[:, :-1], _alone(source)))

    def _writer(self, params: Any, num_beams: int) -> Callable[..., np.ndarray]:
        """Returns a function from images, their positions and prompts to the best tokens of rows [B T]."""
        most = self.config.data.text_len
        call = self.generator(params, num_beams=num_beams, max_new_tokens=most)

        def write(images: Any, image_positions: Any, **prompt: Any) -> np.ndarray:
            given = dict(images=images, image_positions=image_positions) if self._sees else {}
            return call(inputs=self.seen(given), **prompt)

        return write


class InterleavedBatches:
    """Batches of rows with several examples each, made of batches with one."""

    def __init__(self, batches: Any, examples: int, image_tokens: int):
        self._batches, self._examples, self._image_tokens = batches, examples, image_tokens
        self.examples = batches.examples

    def __next__(self) -> dict[str, np.ndarray]:
        return interleaved(next(self._batches), self._examples, self._image_tokens)

    def get_state(self) -> Any:
        """Returns the position in the data."""
        return self._batches.get_state()

    def set_state(self, state: Any) -> None:
        """Continues from a position in the data."""
        self._batches.set_state(state)

    def close(self) -> None:
        """Stops the prefetching thread."""
        self._batches.close()


def interleaved(
    batch: Mapping[str, np.ndarray], examples: int, image_tokens: int = 1
) -> dict[str, np.ndarray]:
    """Makes rows ``<s> <image> caption </s> <image> ...`` of so many examples each.

    Args:
      batch: "image" and "caption" of one example a row.
      examples: of a row.
      image_tokens: repetitions of ``<image>``.

    Returns:
      ``target_in``, ``target_out``, ``target_segment_ids`` and ``shots`` [rows T], the index of the example
      whose caption has this token of ``target_out``, -1 for other tokens; ``images`` [rows examples H W C],
      and ``image_positions`` [rows examples], the place of its first token, -1 for no image.
    """
    captions, here = batch["caption"], batch["valid"] > 0
    rows, length = len(captions) // examples, captions.shape[1]
    tokens = np.full((rows, examples * (length + image_tokens) + 1), PAD, np.int32)
    shots = np.full_like(tokens, -1)
    positions = np.full((rows, examples), -1, np.int32)
    real = (batch["caption_segment_ids"] > 0).sum(-1) * here
    for row in range(rows):
        tokens[row, 0], end = BOS, 1
        for example in range(examples):
            index = row * examples + example
            if not here[index]:
                continue
            count, first = real[index], end + image_tokens
            tokens[row, end:first] = IMAGE
            tokens[row, first : first + count] = captions[index, :count]
            shots[row, first : first + count] = example
            positions[row, example], end = end, first + count
    images = batch["image"]
    return {
        "target_in": tokens[:, :-1],
        "target_out": tokens[:, 1:],
        "target_segment_ids": (tokens[:, :-1] != PAD).astype(np.int32),
        "shots": shots[:, 1:],
        "images": images.reshape(rows, examples, *images.shape[1:]),
        "image_positions": positions,
    }


def _alone(source: Any) -> dict[str, Any]:
    """Returns inputs with one picture of [B H W C] after the start of each row."""
    return dict(images=source[:, None], image_positions=np.ones((len(source), 1), np.int32))


def _sees(config: Any) -> bool:
    module = models.find(config.model.name).module
    return not protocols.lacking(module, protocols.InterleavedModel)


def _image_tokens(config: Any) -> int:
    """Returns the places of an image; raises SettingsError where pictures are smaller than a patch."""
    if not _sees(config):
        return 1
    size = (config.data.height, config.data.width)
    own = model_config(config.model, vocab_size=1, max_length=1, image_size=size)
    try:
        return getattr(own, "image_tokens", 1)
    except ValueError as error:
        raise SettingsError(f"config.model: {error}") from None


def _nll(model: Any, hidden: jax.Array, batch: Any) -> jax.Array:
    log_p = jax.nn.log_softmax(model.logits(hidden))
    return -jnp.take_along_axis(log_p, batch["target_out"][..., None], axis=-1)[..., 0]
