"""Captions after their pictures, several in a row: what a language model that reads images learns.

A row is ``<s> <image> caption </s> <image> caption </s> ...``, so that a caption is
told with those before it as examples. A model whose ``hidden`` takes no ``images`` learns the text alone; one
that takes them may begin with what it has learnt. ``image_tokens`` of its config is how many places an image
takes in the text, 1 where it has none such.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossattn import decode, models
from crossattn.data.errors import DataError
from crossattn.data.examples import FeatureExamples
from crossattn.data.features import Image, Text
from crossattn.data.packing import Layout
from crossattn.data.sources import MappedSource
from crossattn.data.tokenizers import BOS, PAD, UNK
from crossattn.decode.config import right_aligned
from crossattn.train.evaluate import translation_scores
from crossattn.train.sharding import everywhere, mesh_of, rows_on, spread_batch
from crossattn.train.storage import Folder
from crossattn.types import Count
from experiments.errors import SettingsError
from experiments.settings import model_config
from experiments.tasks import base, protocols, sections
from experiments.tasks.augmentation import augmented
from experiments.tasks.corpus import Corpus, UnreadCorpus
from experiments.tasks.ngrams import targets, trigrams
from experiments.tasks.texts import token_loss

IMAGE = UNK
"""The token that stands for an image: no text has it, for tokenizers fall back on bytes."""

SHOTS = (0, 2, 4)
"""Numbers of examples before a caption after which ``report`` scores it."""

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
    """The next token of captions, by a ``Flamingo`` or by a ``Decoder`` that sees no picture.

    Besides the loss of all captions, ``nll_shuffled`` is that where every row has another's pictures.
    """

    sections = {
        "data": InterleavedData,
        "tokenizer": sections.Tokenizer,
        "loss": sections.CrossEntropy,
    }
    gives = ("vocab_size", "max_length", "image_size")
    metrics = ("loss", "nll", "nll_shuffled")
    headline = ("nll", "min")
    languages: tuple[str, ...] = ()

    def __init__(self, config: Any, assets: Folder | None = None):
        super().__init__(config, assets)
        self._corpus = Corpus(config, assets, side="caption", whole=True)

    @classmethod
    def check(cls, config: Any) -> None:
        """Beside what every task holds: the loss cuts the length of rows.

        Raises:
          SettingsError: ``loss.chunks`` does not divide it.
        """
        super().check(config)
        length = config.data.examples * (config.data.text_len + _image_tokens(config))
        if length % config.loss.chunks:
            raise SettingsError(
                f"config.loss.chunks is {config.loss.chunks}; expected a divisor of the length of rows, "
                f"{length}."
            )

    @classmethod
    def asks_of(cls, config: Any) -> type:
        """By whether the model reads pictures."""
        return protocols.InterleavedModel if _sees(config) else protocols.LanguageModel

    def refuse_unready(self) -> None:
        """Raises DataError where examples have no picture or no caption."""
        examples = self._corpus.split("validation")
        if missing := [name for name in ("image", "caption") if name not in examples[0]]:
            raise DataError(
                f"examples of {self.config.data.name} hold {', '.join(examples[0])}; this task reads "
                f"{missing[0]!r}"
            )

    @cached_property
    def _sees(self) -> bool:
        return _sees(self.config)

    @cached_property
    def _image_tokens(self) -> int:
        return _image_tokens(self.config)

    def sizes(self) -> dict[str, Any]:
        data = self.config.data
        sizes: dict[str, Any] = dict(
            vocab_size=self._corpus.tokenizer.vocab_size,
            max_length=data.examples * (data.text_len + self._image_tokens),
        )
        return sizes | (dict(image_size=(data.height, data.width)) if self._sees else {})

    def loss(self, params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, base.Sums]:
        model, told = self.bind(params), batch["shots"] >= 0
        if key is not None and self._sees:
            batch = batch | {"images": self._augmented(batch["images"], jax.random.fold_in(key, 1))}
        hidden = self._hidden(model, batch, key)
        loss, sums = token_loss(model, hidden, batch["target_out"], told, self.config.loss)
        if key is None:
            shuffled = self._shuffled_nll(model, batch) if self._sees else sums["nll"]
            sums |= {"nll_shuffled": shuffled}
        return loss, sums

    def _augmented(self, images: jax.Array, key: jax.Array) -> jax.Array:
        """Pictures [B I H W C], each changed by itself."""
        data, pictures = self.config.data, images.reshape(-1, *images.shape[2:])
        chosen = dict(flip=data.get("flip", False), shift=data.get("shift", 0))
        return augmented(pictures, key, **chosen).reshape(images.shape)

    def _hidden(self, model: Any, batch: Any, key: Any = None) -> jax.Array:
        given = {name: batch[name] for name in ("images", "image_positions") if self._sees}
        return model.hidden(
            batch["target_in"], segment_ids=batch["target_segment_ids"], **given, key=key
        )

    def _shuffled_nll(self, model: Any, batch: Any) -> jax.Array:
        """The summed loss of captions with the pictures of another row."""
        others = batch | {"images": jnp.roll(batch["images"], 1, axis=0)}
        nll = _nll(model, self._hidden(model, others), batch)
        return jnp.where(batch["shots"] >= 0, nll, 0).sum()

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        scores = super().scores(sums)
        return {name: scores[name] for name in self.metrics}

    def baselines(self, split: str) -> dict[str, float]:
        """Nats a token of trigrams counted in captions, which see no picture."""
        train, other = (
            list(targets(map(_captions_alone, self.eval_batches(name, None)), "caption"))
            for name in ("train", split)
        )
        return {"trigrams_nll": trigrams(train, other)}

    @cached_property
    def features(self) -> dict[str, Any]:
        """Features of a picture, "source", and of its caption, "target"."""
        data = self.config.data
        return {
            "source": Image(data.height, data.width, unreadable=data.get("unreadable", "refuse")),
            "target": Text(self._corpus.tokenizer, data.text_len),
        }

    @property
    def _one_a_row(self) -> dict[str, Any]:
        return {"image": self.features["source"], "caption": self.features["target"]}

    def without_data(self) -> "InterleavedTask":
        self._corpus: Any = UnreadCorpus(self.config)
        return self

    def batch_shapes(self, multiple: int) -> dict[str, jax.ShapeDtypeStruct]:
        data = self.config.data
        alone = base.feature_batch(self._one_a_row, data.batch_size * data.examples)
        return base.shapes_of(interleaved(alone, data.examples, self._image_tokens))

    def train_iterator(self, shard_index: int, shard_count: int) -> "InterleavedBatches":
        data = self.config.data
        batches = self.train_batches(
            self._corpus.split("train"),
            self._one_a_row,
            (shard_index, shard_count),
            mode="pad",
            batch_size=data.batch_size * data.examples,
            truncation="cut",
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
        """The examples of a split, always in the same order.

        Not by length, as other tasks have them: examples would say how long the caption is.
        """
        examples = self._corpus.split(split)
        order = np.random.default_rng(0).permutation(len(examples)).tolist()
        return MappedSource(order, lambda index: examples[index])

    def _batch(self, examples: Sequence[Any]) -> dict[str, np.ndarray]:
        """Examples, one a row; None is a row of nothing."""
        rows = np.array([row for row, each in enumerate(examples) if each is not None], np.int64)
        prepared = FeatureExamples([examples[row] for row in rows], self._one_a_row, "cut")
        numbers, zeros = np.arange(len(rows)), np.zeros(len(rows), np.int64)
        starts = dict.fromkeys(prepared.widths, zeros)
        return prepared.fill(
            Layout(len(examples), prepared.widths, numbers, rows, starts, zeros + 1)
        )

    # Every caption of a split once, after as many examples as is asked for.

    def report(self, params: Any, split: str, *, limit: int | None = None) -> dict[str, Any]:
        """The losses of a split; and, of the same captions after 0, 2 and 4 examples, more.

        Every caption of the split is the last of a row once, after K others with their pictures:
        ``nll_K_shot`` is its loss, ``nll_K_shot_shuffled`` that with another's picture in place of its
        own, and ``chrf_K_shot`` and ``bleu_K_shot`` are of what is written greedily.
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
        """Rows whose last caption is each of the split, or of its first, after ``count`` others.

        Beside what ``interleaved`` gives, ``others``: the images where the last is another caption's.
        All rows have room for as many as those of training, so that one program serves every count.
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
        """Sums of the losses of the captions with ``count`` before them, with their picture and another's."""
        model, last = self.bind(params), batch["shots"] == count
        sums = {"weight": last.sum()}
        for name, images in (("nll_{}_shot", "images"), ("nll_{}_shot_shuffled", "others")):
            nll = _nll(model, self._hidden(model, batch | {"images": batch[images]}), batch)
            sums[name] = jnp.where(last, nll, 0).sum()
        return sums

    def texts(
        self, params: Any, split: str, count: int, limit: int | None = None
    ) -> tuple[list[str], list[str]]:
        """Captions written after so many examples, and the right ones, of pictures of a split in order."""
        data, tokenizer, mesh = self.config.data, self._corpus.tokenizer, mesh_of(params)
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
        """Captions of pictures, after no example and after as many as rows have; then the right ones."""
        if not self._sees:
            return ()
        alone, right = self.texts(params, split, 0, _SAMPLED)
        told, _ = self.texts(params, split, self.config.data.examples - 1, _SAMPLED)
        return [" | ".join(each) for each in zip(alone, told, right, strict=True)]

    # What ``experiments.caption`` asks of a task.

    def prompt_in(self, language: str | None) -> list[int]:
        """Prompt that captions a picture without examples: the start, and the image."""
        return [BOS] + [IMAGE] * self._image_tokens

    def decoded(self, ids: list[int]) -> str:
        """The text of tokens."""
        return self._corpus.tokenizer.decode(ids)

    def writer(self, params: Any, num_beams: int | None = None) -> Callable[[Any, Any], np.ndarray]:
        """(pictures [B H W C], prompts [B P]) -> tokens of the caption of each [B T].

        Raises:
          SettingsError: the model sees no pictures.
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
        """(pictures [B H W C], tokens [B T]) -> what each token but the first read of patches [B T-1 h w].

        Row t is of the step that predicts token t+1; how it is told from a model is its ``patch_weights``.
        """
        call = jax.jit(
            lambda p, tokens, given: self.bind(p).patch_weights(tokens, **given)[:, :, 0]
        )
        return lambda source, tokens: np.asarray(call(params, tokens[:, :-1], _alone(source)))

    def _writer(self, params: Any, num_beams: int) -> Callable[..., np.ndarray]:
        """(images, image_positions, prefix, prefix_lengths) -> tokens of the best text of each row [B T]."""

        def search(p: Any, images: Any, image_positions: Any, **prompt: Any) -> Any:
            given = dict(images=images, image_positions=image_positions) if self._sees else {}
            return decode.generate(
                self.bind(p),
                inputs=given,
                batch=len(images),
                num_beams=num_beams,
                max_new_tokens=self.config.data.text_len,
                **prompt,
            ).tokens[:, 0]

        call = jax.jit(search, out_shardings=everywhere(mesh_of(params)))
        return lambda **given: np.asarray(call(params, **given))

    def save_assets(self, directory: Path) -> None:
        self._corpus.save(directory)


class InterleavedBatches:
    """Batches of examples as rows of several; its state is theirs."""

    def __init__(self, batches: Any, examples: int, image_tokens: int):
        self._batches, self._examples, self._image_tokens = batches, examples, image_tokens
        self.examples = batches.examples

    def __next__(self) -> dict[str, np.ndarray]:
        return interleaved(next(self._batches), self._examples, self._image_tokens)

    def get_state(self) -> Any:
        """Where the examples stand."""
        return self._batches.get_state()

    def set_state(self, state: Any) -> None:
        """Continues from there."""
        self._batches.set_state(state)

    def close(self) -> None:
        """Stops the prefetching thread."""
        self._batches.close()


def interleaved(
    batch: Mapping[str, np.ndarray], examples: int, image_tokens: int = 1
) -> dict[str, np.ndarray]:
    """Rows ``<s> <image> caption </s> <image> ...`` of so many examples each, of a batch with one a row.

    ``<image>`` stands there ``image_tokens`` times.

    Returns:
      ``target_in``, ``target_out``, ``target_segment_ids`` and ``shots`` [rows T], the number of the example
      whose caption a token of ``target_out`` belongs to, -1 where it belongs to none; ``images`` [rows
      examples H W C], and ``image_positions`` [rows examples], of the first of its tokens, -1 where there is
      none.
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
    """Inputs of pictures [B H W C] that stand behind the start, one a row."""
    return dict(images=source[:, None], image_positions=np.ones((len(source), 1), np.int32))


def _captions_alone(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The targets of a batch, and the number of the caption that each is of, from 1."""
    return {"target_out": batch["target_out"], "caption": batch["shots"] + 1}


def _sees(config: Any) -> bool:
    """Whether the model of a config reads pictures."""
    module = models.find(config.model.name).module
    return not protocols.lacking(module, protocols.InterleavedModel)


def _image_tokens(config: Any) -> int:
    """How many places an image takes in the rows of a config.

    Raises:
      SettingsError: pictures are too small for the model.
    """
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
