"""Classification of examples by their picture, their text, their sound, or several of them.

A model's ``hidden`` takes ``image`` [B H W C], ``tokens`` [B S] with ``segment_ids``, and ``sound`` [B F M],
those that the config names; its ``logits`` are those of the classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import jax
import numpy as np

from crossattn.data import sources
from crossattn.data.features import Feature, Image, Label, SoundWindow, Text
from crossattn.train.losses import cross_entropy
from crossattn.train.sharding import mesh_of, spread_batch
from crossattn.train.storage import Folder
from crossattn.types import Rate
from experiments.baselines import accuracy, scores
from experiments.errors import SettingsError
from experiments.tasks import base, protocols, sections
from experiments.tasks.augmentation import augmented_as

_MELS = 40  # bands of a frame, where the config says nothing
# Of each kind of input: its argument of ``hidden``, the sizes that a config gives, the protocol of a model.
_ARGUMENTS = {"image": "image", "text": "tokens", "sound": "sound"}
_SIZES = {"image": ("height", "width", "channels"), "text": ("text_len",), "sound": ("frames",)}
_PROTOCOLS = {
    "image": protocols.ImageClassifier,
    "text": protocols.TextClassifier,
    "sound": protocols.SoundClassifier,
}


@dataclass(frozen=True, kw_only=True)
class ClassificationData(sections.Pictures, sections.Data):
    """Pictures, texts, sounds or several of them, of one class.

    Attributes:
      label: the value of an example that is its class.
      image: the value that is a picture; None reads none.
      channels: 3 for colour, 1 for grey.
      permuted: put the pixels of all pictures in one other order, which hides their grid from the model;
        ``flip`` and ``shift`` still move them on it.
      text: the value that is a text; None reads none.
      text_len: the most tokens of a text, its end included.
      sound: the value that is a sound; None reads none.
      frames: of a sound, a hundred a second; zeros fill up a shorter one, a longer one is refused.
      mels: bands of a frame.
    """

    label: str
    image: str | None
    height: sections.Pixels | None = None
    width: sections.Pixels | None = None
    channels: Annotated[int, "[1, 3]"] = 3
    permuted: bool = False
    text: str | None
    text_len: sections.Length | None = None
    sound: str | None = None
    frames: sections.Length | None = None
    mels: sections.Length = _MELS
    splits: sections.Splits


@dataclass(frozen=True)
class ClassLoss:
    """The loss of classes.

    Attributes:
      label_smoothing: probability spread over all classes.
    """

    label_smoothing: Rate


@dataclass(frozen=True)
class OptionalTokenizer(sections.Tokenizer):
    """The tokenizer of texts."""

    kind: Literal["bpe", "unigram"] = "bpe"
    vocab_size: Annotated[int, "[261, inf)"] = 1000


class ClassificationTask(base.Task):
    """A model with ``hidden`` and ``logits`` of classes, and labelled pictures, texts or sounds.

    Beside a text, pictures and sounds are the memory that ``data.blind`` blanks and ``shuffled`` exchanges;
    beside a picture alone, the sound is.
    """

    sections = {
        "data": ClassificationData,
        "tokenizer": OptionalTokenizer,
        "loss": ClassLoss,
    }
    gives = ("num_classes", "image_size", "channels", "vocab_size", "max_length", "frames", "mels")
    metrics = ("loss", "nll", "accuracy")
    headline = ("accuracy", "max")

    def __init__(self, config: Any, assets: Folder | None = None):
        super().__init__(config, assets)
        self.reads = read_by(config.data)
        self.tokenizes = "text" in self.reads
        kept = "text" if self.tokenizes else next(iter(self.reads), None)
        self.memory = tuple(name for kind, name in self.reads.items() if kind != kept)

    def corpus_options(self) -> dict[str, Any]:
        return dict(side=self.config.data.text or "caption", whole=True)

    @classmethod
    def check(cls, config: Any) -> None:
        """Raises SettingsError also where nothing is read, a size is missing, or the label is unknown."""
        data, reads = config.data, read_by(config.data)
        if not reads:
            raise SettingsError(
                "config.data.image, data.text and data.sound are all none; expected one at least."
            )
        wanted = [name for kind in reads for name in _SIZES[kind]]
        if lacking := [name for name in wanted if data.get(name) is None]:
            raise SettingsError(f"the config lacks data.{lacking[0]}, the size of what it reads.")
        if len({*reads.values(), data.label}) <= len(reads):
            raise SettingsError(
                f"the config reads {', '.join(reads.values())} and the label {data.label}; expected other"
                " values of an example for each."
            )
        if "sound" not in reads and data.get("frames") is not None:
            raise SettingsError(
                f"config.data.frames is {data.frames}, but data.sound is none; name a sound, or leave it out."
            )
        if "text" in reads and "tokenizer" not in config:
            raise SettingsError("the config reads a text, but lacks the section tokenizer.")
        super().check(config)
        _classes(data)

    @classmethod
    def asks_of(cls, config: Any) -> tuple[type, ...]:
        """Returns the protocols of the inputs that the config names."""
        return tuple(_PROTOCOLS[kind] for kind in read_by(config.data))

    def refuse_unready(self) -> None:
        """Raises DataError where examples lack a value that the config names."""
        self.corpus.refuse_lacking(*self.reads.values(), self.config.data.label)

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes."""
        return _classes(self.config.data)

    @cached_property
    def features(self) -> dict[str, Feature]:
        """The features of an example's values, by their names."""
        data = self.config.data
        features: dict[str, Feature] = {data.label: Label(self.classes)}
        if "image" in self.reads:
            unreadable = data.get("unreadable", "refuse")
            features[data.image] = Image(
                data.height,
                data.width,
                data.channels,
                unreadable=unreadable,
                permuted=data.get("permuted", False),
            )
        if "text" in self.reads:
            features[data.text] = Text(self.corpus.tokenizer, data.text_len)
        if "sound" in self.reads:
            features[data.sound] = SoundWindow(data.frames, data.get("mels", _MELS))
        return features

    def sizes(self) -> dict[str, Any]:
        data, sizes = self.config.data, {"num_classes": len(self.classes)}
        if "image" in self.reads:
            sizes |= dict(image_size=(data.height, data.width), channels=data.channels)
        if "text" in self.reads:
            sizes |= dict(vocab_size=self.corpus.tokenizer.vocab_size, max_length=data.text_len)
        if "sound" in self.reads:
            sizes |= dict(frames=data.frames, mels=data.get("mels", _MELS))
        return sizes

    def loss(self, params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, base.Sums]:
        data = self.config.data
        if "image" in self.reads:
            batch = {**batch, data.image: self._augmented(batch[data.image], key)}
        return cross_entropy(
            self.logits(params, batch, key),
            batch[data.label],
            batch["valid"],
            label_smoothing=self.config.loss.label_smoothing,
        )

    def _augmented(self, image: jax.Array, key: jax.Array | None) -> jax.Array:
        """Returns pictures [B H W C] changed as in training; as they are without a key."""
        feature: Any = self.features[self.config.data.image]
        order = feature.order if feature.permuted else None
        return augmented_as(self.config.data, image, key, order)

    def logits(self, params: Any, batch: Any, key: jax.Array | None = None) -> jax.Array:
        """Returns logits [B C] of the examples of a batch."""
        model, batch = self.bind(params), self.seen(batch)
        given = {_ARGUMENTS[kind]: batch[name] for kind, name in self.reads.items()}
        if "text" in self.reads:
            given |= dict(segment_ids=batch[f"{self.reads['text']}_segment_ids"])
        return model.logits(model.hidden(**given, key=key))

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        weight = sums["weight"] or 1.0
        means = dict(loss=sums["loss"], nll=sums["nll"], accuracy=sums["correct"])
        return {name: value / weight for name, value in means.items()}

    def probabilities(self, params: Any, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns probabilities [n C] and classes [n] of the examples of a split, in order."""
        mesh, label = mesh_of(params), self.config.data.label
        examples = len(self.examples(split))
        found, classes = np.zeros((examples, len(self.classes))), np.zeros(examples, np.int64)
        call = jax.jit(lambda params, batch: jax.nn.softmax(self.logits(params, batch)))
        for item in self.numbered_batches(split, mesh):
            rows = item.indices >= 0
            probabilities = jax.device_get(call(params, spread_batch(item.batch, mesh)))
            found[item.indices[rows]] = probabilities[rows]
            classes[item.indices[rows]] = item.batch[label][rows]
        return found, classes

    def outcomes(self, params: Any, split: str) -> dict[str, list[Any]]:
        """Returns whether the class of each example is right, and its loss; a group is a family.

        Examples that cannot be read have no weight.
        """
        probabilities, classes = self.probabilities(params, split)
        right, read = probabilities[np.arange(len(classes)), classes], probabilities.any(-1)
        examples = self.examples(split)
        return {
            "group": [examples[i].get("family", i) for i in range(len(classes))],
            "weight": read.astype(float).tolist(),
            "accuracy": (read & (probabilities.argmax(-1) == classes)).astype(float).tolist(),
            "nll": np.where(read, -np.log(np.maximum(right, 1e-30)), 0.0).tolist(),
        }

    def vectors(self, split: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Returns inputs of baselines, and classes [n].

        Inputs are pixels [n F] ("picture"), counts of tokens [n V] ("text"), texts [n] ("words") and frames
        [n F] ("sound").
        """
        data, parts, classes = self.config.data, {}, []
        examples = self.examples(split)
        for item in self.numbered_batches(split, None):
            batch, present = item.batch, item.batch["valid"] > 0
            if "image" in self.reads:
                pixels = batch[data.image].reshape(len(present), -1)
                parts.setdefault("picture", []).append(pixels[present])
            if "text" in self.reads:
                tokens = batch[data.text]
                counts = np.zeros((len(present), self.sizes()["vocab_size"]), np.float32)
                np.add.at(counts, (np.arange(len(tokens))[:, None], tokens), 1)
                counts[:, 0] = 0  # padding
                parts.setdefault("text", []).append(counts[present])
                words = [examples[int(index)][data.text] for index in item.indices[present]]
                parts.setdefault("words", []).append(np.array(words, object))
            if "sound" in self.reads:
                frames = batch[data.sound].reshape(len(present), -1)
                parts.setdefault("sound", []).append(frames[present])
            classes.append(batch[data.label][present])
        return {name: np.concatenate(rows) for name, rows in parts.items()}, np.concatenate(classes)

    def baselines(self, split: str) -> dict[str, float]:
        """Returns accuracies of classifiers of pixels, frames, tokens and n-grams of characters.

        Where training mirrors or shifts pictures, an MLP of pictures that are changed alike is one of them.
        """
        data = self.config.data
        changes = "image" in self.reads and (data.get("flip", False) or data.get("shift", 0))
        changed = self.changed if changes else None
        return scores(self.vectors, split, {"accuracy": accuracy}, changed)

    def changed(self, views: Mapping[str, np.ndarray], epoch: int) -> dict[str, np.ndarray]:
        """Returns the "picture" of ``views`` changed as in training, at random by the number of the epoch."""
        images = views["picture"].reshape(-1, *self.features[self.config.data.image].shape)
        call, key = jax.jit(self._augmented), jax.random.key(epoch)
        rows = self.config.data.batch_size
        found = [
            call(images[start : start + rows], jax.random.fold_in(key, start))
            for start in range(0, len(images), rows)
        ]
        return {"picture": np.concatenate(found).reshape(len(images), -1)}


def read_by(data: Any) -> dict[str, str]:
    """Returns the values of an example that a config reads, by their kinds: image, text, sound."""
    return {kind: data[kind] for kind in _ARGUMENTS if data.get(kind) is not None}


def _classes(data: Any) -> tuple[str, ...]:
    known = sources.classes_of(data.name, data.data_dir)
    if data.label not in known:
        raise SettingsError(
            f"config.data.label is {data.label!r}; expected one of the labels of {data.name}: "
            f"{', '.join(known) or 'it has none'}."
        )
    return known[data.label]
