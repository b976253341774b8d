"""Classification of the regions of pages by their text, picture and box, or by their order in place of boxes.

The examples are those of ``help_pages``: lists "text" and "label", "boxes" and "pictures" of a page.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossattn.data import sources
from crossattn.data.errors import DataError
from crossattn.data.features import Boxes, Crops, Feature, Label, Texts
from crossattn.data.pipeline import feature_eval_batches
from crossattn.train.sharding import mesh_of, spread_batch
from crossattn.train.storage import Folder
from crossattn.types import Count, NonNegative
from experiments.baselines import accuracy, scores
from experiments.tasks import base, protocols, sections


@dataclass(frozen=True, kw_only=True)
class RegionsData(sections.Data):
    """Pages and their regions.

    Attributes:
      regions: the most regions of a page, and of a row of pages.
      tokens: the most tokens of a region's text, its end included.
      picture_height, picture_width: of a region's picture, in pixels.
      margin: around a box in its picture, in points.
      boxes: whether the model sees where a region stands and how large it is, or its place in order alone.
    """

    regions: Count
    tokens: Count
    picture_height: sections.Pixels
    picture_width: sections.Pixels
    margin: NonNegative
    boxes: bool


class RegionsTask(base.Task):
    """A ``SelfDoc``, or another model with the same ``hidden``, and pages."""

    sections = {"data": RegionsData, "tokenizer": sections.Tokenizer}
    gives = ("vocab_size", "num_classes", "tokens", "picture")
    metrics = ("loss", "accuracy", "macro_f1")
    headline = ("accuracy", "max")
    mode = "pack"
    asks = protocols.RegionClassifier
    tokenizes = True

    def __init__(self, config: Any, assets: Folder | None = None):
        super().__init__(config, assets)
        self.classes = _classes(config.data.name)
        self.memory = ("pictures",) if config.model.get("reads", "both") == "both" else ()

    def corpus_options(self) -> dict[str, Any]:
        return dict(side="text")

    def sizes(self) -> dict[str, Any]:
        data = self.config.data
        return dict(
            vocab_size=self.corpus.tokenizer.vocab_size,
            num_classes=len(self.classes),
            tokens=data.tokens,
            picture=(data.picture_height, data.picture_width, 1),
        )

    @cached_property
    def features(self) -> dict[str, Feature]:
        """The features of a page's values."""
        data = self.config.data
        size = data.picture_height, data.picture_width
        return {
            "text": Texts(self.corpus.tokenizer, data.tokens, data.regions),
            "boxes": Boxes(data.regions),
            "pictures": Crops(*size, margin=data.margin, max_length=data.regions),
            "label": Label(self.classes, data.regions),
        }

    def hidden(self, model: Any, batch: Any, **options: Any) -> Any:
        """Returns the model's vectors of the regions of a batch."""
        batch = self.seen(batch)
        boxes = batch["boxes"]
        if not self.config.data.boxes:
            places = batch["label_positions"].astype(boxes.dtype)
            strips = jnp.stack([places * 0, places, places * 0, places + 1], -1)
            boxes = (strips / self.config.data.regions).at[..., 2].set(1)
        read = (batch["text"], boxes, batch["pictures"])
        return model.hidden(*read, segment_ids=batch["label_segment_ids"], **options)

    def loss(self, params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, base.Sums]:
        model = self.bind(params)
        logits = model.logits(self.hidden(model, batch, key=key))
        label, there = batch["label"], batch["label_segment_ids"] > 0
        each = -jnp.take_along_axis(jax.nn.log_softmax(logits), label[..., None], -1)[..., 0]
        said = logits.argmax(-1)
        loss = jnp.where(there, each, 0).sum()
        sums = {
            "loss": loss,
            "accuracy": (there & (said == label)).sum().astype(jnp.float32),
            "weight": there.sum().astype(jnp.float32),
        }
        if key is None:
            sums |= self._counts(said, label, there)
        return loss, jax.lax.stop_gradient(sums)

    def _counts(self, said: jax.Array, label: jax.Array, there: jax.Array) -> base.Sums:
        """Returns counts of each class, right, predicted and expected, for its F1."""
        sums = {}
        for number, name in enumerate(self.classes):
            a, b = there & (said == number), there & (label == number)
            for what, which in (("right", a & b), ("said", a), ("meant", b)):
                sums[f"{what}_{name}"] = which.sum().astype(jnp.float32)
        return sums

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        weight = sums["weight"] or 1.0
        counts = (
            np.array([sums[f"{what}_{name}"] for name in self.classes])
            for what in ("right", "said", "meant")
        )
        f1, macro = _f1(*counts)
        means = {name: sums[name] / weight for name in ("loss", "accuracy")}
        own = {f"f1_{name}": float(x) for name, x in zip(self.classes, f1, strict=True)}
        return means | {"macro_f1": macro} | own

    def refuse_unready(self) -> None:
        """Raises DataError where there is no validation split."""
        self.corpus.refuse_lacking()

    def read_page(self, params: Any, page: dict[str, Any]) -> "PageReading":
        """Returns predicted classes of the regions of a page, and the attention between regions.

        Raises:
          DataError: the page has no regions, or a wrong one; or the model reads one modality alone.
        """
        if not len(page["text"]):
            raise DataError(f"page {page['id']} has no regions; there is nothing to read")
        if self.model_config.reads != "both":
            raise DataError(
                f"this model reads the {self.model_config.reads} alone; train one with "
                "config.model.reads='both' to see what each modality reads of the other"
            )
        (item,) = feature_eval_batches([dict(page)], self.features, batch_size=1)
        batch = jax.tree.map(jnp.asarray, item.batch)
        logits, reading = jax.jit(self._read)(params, batch)
        count = min(len(page["text"]), self.config.data.regions)
        classes = [self.classes[i] for i in np.asarray(logits)[0, :count].argmax(-1)]
        weights = np.asarray((reading.text + reading.picture) / 2)[0].mean(0)[:count, :count]
        boxes = np.asarray(batch["boxes"][0, :count], np.float64)
        return PageReading(classes, boxes, weights, np.asarray(reading.gates)[0, :count])

    def _read(self, params: Any, batch: Any, weights: bool = True) -> Any:
        model = self.bind(params)
        found = self.hidden(model, batch, return_weights=weights)
        hidden, reading = found if weights else (found, None)
        return model.logits(hidden), reading

    def report(self, params: Any, split: str, **options: Any) -> dict[str, Any]:
        """Returns the scores of a split; ``_unseen`` counts regions whose text is in no training page."""
        results = super().report(params, split, **options)
        unseen = self._unseen(split)
        right = np.array(results["examples"]["accuracy"])[unseen]
        score = accuracy(right, np.ones(len(right)))
        return results | {"regions_unseen": int(unseen.sum()), "accuracy_unseen": score}

    def outcomes(self, params: Any, split: str) -> dict[str, list[Any]]:
        """Returns whether the class of each region is right; a group is a file."""
        pages, mesh = self._cut(split), mesh_of(params)
        said = [np.zeros(0, int)] * len(pages)
        call = jax.jit(lambda p, batch: self._read(p, batch, False)[0].argmax(-1))
        for item in self.numbered_batches(split, mesh):
            found = jax.device_get(call(params, spread_batch(item.batch, mesh)))
            for row, index in enumerate(item.indices):
                if index >= 0:
                    said[index] = found[row][item.batch["label_segment_ids"][row] > 0]
        labels = [self.classes.index(name) for page in pages for name in page["label"]]
        return {
            "group": [page["id"].partition("#")[0] for page in pages for _ in page["label"]],
            "weight": [1.0] * len(labels),
            "accuracy": (np.concatenate(said) == labels).astype(float).tolist(),
        }

    def vectors(self, split: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Returns inputs of baselines for the n regions of a split, and classes [n].

        Inputs are what the model reads: pixels of the crops ("picture"), counts of the tokens ("text") and
        their text ("words"); 14 numbers of each box and its neighbours ("boxes"), or the place of a region
        and the number of regions of its page ("order").
        """
        data, tokenizer = self.config.data, self.corpus.tokenizer
        reads = self.config.model.get("reads", "both")
        found: dict[str, list[Any]] = {}
        for page in self.corpus.split(split):
            rows, size = {}, min(len(page["label"]), data.regions)
            if data.boxes:
                rows["boxes"] = _numbers(np.asarray(page["boxes"]["boxes"][:size], float))
            else:
                rows["order"] = np.stack([np.arange(size), np.full(size, size)], 1)
            if reads != "text":
                rows["picture"] = self.features["pictures"].prepare(page["pictures"])[:size]
                rows["picture"] = rows["picture"].reshape(size, -1)
            if reads != "picture":
                tokens = self.features["text"].prepare(page["text"])
                rows["text"] = np.zeros((size, tokenizer.vocab_size), np.float32)
                np.add.at(rows["text"], (np.arange(size)[:, None], tokens), tokens > 0)
                words = [tokenizer.decode(row.tolist()) for row in tokens]
                rows["words"] = np.array(words, object)
            for name, each in rows.items():
                found.setdefault(name, []).append(each)
        labels = [self.classes.index(name) for page in self._cut(split) for name in page["label"]]
        return {name: np.concatenate(each) for name, each in found.items()}, np.array(labels)

    def baselines(self, split: str) -> dict[str, float]:
        """Returns scores of classifiers of boxes or order, pixels, tokens and n-grams of characters."""
        unseen = self._unseen(split)
        metrics = {
            "accuracy": accuracy,
            "accuracy_unseen": lambda said, labels: accuracy(said[unseen], labels[unseen]),
            "macro_f1": _macro_f1,
        }
        return scores(self.vectors, split, metrics)

    def _unseen(self, split: str) -> np.ndarray:
        """Returns which regions [n] of a split have a text that is in no training page."""
        known = {text for page in self._cut("train") for text in page["text"]}
        return np.array([text not in known for page in self._cut(split) for text in page["text"]])

    def _cut(self, split: str) -> list[dict[str, Any]]:
        """Returns the pages of a split with as many regions as the model reads."""
        most = self.config.data.regions
        return [
            {
                "id": page["id"],
                "text": page["text"][:most],
                "label": page["label"][:most],
            }
            for page in self.corpus.split(split)
        ]


@dataclass(frozen=True)
class PageReading:
    """A model's predictions for the n regions of a page.

    Attributes:
      classes: the likeliest class of each region.
      boxes: [n 4], in fractions of the page.
      weights: [n n] cross-attention, the mean of heads and of both directions.
      gates: [n] shares of the text in each region, from 0 to 1; the rest is the picture.
    """

    classes: list[str]
    boxes: np.ndarray
    weights: np.ndarray
    gates: np.ndarray


def _classes(name: str) -> tuple[str, ...]:
    classes = sources.classes_of(name)
    if "label" not in classes:
        raise DataError(f"{name} has no classes of regions; expected data such as help_pages")
    return classes["label"]


def _numbers(boxes: np.ndarray) -> np.ndarray:
    """Returns edges and size of boxes [n 4]; and offset and size of the next and the previous box."""
    size = boxes[:, 2:] - boxes[:, :2]
    beside = []
    for step in (1, -1):
        other, its_size = np.roll(boxes, step, 0), np.roll(size, step, 0)
        each = np.concatenate([other[:, :2] - boxes[:, :2], its_size], 1)
        each[0 if step == 1 else -1] = 0  # it has no neighbour
        beside.append(each)
    return np.concatenate([boxes, size, *beside], 1)


def _macro_f1(said: np.ndarray, labels: np.ndarray) -> float:
    most = max(said.max(), labels.max()) + 1
    return _f1(*(np.bincount(x, minlength=most) for x in (labels[said == labels], said, labels)))[1]


def _f1(right: np.ndarray, said: np.ndarray, meant: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns F1 of each class, and the mean over classes with a count, as scikit-learn computes it."""
    count = said + meant
    f1 = 2 * right / np.maximum(count, 1)
    return f1, float(f1.sum() / max((count > 0).sum(), 1))
