"""Examples whose features are prepared once, so that a training batch is only copying.

The arrays of all examples are one row of numbers, in memory or in files (`crossattn.data.prepare`), of which
only the lengths are mapped into memory.
"""

import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Bool, Int, Integer

from crossattn.data.errors import DataError
from crossattn.data.examples import collate, prepared_by, refuse, widths_of
from crossattn.data.features import Links, Text
from crossattn.data.packing import Batch, Layout, Lengths
from crossattn.data.sources import items_of

_LOG = logging.getLogger(__name__)
_CHUNK = 4096  # examples prepared at a time: enough to keep every core busy, little memory


Storable = Text | Links
"""A feature whose arrays hold numbers from 0 to `largest`, `extra` of them beyond its length in a batch."""


@dataclass(frozen=True)
class Prepared:
    """Examples as arrays within the greatest lengths.

    Attributes:
        features: by their names, in the order in which their arrays stand.
        lengths: of each example's values in a batch, by the names of the features.
        starts: the place of the first number of each example.
        read: returns the numbers from a place on, so many.
        example: the index in the source of each.
        linked: the indices in the source of those that have alignments of words.
        total: examples of the source.
        cut: how many values were shortened, by the names of the features.
        checksum: of lengths and numbers.
        known: examples whose alignments are used; None is all.
    """

    features: Mapping[str, Storable]
    lengths: Mapping[str, Integer[np.ndarray, " examples"]]
    starts: Int[np.ndarray, " examples"]
    read: Callable[[int, int], np.ndarray]
    example: Int[np.ndarray, " examples"]
    linked: Int[np.ndarray, " linked"]
    total: int
    cut: Mapping[str, int]
    checksum: int
    known: Bool[np.ndarray, " examples"] | None = None

    stacked: ClassVar[tuple[str, ...]] = ()

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def dropped(self) -> int:
        """Examples that were left out."""
        return self.total - len(self)

    @property
    def widths(self) -> dict[str, int]:
        """The greatest lengths of the features that have one."""
        return widths_of(self.features)

    def fingerprint(self) -> int:
        """Returns a checksum that differs when texts, tokenizers, lengths or the alignments used do."""
        return zlib.crc32(b"" if self.known is None else self.known.tobytes(), self.checksum)

    def fitting(self, examples: Int[np.ndarray, " some"]) -> Int[np.ndarray, " some"]:
        """Returns all: examples that are too long were left out."""
        return examples

    def lengths_of(self, examples: Int[np.ndarray, " some"]) -> Lengths:
        """Returns the lengths of some examples."""
        return {name: self.lengths[name][examples].astype(np.int64) for name in self.widths}

    def values(self, examples: Int[np.ndarray, " some"]) -> dict[str, list[np.ndarray]]:
        """Returns the arrays of some examples, by the names of the features."""
        sizes = np.stack([self.lengths[n][examples] + f.extra for n, f in self.features.items()], 1)
        arrays: dict[str, list[np.ndarray]] = {name: [] for name in self.features}
        starts, ends = self.starts[examples].tolist(), np.cumsum(sizes, 1, np.int64).tolist()
        for start, edges in zip(starts, ends, strict=True):
            numbers, begin = self.read(start, edges[-1]), 0
            for name, end in zip(self.features, edges, strict=True):
                arrays[name].append(numbers[begin:end])
                begin = end
        if self.known is not None:
            known = self.known[examples].tolist()
            tables = zip(arrays["links"], known, strict=True)
            arrays["links"] = [table if used else table[:0] for table, used in tables]
        return arrays

    def fill(self, layout: Layout) -> Batch:
        """Returns the batch of a layout."""
        return collate(self.features, layout, self.values(layout.examples))

    def with_links(self, share: float, seed: int = 0) -> "Prepared":
        """Returns the same with the alignments of a share of the examples that have any.

        Args:
            share: above 0, at most 1; the seed alone chooses the examples, and a larger share holds those of
                a smaller one.

        Raises:
            DataError: the share is out of range, or no example has alignments.
        """
        if not 0.0 < share <= 1.0:
            raise DataError(f"the share of gold links is {share}; expected above 0 and at most 1")
        linked = np.intersect1d(self.linked, self.example)
        if not len(linked):
            raise DataError("the training data has no gold links between words")
        order = np.random.default_rng([seed % 2**32, 1]).permutation(linked)
        chosen = order[: max(round(share * len(linked)), 1)]
        return replace(self, known=np.isin(self.example, chosen))

    def refuse_empty(self) -> None:
        """Logs how many examples were dropped and values cut.

        Raises:
            DataError: nothing is left.
        """
        limits = ", ".join(f"{name} {width}" for name, width in self.widths.items())
        told = [f"dropped {self.dropped} of {self.total} examples"] if self.dropped else []
        told += [f"cut {count} {name}s" for name, count in self.cut.items() if count]
        report = f"{' and '.join(told)} longer than {limits}"
        if not len(self):
            raise DataError(f"no example is short enough: {report}")
        if told:
            _LOG.warning("%s", report)


