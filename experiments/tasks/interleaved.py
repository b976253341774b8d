"""Captions after their pictures, several in a row: what a language model that reads images learns.

The one thing to know: a row is ``<s> <image> caption </s> <image> caption </s> ...``, so that a caption is
told with those before it as examples. A model whose ``hidden`` takes no ``images`` learns the text alone; one
that takes them may begin with what it has learnt. ``image_tokens`` of its config is how many places an image
takes in the text, 1 where it has none such.
"""

import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossattn import decode, models
from crossattn.data.errors import DataError
from crossattn.data.features import Image, Text
from crossattn.data.pipeline import feature_batches
from crossattn.data.tokenizers import BOS, PAD, UNK
from crossattn.train.linear_loss import linear_cross_entropy
from crossattn.train.sharding import everywhere, mesh_of, rows_on
from crossattn.train.storage import Folder
from experiments import keys
from experiments.errors import SettingsError
from experiments.keys import Key
from experiments.settings import model_config
from experiments.tasks import base
from experiments.tasks.corpus import Corpus
from experiments.tasks.ngrams import targets, trigrams

IMAGE = UNK
"""The token that stands for an image: no text has it, for tokenizers fall back on bytes."""

SHOTS = (0, 2, 4)
"""Numbers of examples before a caption whose losses are told apart."""

_SAMPLED = 4  # rows that ``samples`` shows

KEYS = {
    **{name: keys.TEXT[name] for name in (
        "data.name", "data.data_dir", "data.batch_size", "tokenizer.kind", "tokenizer.vocab_size",
        "loss.label_smoothing", "loss.z_loss", "loss.chunks",
    )},
    "data.examples": Key(int, "Pictures with captions in a row.", "[1, inf)"),
    "data.text_len": Key(int, "The most tokens of a caption, its end included.", "[2, inf)"),
    **{name: keys.PICTURES[name] for name in ("data.height", "data.width")},
}  # fmt: skip


