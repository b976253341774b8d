"""Interleaved pictures and captions: a language model that reads pictures learns from examples in its row.

A row is ``<s> <image> caption </s> <image> caption </s> ...``. A model whose ``hidden`` takes no ``images``
learns the text alone. An image takes ``image_tokens`` places of the row, a property of the model's config; 1
without one. With ``config.data.together``, the examples of a row share a value that the model is not told.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossattn import models
from crossattn.data.features import Image, Images, Interleaved, Text
from crossattn.data.features.interleaved import IMAGE
from crossattn.data.pipeline import EvalBatches
from crossattn.data.sources import MappedSource
from crossattn.data.tokenizers import BOS
from crossattn.decode.config import right_aligned
from crossattn.train.evaluate import translation_scores
from crossattn.train.sharding import mesh_of, spread_batch
from crossattn.types import Count
from experiments.errors import SettingsError
from experiments.settings import model_config
from experiments.tasks import base, protocols, readers, sections
from experiments.tasks.augmentation import augmented_as
from experiments.tasks.ngrams import surprises
from experiments.tasks.shots import Rows
from experiments.tasks.texts import token_loss

SHOTS = (0, 2, 4)
"""Numbers of examples before the captions that ``report`` scores."""

_SAMPLED = 4  # rows that ``samples`` shows


@dataclass(frozen=True, kw_only=True)
class InterleavedData(sections.Pictures, sections.Data):
    """Pictures with captions, several a row.

    Attributes:
      examples: pictures with captions in a row.
      text_len: the most tokens of a caption, its end included.
      together: value of examples that those of a row have in common, such as language; None is none.
    """

    examples: Count
    text_len: sections.Length
    together: str | None = None


class InterleavedTask(base.Task):
    """A ``Flamingo`` or a ``Llava``, or a ``Decoder`` that reads no picture, and captioned pictures."""

    sections = {
        "data": InterleavedData,
        "tokenizer": sections.Tokenizer,
        "loss": sections.CrossEntropy,
    }
    gives = ("vocab_size", "max_length", "image_size")
    metrics = ("loss", "nll")
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
    def asks_of(cls, config: Any) -> tuple[type, ...]:
        """Returns the protocol of a model that reads pictures, or of one that does not."""
        return (protocols.InterleavedModel if _sees(config) else protocols.LanguageModel,)

    def refuse_unready(self) -> None:
        """Raises DataError where examples have no picture, no caption, or nothing in common."""
        together = self.config.data.get("together")
        self.corpus.refuse_lacking("image", "caption", *([together] if together else []))

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
        return token_loss(model, hidden, batch["target_out"], told, self.config.loss)

    def _hidden(self, model: Any, batch: Any, key: Any = None) -> jax.Array:
        batch = self.seen(batch)
        given = {name: batch[name] for name in ("images", "image_positions") if self._sees}
        return model.hidden(
            batch["target_in"], segment_ids=batch["target_segment_ids"], **given, key=key
        )

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        scores = super().scores(sums)
        return {name: scores[name] for name in self.metrics}

    def baselines(self, split: str) -> dict[str, float]:
        """Returns the nats per token of trigrams of captions, of those that see, and told what is shared."""
        seen = lambda batch, row, number: readers.thumbnail(batch["images"][row, number - 1])  # noqa: E731
        segments = lambda batch: batch["shots"] + 1  # noqa: E731
        found = readers.scores(self, split, segments, None, seen if self._sees else None)
        if not self.config.data.get("together"):
            return found
        text, told = self.features["target"], list[np.ndarray]()
        train, other = (
            [[text.prepare(each["caption"]) for each in own] for own in self.rows(x).groups()]
            for x in ("train", split)
        )
        for known, new in zip(train, other, strict=True):
            told.append(surprises(known, new, 3, self.corpus.tokenizer.vocab_size)[-1])
        return found | {"trigrams_told_nll": float(np.concatenate(told).mean())}

    @cached_property
    def features(self) -> dict[str, Any]:
        """The features of a picture, "source", and of its caption, "target"."""
        data = self.config.data
        return {
            "source": Image(data.height, data.width, unreadable=data.get("unreadable", "refuse")),
            "target": Text(self.corpus.tokenizer, data.text_len),
        }

    @property
    def _of_rows(self) -> dict[str, Any]:
        """The features of a row: its pictures, and its captions between them."""
        picture, text = self.features["source"], self.features["target"]
        count = self.config.data.examples
        return {
            "images": Images(picture, count),
            "target": Interleaved(text, count, self._image_tokens),
        }

    def batch_shapes(self, multiple: int) -> dict[str, jax.ShapeDtypeStruct]:
        return base.shapes_of(base.feature_batch(self._of_rows, self.config.data.batch_size))

    def rows(self, split: str) -> Rows:
        """Returns the examples of a split, to be put into rows."""
        if split not in self._rows:
            self._rows[split] = Rows(self.examples(split), self.config.data.get("together"))
        return self._rows[split]

    @cached_property
    def _rows(self) -> dict[str, Rows]:
        return {}

    def train_iterator(self, shard_index: int, shard_count: int) -> Any:
        rows = self.rows("train").ending(self.config.data.examples - 1, self.config.seed)
        return self.train_batches(self.prepared(rows, self._of_rows), (shard_index, shard_count))

    def evaluated(self, split: str) -> tuple[Sequence[Any], Mapping[str, Any]]:
        return self.rows(split).once(self.config.data.examples), self._of_rows

    def evaluate(self, params: Any, step: int) -> dict[str, float]:
        """Returns the losses of validation, also where rows have the pictures of others, ``nll_shuffled``."""
        found = super().evaluate(params, step)
        if self._sees:
            shuffled = self.split_loss(params, "validation", self.shuffled)
            found |= {"nll_shuffled": shuffled["nll"]}
        return found

    def report(self, params: Any, split: str, *, limit: int | None = None) -> dict[str, Any]:
        """Returns the losses of a split, and scores of its captions after 0, 2 and 4 examples.

        Every caption is the last of a row once, after K others with their pictures: ``nll_K_shot`` is its
        loss, ``nll_K_shot_shuffled`` the loss with another picture in place of its own, ``gain_K_shot`` what
        K examples take off the loss, ``chrf_K_shot`` and ``bleu_K_shot`` score greedy captions. Losses are of
        captions whose rows can be read with each K; the others are counted, ``unreadable``.
        """
        results: dict[str, Any] = self.split_loss(params, split)
        order, examples = self.order(split, limit), self.examples(split)
        own, found = jax.jit(self._last_nll), dict[str, np.ndarray]()
        read = np.ones(len(order), bool)  # with each number of examples
        for count in [count for count in SHOTS if count < self.config.data.examples]:
            told = np.zeros((len(order), 2 + self._sees))
            missing = np.ones(len(order), bool)
            for item in self._shots(split, count, mesh_of(params), limit):
                sums = jax.device_get(own(params, spread_batch(item.batch, mesh_of(params))))
                rows = item.indices >= 0
                told[item.indices[rows]] = np.stack(sums, -1)[rows]
                missing[item.indices[rows]] = False
            read &= ~missing
            weight, *losses = told.T
            found |= {"weight": weight, f"nll_{count}_shot": losses[0]}
            if self._sees:
                found[f"nll_{count}_shot_shuffled"] = losses[1]
            if count:
                found[f"gain_{count}_shot"] = found["nll_0_shot"] - losses[0]
            written = self.texts(params, split, count, limit)
            right = [examples[number]["caption"] for number in written]
            scores = translation_scores(list(written.values()), right)
            results |= {f"{name}_{count}_shot": scores[name] for name in ("chrf", "bleu")}
        if not read.all():
            results["unreadable"] = int((~read).sum())
        found = {name: x[read] for name, x in found.items()}
        weight = found["weight"].sum()
        results |= {k: float(x.sum() / weight) for k, x in found.items() if k != "weight"}
        family = self.rows(split).family[order[read]]
        table = {name: x.tolist() for name, x in found.items()}
        return results | {"examples": table | {"group": family.tolist()}}

    def order(self, split: str, limit: int | None) -> np.ndarray:
        """Returns the numbers of the examples that are scored, all or some drawn at random."""
        return np.random.default_rng(0).permutation(len(self.examples(split)))[:limit]

    def _shots(self, split: str, count: int, mesh: Any, limit: int | None) -> EvalBatches:
        """Returns batches of rows whose last caption, after ``count`` others, is each of the chosen once.

        ``other`` is the picture of another example. Rows are as long as those of training, so that one
        program serves every count.
        """
        rows, order = self.rows(split), self.order(split, limit)

        def row(place: int) -> dict[str, Any]:
            last, other = order[place], rows.examples[int(order[(place + 1) % len(order)])]
            return rows.row([*rows.before(last, count), last]) | {"other": other["image"]}

        features = self._of_rows | {"other": self.features["source"]}
        return self.batches_of(MappedSource(range(len(order)), row), features, mesh)

    def _last_nll(self, params: Any, batch: Any) -> tuple[jax.Array, ...]:
        """Returns tokens and losses [B] of the last captions, with their own and with another's picture."""
        model, shots, images = self.bind(params), batch["shots"], batch["images"]
        place = jnp.max(shots, axis=-1, keepdims=True)
        last = (shots == place) & (place >= 0)
        here = (jnp.arange(images.shape[1]) == place)[..., None, None, None]
        others = jnp.where(here, batch["other"][:, None], images)
        losses = (
            jnp.where(last, _nll(model, self._hidden(model, batch | {"images": x}), batch), 0)
            for x in ((images, others) if self._sees else (images,))
        )
        return last.sum(-1), *(x.sum(-1) for x in losses)

    def texts(
        self, params: Any, split: str, count: int, limit: int | None = None
    ) -> dict[int, str]:
        """Returns captions after so many examples, by the numbers of the examples that can be read."""
        data, tokenizer, mesh = self.config.data, self.corpus.tokenizer, mesh_of(params)
        width = 1 + data.examples * (data.text_len + self._image_tokens) - data.text_len
        order, write, said = self.order(split, limit), self._writer(params, 1), dict[int, str]()
        for item in self._shots(split, count, mesh, limit):
            ends = item.batch["image_positions"].max(-1) + self._image_tokens
            rows = zip(item.batch["target_in"], ends, strict=True)
            prompts = [row[: max(1, end)].tolist() for row, end in rows]
            given = {name: item.batch[name] for name in ("images", "image_positions")}
            given["prefix"], given["prefix_lengths"] = right_aligned(prompts, width)
            tokens = write(**spread_batch(given, mesh)).tolist()
            for row in np.flatnonzero(item.indices >= 0):
                said[int(order[item.indices[row]])] = tokenizer.decode(tokens[row])
        return said

    def samples(self, params: Any, split: str) -> Sequence[str]:
        """Returns captions without examples, captions after as many as rows have, and the references."""
        if not self._sees:
            return ()
        alone = self.texts(params, split, 0, _SAMPLED)
        told = self.texts(params, split, self.config.data.examples - 1, _SAMPLED)
        return [
            f"{alone[number]} | {text} | {self.examples(split)[number]['caption']}"
            for number, text in told.items()
            if number in alone
        ]

    # Methods that ``experiments.caption`` and ``experiments.explore`` call.

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

    def head_weights(self, params: Any) -> Callable[[Any, Any], np.ndarray]:
        """Returns the function of ``read_weights`` with its mean as one head, [1 B 1 T-1 h w]."""
        read = self.read_weights(params)
        return lambda source, tokens: read(source, tokens)[None, :, None]

    def _writer(self, params: Any, num_beams: int) -> Callable[..., np.ndarray]:
        """Returns a function from images, their positions and prompts to the best tokens of rows [B T]."""
        most = self.config.data.text_len
        call = self.generator(params, num_beams=num_beams, max_new_tokens=most)

        def write(images: Any, image_positions: Any, **prompt: Any) -> np.ndarray:
            given = dict(images=images, image_positions=image_positions) if self._sees else {}
            return call(inputs=self.seen(given), **prompt)

        return write


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