@dataclass(frozen=True)
class Part:
    """A part of the prepared examples, as `Prepared` has them: those that fit of `total`."""

    numbers: np.ndarray
    lengths: Mapping[str, Int[np.ndarray, " examples"]]
    example: Int[np.ndarray, " examples"]
    linked: Int[np.ndarray, " linked"]
    cut: Mapping[str, int]
    total: int

    @property
    def sizes(self) -> Int[np.ndarray, " examples"]:
        """The numbers of each example, without the `extra` ones."""
        return np.add.reduce(list(self.lengths.values()))


def dtype_of(features: Mapping[str, Storable]) -> np.dtype:
    """Returns the smallest type that holds the numbers of features."""
    short = max(feature.largest for feature in features.values()) < 2**16
    return np.dtype(np.uint16 if short else np.int32)


def starts_of(features: Mapping[str, Storable], sizes: np.ndarray, first: int = 0) -> np.ndarray:
    """Returns the starts of examples of those sizes from `first` on, and the end of the last."""
    extra = sum(feature.extra for feature in features.values())
    return first + np.concatenate([[0], np.cumsum(sizes + extra, dtype=np.int64)])


def parts(
    source: Sequence[Mapping[str, Any]],
    features: Mapping[str, Storable],
    truncation: str,
    indices: range,
) -> Iterator[Part]:
    """Yields examples of those indices prepared, a few thousand at a time.

    Raises:
        DataError: an example is wrong; names it.
    """
    dtype = dtype_of(features)
    for start in range(indices.start, indices.stop, _CHUNK):
        some = range(start, min(start + _CHUNK, indices.stop))
        examples, arrays, lengths = items_of(source, some), {}, {}
        for name, feature in features.items():
            arrays[name], lengths[name] = prepared_by(feature.prepare_many, name, examples)
        long = {name: lengths[name] > width for name, width in widths_of(features).items()}
        kept = np.arange(len(some))
        if truncation == "drop":
            kept = np.flatnonzero(~np.logical_or.reduce(list(long.values())))
        rows = [arrays[name][i] for i in kept.tolist() for name in features]
        fitting = {
            name: np.array([len(arrays[name][i]) - feature.extra for i in kept.tolist()], np.int32)
            for name, feature in features.items()
        }
        yield Part(
            numbers=np.concatenate([np.zeros(0, dtype), *rows]).astype(dtype),
            lengths=fitting,
            example=start + kept,
            linked=start + np.flatnonzero([len(table) for table in arrays.get("links", ())]),
            cut={name: int(too_long[kept].sum()) for name, too_long in long.items()},
            total=len(some),
        )


def prepare_examples(
    source: Sequence[Mapping[str, Any]], features: Mapping[str, Storable], truncation: str = "drop"
) -> Prepared:
    """Returns the examples of a source, prepared in memory.

    Args:
        truncation: "drop" or "cut", for values longer than a feature lets them be.

    Raises:
        DataError: there are no examples, none is short enough, one is wrong, or an option is unknown.
    """
    refuse(source, truncation)
    made = list(parts(source, features, truncation, range(len(source))))
    numbers = np.concatenate([part.numbers for part in made])
    lengths = {name: np.concatenate([part.lengths[name] for part in made]) for name in features}
    prepared = Prepared(
        features=features,
        lengths=lengths,
        starts=starts_of(features, np.concatenate([part.sizes for part in made]))[:-1],
        read=lambda start, size: numbers[start : start + size],
        example=np.concatenate([part.example for part in made]),
        linked=np.concatenate([part.linked for part in made]),
        total=len(source),
        cut={name: sum(part.cut[name] for part in made) for name in widths_of(features)},
        checksum=checksum(lengths, [numbers.data]),
    )
    prepared.refuse_empty()
    return prepared


def checksum(lengths: Mapping[str, np.ndarray], numbers: Any) -> int:
    """Returns the checksum of lengths and numbers, which come in pieces of bytes."""
    crc = 0
    for piece in numbers:
        crc = zlib.crc32(piece, crc)
    for column in lengths.values():
        for start in range(0, len(column), 2**20):
            crc = zlib.crc32(np.ascontiguousarray(column[start : start + 2**20]).data, crc)
    return crc
