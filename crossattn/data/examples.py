"""Examples of features, prepared when a batch is made: only their lengths are kept in memory."""

import contextlib
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from crossattn.data.errors import DataError, Unreadable
from crossattn.data.features import Feature
from crossattn.data.packing import Batch, Layout, Lengths, stack
from crossattn.data.sources import items_of

_LOG = logging.getLogger(__name__)
_UNKNOWN = -1
_CHUNK = 256  # examples that are in memory together while they are measured
_SAMPLED = 16  # examples that tell one version of the data, or of their preparation, from another


class FeatureExamples:
    """What `packing` plans from and fills, made of examples and what becomes of their values.

    Attributes:
        widths: the greatest lengths of the features that have one.
        example: the index in the source of each.
        unreadable: the indices of those that were left out of their batches, for a feature skips what it
            cannot read.
    """

    def __init__(
        self,
        source: Sequence[Mapping[str, Any]],
        features: Mapping[str, Feature],
        truncation: str = "drop",
    ):
        """`truncation` is "drop" or "cut", for what is longer than a feature lets it be.

        Raises:
            DataError: there are no examples or features, or an option is out of range.
        """
        if not len(source):
            raise DataError("the data source has no examples")
        if not features:
            raise DataError("there are no features; name at least one value of the examples")
        check_truncation(truncation)
        self._source, self._features, self._drop = source, dict(features), truncation == "drop"
        self.widths = {
            name: feature.max_length
            for name, feature in features.items()
            if feature.max_length is not None
        }
        self.example = np.arange(len(source))
        self._lengths = {name: np.full(len(source), _UNKNOWN, np.int32) for name in self.widths}
        self._told = self._any_read = False
        self.unreadable: set[int] = set()

    def __len__(self) -> int:
        return len(self._source)

    @property
    def cut(self) -> dict[str, int]:
        """How many values of those that were looked at are longer than they may be, by their names."""
        return {
            name: int((lengths > self.widths[name]).sum())
            for name, lengths in self._lengths.items()
        }

    def fitting(self, examples: Int[np.ndarray, " some"]) -> Int[np.ndarray, " fewer"]:
        """Those of some examples that are not too long.

        Raises:
            DataError: not one of the source is short enough, or one is wrong.
        """
        if not self._drop or not self.widths:
            return examples
        self._measure(examples)
        short = self._short(examples)
        if not short.all() and not self._told:
            self._told = True
            limits = ", ".join(f"{name} {width}" for name, width in self.widths.items())
            _LOG.warning("examples longer than the greatest lengths (%s) are dropped", limits)
            if not short.any() and not self._short(self._measure(self.example)).any():
                raise DataError(f"no example is short enough: the greatest lengths are {limits}")
        return examples[short]

    def lengths_of(self, examples: Int[np.ndarray, " some"]) -> Lengths:
        """The lengths of some examples, those that are too long cut."""
        self._measure(examples)
        return {
            name: np.minimum(lengths[examples], self.widths[name])
            for name, lengths in self._lengths.items()
        }

    def fill(self, layout: Layout) -> Batch:
        """The batch of a layout; with "valid" [rows], 1 where a row holds an example, where any is stacked.

        Raises:
            DataError: an example is wrong; names it, and the value.
        """
        layout, read = self._readable(layout)
        values = {name: [example[name] for example in read] for name in self._features}
        batch = collate(self._features, layout, values)
        if len(self.widths) < len(self._features):
            batch["valid"] = stack(layout, np.ones(len(read), np.int32), np.int32, ())
        return batch

    def _readable(self, layout: Layout) -> tuple[Layout, list[dict[str, np.ndarray]]]:
        """The layout of those of its examples that can be read, and these prepared."""
        indices, prepared = layout.examples.tolist(), []
        for index, example in zip(indices, items_of(self._source, indices), strict=True):
            try:
                prepared.append(self._prepared(example))
            except Unreadable as error:
                if index not in self.unreadable:
                    self.unreadable.add(index)
                    _LOG.warning("%s; left out, the %d. so far", error, len(self.unreadable))
                prepared.append(None)
        read = np.array([example is not None for example in prepared], bool)
        self._any_read |= bool(read.any())
        if len(read) and not self._any_read:
            raise DataError(f"not one of the first {len(read)} examples can be read")
        return layout.only(read), [example for example in prepared if example is not None]

    def _prepared(self, example: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return {
            name: named(feature.prepare, name, example) for name, feature in self._features.items()
        }

    def fingerprint(self) -> int:
        """A checksum of the features and of some examples as they prepare them."""
        crc = zlib.crc32(f"{len(self)} {self._drop} {self._features}".encode())
        for index in range(0, len(self), max(len(self) // _SAMPLED, 1)):
            with contextlib.suppress(Unreadable):  # which skips it, or is an error of its own
                for value in self._prepared(self._source[index]).values():
                    crc = zlib.crc32(np.ascontiguousarray(value).tobytes(), crc)
        return crc

    def _measure(self, examples: Int[np.ndarray, " some"]) -> Int[np.ndarray, " some"]:
        """Finds the lengths of some examples, once."""
        if self.widths:
            known = next(iter(self._lengths.values()))
            new = [index for index in examples.tolist() if known[index] == _UNKNOWN]
            for start in range(0, len(new), _CHUNK):
                some = new[start : start + _CHUNK]
                read = items_of(self._source, some)
                for name, lengths in reversed(self._lengths.items()):  # the known ones last
                    measure = self._features[name].lengths
                    lengths[some] = prepared_by(measure, lambda v, m=measure: m([v]), name, read)
        return examples

    def _short(self, examples: Int[np.ndarray, " some"]) -> np.ndarray:
        fits = [self._lengths[name][examples] <= width for name, width in self.widths.items()]
        return np.logical_and.reduce(fits)


def collate(
    features: Mapping[str, Feature], layout: Layout, values: Mapping[str, Sequence[np.ndarray]]
) -> Batch:
    """The batch of the prepared values of a layout's examples, by the names of their features."""
    batch: Batch = {}
    for name, feature in features.items():
        batch |= feature.collate(name, layout, values[name])
    return batch


def prepared_by(
    together: Callable[[list[Any]], Any],
    alone: Callable[[Any], Any],
    name: str,
    examples: Sequence[Mapping[str, Any]],
) -> Any:
    """`together` of the values of examples.

    Raises:
        DataError: a value is wrong; `alone` is asked which one, and the example is named.
    """
    try:
        return together([example[name] for example in examples])
    except (DataError, KeyError):
        for example in examples:
            named(alone, name, example)
        raise


def named(prepare: Callable[[Any], Any], name: str, example: Mapping[str, Any]) -> Any:
    """A function of a value of an example, which errors name."""
    called = f"example {example['id']}" if "id" in example else "an example"
    if name not in example:
        raise DataError(f"{called} has no {name!r}; it holds {', '.join(example)}")
    try:
        return prepare(example[name])
    except DataError as error:
        raise type(error)(f"{called}, {name}: {error}") from None


def check_truncation(truncation: str) -> None:
    """Raises DataError for what there is not."""
    if truncation not in ("drop", "cut"):
        raise DataError(f"truncation is {truncation!r}; expected 'drop' or 'cut'")