class InterleavedTask(base.Task):
    """The next token of captions, by a ``Flamingo`` or by a ``Decoder`` that sees no picture.

    Besides the loss over all captions, ``nll_K`` is that of captions with K examples before them, and
    ``nll_shuffled`` that of all where every row has another's pictures.
    """

    metrics = ("loss", "nll", *(f"nll_{count}" for count in SHOTS), "nll_shuffled")
    headline = ("nll", "min")
    reads = ("tokens", "segment_ids")

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
        model, options, told = self.bind(params), self.config.loss, batch["shots"] >= 0
        hidden = self._hidden(model, batch, key)
        loss, sums = linear_cross_entropy(
            hidden,
            model.output_table(),
            batch["target_out"],
            told,
            label_smoothing=options.label_smoothing,
            z_loss=options.z_loss,
            chunks=options.chunks,
        )
        sums |= {"tokens": sums["weight"]}
        return loss, sums if key is not None else sums | self._compared(model, hidden, batch)

    def _hidden(self, model: Any, batch: Any, key: Any = None) -> jax.Array:
        given = {name: batch[name] for name in ("images", "image_positions") if self._sees}
        return model.hidden(
            batch["target_in"], segment_ids=batch["target_segment_ids"], **given, key=key
        )

    def _compared(self, model: Any, hidden: jax.Array, batch: Any) -> base.Sums:
        """Sums of the losses of captions after so many examples, and with another row's pictures."""
        nll = _nll(model, hidden, batch)
        others = batch | {"images": jnp.roll(batch["images"], 1, axis=0)}
        shuffled = _nll(model, self._hidden(model, others), batch) if self._sees else nll
        sums = {"nll_shuffled": jnp.where(batch["shots"] >= 0, shuffled, 0).sum()}
        for count in SHOTS:
            chosen = batch["shots"] == count
            sums |= {
                f"nll_{count}": jnp.where(chosen, nll, 0).sum(),
                f"weight_{count}": chosen.sum(),
            }
        return sums

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        weight = max(sums["weight"], 1.0)
        scores = {name: sums[name] / weight for name in ("loss", "nll", "nll_shuffled")}
        counts = [count for count in SHOTS if sums[f"weight_{count}"]]
        return scores | {f"nll_{k}": sums[f"nll_{k}"] / sums[f"weight_{k}"] for k in counts}

    def baselines(self, split: str) -> dict[str, float]:
        """Nats a token of trigrams counted in captions, which see no picture."""
        train, other = (
            list(targets(map(_captions_alone, self.eval_batches(name, None)), "caption"))
            for name in ("train", split)
        )
        return {"trigrams_nll": trigrams(train, other)}

    @cached_property
    def _features(self) -> dict[str, Any]:
        data = self.config.data
        return {
            "image": Image(data.height, data.width),
            "caption": Text(self._corpus.tokenizer, data.text_len),
        }

    def train_iterator(self, shard_index: int, shard_count: int) -> "InterleavedBatches":
        data = self.config.data
        batches = feature_batches(
            self._corpus.split("train"),
            self._features,
            mode="pad",
            batch_size=data.batch_size * data.examples,
            truncation="cut",
            seed=self.config.seed,
            process_index=shard_index,
            process_count=shard_count,
            batch_multiple=data.examples,
        )
        return InterleavedBatches(batches, data.examples, self._image_tokens)

    def eval_batches(self, split: str, mesh: Any) -> Iterable[Mapping[str, np.ndarray]]:
        examples, count = self._corpus.split(split), self.config.data.examples
        size = rows_on(mesh, self.config.data.batch_size) * count
        # Not by length, as other tasks have them: examples would say how long the caption is.
        order = np.random.default_rng(0).permutation(len(examples))
        for first in range(0, len(order), size):
            chosen = [examples[int(index)] for index in order[first : first + size]]
            yield interleaved(self._batch(chosen, size), count, self._image_tokens)

    def _batch(self, examples: list[Any], size: int) -> dict[str, np.ndarray]:
        """Examples, one a row, and rows of nothing up to that size."""
        data = self.config.data
        captions = np.zeros((size, data.text_len), np.int32)
        images = np.zeros((size, data.height, data.width, 3), np.float32)
        for row, example in enumerate(examples):
            ids = self._features["caption"].prepare(example["caption"])
            captions[row, : len(ids)] = ids
            images[row] = self._features["image"].prepare(example["image"])
        return {
            "caption": captions,
            "caption_segment_ids": (captions != PAD).astype(np.int32),
            "image": images,
            "valid": (np.arange(size) < len(examples)).astype(np.int32),
        }

    def samples(self, params: Any, split: str) -> Sequence[str]:
        """Captions of pictures, after no example and after as many as rows have; then the right ones."""
        if not self._sees:
            return ()
        mesh, text_of = mesh_of(params), self._corpus.tokenizer.decode
        batch, last = next(iter(self.eval_batches(split, mesh))), self.config.data.examples - 1
        whole = (batch["image_positions"] >= 0).all(-1)
        batch = {name: x[whole][:_SAMPLED] for name, x in batch.items()}
        told = []
        for count in (0, last):
            search = jax.jit(
                functools.partial(self._captions, batch=batch, count=count),
                out_shardings=everywhere(mesh),
            )
            told.append([text_of(row) for row in np.asarray(search(params)).tolist()])
        right = [
            text_of(row[shots == last])
            for row, shots in zip(batch["target_out"], batch["shots"], strict=True)
        ]
        return [" | ".join(texts) for texts in zip(*told, right, strict=True)]

    def _captions(self, params: Any, batch: Any, count: int) -> Any:
        """Tokens of the caption of each row's last picture, with ``count`` examples before it."""
        last = self.config.data.examples
        chosen = slice(last - 1 - count, last)
        positions = batch["image_positions"][:, chosen]
        starts = positions[:, 0]
        prompts = [
            [BOS, *row[start : end + self._image_tokens].tolist()]
            for row, start, end in zip(batch["target_in"], starts, positions[:, -1], strict=True)
        ]
        inputs = dict(
            images=batch["images"][:, chosen], image_positions=positions - starts[:, None] + 1
        )
        return decode.generate(
            self.bind(params),
            prefix=prompts,
            inputs=inputs,
            max_new_tokens=self.config.data.text_len,
        ).tokens[:, 0]

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


def _captions_alone(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The targets of a batch, and the number of the caption that each is of, from 1."""
    return {"target_out": batch["target_out"], "caption": batch["shots"] + 1}


def _sees(config: Any) -> bool:
    """Whether the model of a config reads pictures."""
    hidden = getattr(models.find(config.model.name).module, "hidden", None)
    return hidden is not None and "images" in inspect.signature(hidden).parameters


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
