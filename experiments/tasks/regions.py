"""The class of each region of a page, from its text, its box and its picture.

The examples are those of ``help_pages``: "text" and "label" lists, "boxes" and "pictures" of a page.
``report`` also says what is reached by the most frequent class, and by a rule on the height of a box or the
length of a text alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossattn.data import sources
from crossattn.data.errors import DataError
from crossattn.data.features import Boxes, Crops, Feature, Label, Texts
from crossattn.data.pipeline import feature_eval_batches
from crossattn.train.storage import Folder
from crossattn.types import Count, NonNegative
from experiments.tasks import base, protocols, sections
from experiments.tasks.corpus import Corpus, UnreadCorpus

_BINS = 32  # of a rule on one number


@dataclass(frozen=True, kw_only=True)
class RegionsData(sections.Data):
    """Pages and their regions.

    Attributes:
      regions: the most regions of a page, and of a row of pages.
      tokens: the most tokens of a region's text, its end included.
      picture_height, picture_width: of a region's picture, in pixels.
      margin: of the page around a box, in its picture too; in points.
    """

    regions: Count
    tokens: Count
    picture_height: sections.Pixels
    picture_width: sections.Pixels
    margin: NonNegative


class RegionsTask(base.Task):
    """Classification of regions by a ``SelfDoc``, or another model with the same ``hidden``."""

    sections = {"data": RegionsData, "tokenizer": sections.Tokenizer}
    gives = ("vocab_size", "num_classes", "tokens", "picture")
    metrics = ("loss", "accuracy", "macro_f1")
    headline = ("accuracy", "max")
    mode = "pack"
    asks = protocols.RegionClassifier

    def __init__(self, config: Any, assets: Folder | None = None):
        super().__init__(config, assets)
        self.corpus = Corpus(config, assets, side="text")
        self.classes = _classes(config.data.name)

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
        """Features of the values of a page."""
        data = self.config.data
        size = data.picture_height, data.picture_width
        return {
            "text": Texts(self.corpus.tokenizer, data.tokens, data.regions),
            "boxes": Boxes(data.regions),
            "pictures": Crops(*size, margin=data.margin, max_length=data.regions),
            "label": Label(self.classes, data.regions),
        }

    def hidden(self, model: Any, batch: Any, **options: Any) -> Any:
        """The model's vectors of the regions of a batch."""
        read = (batch["text"], batch["boxes"], batch["pictures"])
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
        """Counts of each class, right, said and meant, of which its F1 is made."""
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

    def examples(self, split: str) -> Any:
        return self.corpus.split(split)

    def without_data(self) -> "RegionsTask":
        self.corpus: Any = UnreadCorpus(self.config)
        return self

    def refuse_unready(self) -> None:
        """Raises DataError where there is no validation split."""
        self.corpus.split("validation")

    def save_assets(self, directory: Path) -> None:
        self.corpus.save(directory)

    def read_page(self, params: Any, page: dict[str, Any]) -> "PageReading":
        """Classes of the regions of a page, and which regions each has read.

        Raises:
          DataError: the page has no regions, or one is wrong; or its model reads one modality alone.
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

    def _read(self, params: Any, batch: Any) -> Any:
        model = self.bind(params)
        hidden, reading = self.hidden(model, batch, return_weights=True)
        return model.logits(hidden), reading

    def report(self, params: Any, split: str, **options: Any) -> dict[str, Any]:
        """The scores of a split, and what is reached without a model."""
        return super().report(params, split, **options) | self.baselines(split)

    def vectors(self, split: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Fourteen numbers of each region's box and those before and after it ("boxes"); classes [n]."""
        pages = self.corpus.split(split)
        boxes = [_numbers(np.asarray(page["boxes"]["boxes"], float)) for page in pages]
        return {"boxes": np.concatenate(boxes)}, _Regions.of(pages, self.classes).label

    def baselines(self, split: str) -> dict[str, float]:
        """Accuracy and macro F1 of the most frequent class, and of rules on one number."""
        train, other = (_Regions.of(self.corpus.split(s), self.classes) for s in ("train", split))
        most = np.full(len(other.label), np.bincount(train.label).argmax())
        found = {"majority": most}
        for name in ("height", "characters"):
            found[f"{name}_alone"] = _rule(train, other, name)
        scores = {}
        for name, said in found.items():
            scores[f"{name}_accuracy"] = float((said == other.label).mean())
            each = (other.label[said == other.label], said, other.label)
            counts = (np.bincount(which, minlength=len(self.classes)) for which in each)
            _, scores[f"{name}_macro_f1"] = _f1(*counts)
        return scores


@dataclass(frozen=True)
class PageReading:
    """The regions of a page, as a model has read them.

    Attributes:
      classes: of each, the likeliest.
      boxes: [n 4], in fractions of the page.
      weights: [n n], how much each has read of each, the mean of heads and of both directions.
      gates: [n], how much of each is its text, from 0 to 1; the rest is its picture.
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


class _Regions:
    """The regions of a split, one after the other: class, height of the box, characters of the text."""

    def __init__(self, label: Any, height: Any, characters: Any):
        self.label, self.height, self.characters = label, height, characters

    @classmethod
    def of(cls, pages: Sequence[Any], classes: tuple[str, ...]) -> "_Regions":
        """Those of some pages."""
        label, height, characters = [], [], []
        for page in pages:
            label += [classes.index(each) for each in page["label"]]
            height += [bottom - top for _, top, _, bottom in page["boxes"]["boxes"]]
            characters += [len(text) for text in page["text"]]
        return cls(np.array(label, int), np.array(height, float), np.array(characters, float))


def _numbers(boxes: np.ndarray) -> np.ndarray:
    """Edges, width and height of boxes [n 4]; and where those before and after begin, as wide, as high."""
    size = boxes[:, 2:] - boxes[:, :2]
    beside = []
    for step in (1, -1):
        other, its_size = np.roll(boxes, step, 0), np.roll(size, step, 0)
        each = np.concatenate([other[:, :2] - boxes[:, :2], its_size], 1)
        each[0 if step == 1 else -1] = 0  # there is none
        beside.append(each)
    return np.concatenate([boxes, size, *beside], 1)


def _rule(train: _Regions, other: _Regions, name: str) -> np.ndarray:
    """The most frequent class of each interval of a number; intervals are equally full in training."""
    value = getattr(train, name)
    edges = np.unique(np.quantile(value, np.linspace(0, 1, _BINS + 1)[1:-1]))
    counts = np.zeros((len(edges) + 1, train.label.max(initial=0) + 1))
    np.add.at(counts, (np.searchsorted(edges, value), train.label), 1)
    return counts.argmax(1)[np.searchsorted(edges, getattr(other, name))]


def _f1(right: np.ndarray, said: np.ndarray, meant: np.ndarray) -> tuple[np.ndarray, float]:
    """F1 of each class, and the mean of those that are said or meant, as scikit-learn's."""
    count = said + meant
    f1 = 2 * right / np.maximum(count, 1)
    return f1, float(f1.sum() / max((count > 0).sum(), 1))
