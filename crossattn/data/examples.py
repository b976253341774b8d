"""Examples of features, prepared when a batch is made; their lengths stay in memory, and a cache of them."""

import contextlib
import logging
import threading
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
_BESIDE = 256  # bytes of an array besides its numbers
_SAMPLED = 16  # examples that tell one version of the data, or of their preparation, from another


class FeatureExamples:
    """Examples and their features, from which batches are planned and filled.

    Attributes:
        widths: the greatest lengths of the features that have one.
        stacked: the names of the features that are of a fixed size.
        example: the index in the source of each.
        unreadable: the indices of those that were left out of their batches, because a feature skips values
            that it cannot read.
    """

    def __init__(
        self,
        source: Sequence[Mapping[str, Any]],
        features: Mapping[str, Feature],
        truncation: str = "drop",
        cache_mib: int = 0,
    ):
        """Takes `truncation`, "drop" or "cut", for values longer than a feature lets them be.

        Prepared examples stay in memory, up to `cache_mib` MiB of them, and are not read again.

        Raises:
            DataError: there are no examples or features, or an option is out of range.
        """
        if not features:
            raise DataError("there are no features; name at least one value of the examples")
        refuse(source, truncation)
        if cache_mib < 0:
            raise DataError(f"cache_mib is {cache_mib}; expected 0 or more")
        self._cache: dict[int, dict[str, np.ndarray]] = {}
        self._keeping = threading.Lock()  # several iterators may fill one cache
        self._free = cache_mib * 2**20
        self._source, self._features, self._drop = source, dict(features), truncation == "drop"
        self.widths = widths_of(features)
        self.stacked = tuple(name for name in features if name not in self.widths)
        self.example = np.arange(len(source))
        self._lengths = {name: np.full(len(source), _UNKNOWN, np.int32) for name in self.widths}
        self._told = self._any_read = False
        self._tried = 0
        self.unreadable: set[int] = set()

    def __len__(self) -> int:
        return len(self._source)

    @property
    def cut(self) -> dict[str, int]:
        """How many of the values measured so far are shortened, by their names; dropped ones are not."""
        return {
            name: 0 if self._drop else int((lengths > self.widths[name]).sum())
            for name, lengths in self._lengths.items()
        }

    def fitting(self, examples: Int[np.ndarray, " some"]) -> Int[np.ndarray, " fewer"]:
        """Returns those of some examples that are not too long.

        Raises:
            DataError: none of the source is short enough, or one is wrong.
        """
        if not self._drop or not self.widths:
            return examples
        short = self._short(examples)
        if not short.all() and not self._told:
            self._told = True
            limits = ", ".join(f"{name} {width}" for name, width in self.widths.items())
            _LOG.warning("examples longer than the greatest lengths (%s) are dropped", limits)
            if not short.any() and not self._short(self.example).any():
                raise DataError(f"no example is short enough: the greatest lengths are {limits}")
        return examples[short]

    def lengths_of(self, examples: Int[np.ndarray, " some"]) -> Lengths:
        """Returns the lengths of some examples, at most the greatest ones."""
        self._measure(examples)
        return {
            name: np.minimum(lengths[examples], self.widths[name])
            for name, lengths in self._lengths.items()
        }

    def fill(self, layout: Layout) -> Batch:
        """Returns the batch of a layout; stacked features add "valid" [rows], 1 where a row has an example.

        Raises:
            DataError: an example is wrong; the message names it and the value.
        """
        layout, read = self._readable(layout)
        values = {name: [example[name] for example in read] for name in self._features}
        batch = collate(self._features, layout, values)
        if self.stacked:
            batch["valid"] = stack(layout, np.ones(len(read), np.int32), np.int32, ())
        return batch

    def _readable(self, layout: Layout) -> tuple[Layout, list[dict[str, np.ndarray]]]:
        """Returns the layout of the examples that can be read, and these prepared."""
        indices = layout.examples.tolist()
        found = {index: self._cache[index] for index in indices if index in self._cache}
        new = [i for i in dict.fromkeys(indices) if i not in found and i not in self.unreadable]
        for index, example in zip(new, items_of(self._source, new), strict=True):
            try:
                found[index] = self._keep(index, self._prepared(example))
            except Unreadable as error:
                if index not in self.unreadable:
                    self.unreadable.add(index)
                    _LOG.warning("%s; left out, the %d. so far", error, len(self.unreadable))
        prepared = [found.get(index) for index in indices]
        read = np.array([example is not None for example in prepared], bool)
        self._any_read |= bool(read.any())
        self._tried += len(read)
        if self._tried >= min(_SAMPLED, len(self)) and not self._any_read:
            raise DataError(f"not one of the first {self._tried} examples can be read")
        return layout.only(read), [example for example in prepared if example is not None]

    def _keep(self, index: int, prepared: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Puts copies of a prepared example into the cache if it has room, and returns the example."""
        size = sum(np.asarray(value).nbytes + _BESIDE for value in prepared.values())
        with self._keeping:
            if size <= self._free and index not in self._cache:
                self._cache[index] = {name: np.array(value) for name, value in prepared.items()}
                self._free -= size
        return prepared

    def _prepared(self, example: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return {name: _named(each.prepare, name, example) for name, each in self._features.items()}

    def fingerprint(self) -> int:
        """Returns a checksum of the features and of some examples as they prepare them."""
        crc = zlib.crc32(f"{len(self)} {self._drop} {self._features}".encode())
        for index in range(0, len(self), max(len(self) // _SAMPLED, 1)):
            with contextlib.suppress(Unreadable):  # which skips it, or is an error of its own
                for value in self._prepared(self._source[index]).values():
                    crc = zlib.crc32(np.ascontiguousarray(value).tobytes(), crc)
        return crc

    def _measure(self, examples: Int[np.ndarray, " some"]) -> None:
        """Finds the lengths of some examples, once."""
        if not self.widths:
            return
        known = next(iter(self._lengths.values()))
        new = [index for index in examples.tolist() if known[index] == _UNKNOWN]
        for start in range(0, len(new), _CHUNK):
            some = new[start : start + _CHUNK]
            read = items_of(self._source, some)
            for name, lengths in reversed(self._lengths.items()):  # the known ones last
                lengths[some] = prepared_by(self._features[name].lengths, name, read)

    def _short(self, examples: Int[np.ndarray, " some"]) -> np.ndarray:
        self._measure(examples)
        fits = [self._lengths[name][examples] <= width for name, width in self.widths.items()]
        return np.logical_and.reduce(fits)


def widths_of(features: Mapping[str, Feature]) -> dict[str, int]:
    """Returns the greatest lengths of the features that have one."""
    return {name: f.max_length for name, f in features.items() if f.max_length is not None}


def collate(
    features: Mapping[str, Feature], layout: Layout, values: Mapping[str, Sequence[np.ndarray]]
) -> Batch:
    """Returns the batch of the prepared values of a layout's examples, by the names of their features."""
    batch: Batch = {}
    for name, feature in features.items():
        batch |= feature.collate(name, layout, values[name])
    return batch


def prepared_by(
    function: Callable[[list[Any]], Any], name: str, examples: Sequence[Mapping[str, Any]]
) -> Any:
    """Returns the result of a function of the values of examples.

    Raises:
        DataError: a value is wrong; the message names its example.
    """
    try:
        return function([example[name] for example in examples])
    except (DataError, KeyError):
        for example in examples:
            _named(lambda value: function([value]), name, example)
        raise


def _named(function: Callable[[Any], Any], name: str, example: Mapping[str, Any]) -> Any:
    """Returns the result of a function of a value; its errors name example and value."""
    called = f"example {example['id']}" if "id" in example else "an example"
    if name not in example:
        raise DataError(f"{called} has no {name!r}; it holds {', '.join(example)}")
    try:
        return function(example[name])
    except DataError as error:
        raise type(error)(f"{called}, {name}: {error}") from None


def refuse(source: Sequence[Any], truncation: str) -> None:
    """Raises DataError for a source without examples and for an unknown truncation."""
    if truncation not in ("drop", "cut"):
        raise DataError(f"truncation is {truncation!r}; expected 'drop' or 'cut'")
    if not len(source):
        raise DataError("the data source has no examples")
