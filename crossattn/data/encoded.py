"""Token ids of a whole source in flat arrays, made once, so that a training batch is only copying.

A source text ends with EOS. A target is stored as BOS, ids, EOS; the decoder reads all but the last
and predicts all but the first.
"""

import itertools
import logging
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int, Integer

from crossattn.data.errors import DataError
from crossattn.data.features.text import Text, lay_text
from crossattn.data.links import LINKS_PER_TOKEN, encode_links
from crossattn.data.packing import Batch, Layout, Lengths
from crossattn.data.tokenizers import Tokenizer

_LOG = logging.getLogger(__name__)
ANY_LENGTH = 2**31 - 2
"""The most tokens of a text that nothing is to shorten."""
_CHUNK = 4096  # texts tokenised at a time: enough to keep every core busy, little memory


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths in one array: row `i` is ids[offsets[i] : offsets[i + 1]]."""

    ids: Int[np.ndarray, " total"]
    offsets: Int[np.ndarray, " edges"]

    @property
    def lengths(self) -> Int[np.ndarray, " rows"]:
        """Length of each row."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Int[np.ndarray, " length"]:
        return self.ids[self.offsets[row] : self.offsets[row + 1]]

    def lengths_of(self, rows: Int[np.ndarray, " some"]) -> Int[np.ndarray, " some"]:
        """Lengths of some rows."""
        return self.offsets[rows + 1] - self.offsets[rows]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> "Ragged":
        """Packs lists of ids."""
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        every = itertools.chain.from_iterable(rows)
        return cls(np.fromiter(every, np.int32, count=int(offsets[-1])), offsets)

    @classmethod
    def joined(cls, parts: Sequence["Ragged"]) -> "Ragged":
        """The rows of all parts, one behind the other."""
        offsets = np.zeros(sum(map(len, parts)) + 1, np.int64)
        np.cumsum(np.concatenate([part.lengths for part in parts]), out=offsets[1:])
        return cls(np.concatenate([part.ids for part in parts]), offsets)

    def fingerprint(self, crc: int = 0) -> int:
        """A checksum of all rows, going on from another one."""
        return zlib.crc32(self.offsets.tobytes(), zlib.crc32(self.ids.tobytes(), crc))


@runtime_checkable
class Rows(Protocol):
    """What pairs need of the ids of a side: a `Ragged`, or a `shards.RaggedShards`."""

    @property
    def lengths(self) -> Integer[np.ndarray, " rows"]:
        """Length of each row."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Int[np.ndarray, " length"]: ...

    def lengths_of(self, rows: Int[np.ndarray, " some"]) -> Int[np.ndarray, " some"]:
        """Lengths of some rows."""
        ...

    def fingerprint(self, crc: int = 0) -> int:
        """A checksum of all rows, going on from another one."""
        ...


@runtime_checkable
class Links(Protocol):
    """What pairs need of their links: a `links.TokenLinks`, or a `shards.LinkShards`."""

    @property
    def known(self) -> Bool[np.ndarray, " pairs"]:
        """Which pairs' links were given."""
        ...

    def __getitem__(self, pair: int) -> Int[np.ndarray, "links 4"]: ...

    def fingerprint(self) -> int:
        """A checksum of all links."""
        ...


@dataclass(frozen=True)
class EncodedPairs:
    """Tokenised pairs, within the maximal lengths, and what it took to make them fit.

    `source` is None for a language model's data, `links` unless they are asked for. `example` is
    the index in the source of each pair. `cut_sources` and `cut_targets` count texts that were
    shortened, `dropped` pairs that were left out, `total` all there were. `checksum` is that of the
    ids where it is known already.
    """

    source: Rows | None
    target: Rows
    example: Int[np.ndarray, " pairs"]
    total: int
    dropped: int
    cut_sources: int
    cut_targets: int
    links: Links | None = None
    checksum: int | None = None

    def __len__(self) -> int:
        return len(self.target)

    @property
    def source_lengths(self) -> Int[np.ndarray, " pairs"]:
        """Tokens of each source, EOS included; zeros when there is no source."""
        return np.zeros(len(self), np.int64) if self.source is None else self.source.lengths

    @property
    def target_lengths(self) -> Int[np.ndarray, " pairs"]:
        """Positions that each target takes in the decoder."""
        return self.target.lengths - 1

    def fingerprint(self) -> int:
        """A checksum of all ids and links; differs when text, tokenizer or lengths differ."""
        if self.links is None and self.checksum is not None:
            return self.checksum
        sides = (self.target,) if self.source is None else (self.source, self.target)
        crc = 0 if self.links is None else self.links.fingerprint()
        for side in sides:
            crc = side.fingerprint(crc)
        return crc

    def refuse_empty(self, source_len: int, target_len: int) -> None:
        """Logs what was dropped or cut.

        Raises:
            DataError: nothing is left.
        """
        report = self.report(source_len, target_len)
        if not len(self):
            raise DataError(f"no example is short enough: {report}")
        if report:
            _LOG.warning("%s", report)

    @property
    def cut(self) -> dict[str, int]:
        """How many texts were shortened, by their side."""
        return {"source": self.cut_sources, "target": self.cut_targets}

    def fitting(self, examples: Int[np.ndarray, " some"]) -> Int[np.ndarray, " some"]:
        """All: those that are too long were left out."""
        return examples

    def lengths_of(self, examples: Int[np.ndarray, " some"]) -> Lengths:
        """Tokens of the sources of some pairs, EOS included, and places of their targets in the decoder."""
        lengths = {"target": self.target.lengths_of(examples) - 1}
        if self.source is not None:
            lengths["source"] = self.source.lengths_of(examples)
        return lengths

    def fill(self, layout: Layout) -> Batch:
        """The batch of a layout: int32 arrays [rows, length], 0 wherever nothing stands.

        With gold links also `target_linked`, 1 where those of the pair are known; `target_links`
        [rows, length, LINKS_PER_TOKEN]: for each token that `target_in` holds, the places of its source
        tokens in the row of `source`; the rest is -1; and `linked_words`, the number of the word in its
        text of each linked token of `source`.
        """
        pairs = layout.examples.tolist()
        batch = lay_text(layout, "target", [self.target[pair] for pair in pairs], predicted=True)
        if self.source is not None:
            batch |= lay_text(layout, "source", [self.source[pair] for pair in pairs])
        if self.links is not None:
            self._fill_links(self.links, layout, batch)
        return batch

    def _fill_links(self, links: Links, layout: Layout, batch: Batch) -> None:
        targets = (layout.rows, layout.widths["target"])
        batch["target_linked"] = np.zeros(targets, np.int32)
        batch["target_links"] = np.full((*targets, LINKS_PER_TOKEN), -1, np.int32)
        batch["linked_words"] = np.zeros((layout.rows, layout.widths["source"]), np.int32)
        starts = (layout.starts[side].tolist() for side in ("source", "target"))
        for pair, row, source, target in zip(
            layout.examples.tolist(), layout.row.tolist(), *starts, strict=True
        ):
            token, rank, place, word = links[pair].T
            batch["target_links"][row, target + token, rank] = source + place
            batch["linked_words"][row, source + place] = word
            span = slice(target, target + len(self.target[pair]) - 1)
            batch["target_linked"][row, span] = links.known[pair]

    def report(self, source_len: int, target_len: int) -> str:
        """One line on over-long pairs, empty when all fit."""
        limit = f"longer than {source_len} source or {target_len} target tokens"
        if self.source is None:
            limit = f"longer than {target_len} tokens"
        parts = []
        if self.dropped:
            parts.append(f"dropped {self.dropped} of {self.total} examples {limit}")
        if self.cut_sources or self.cut_targets:
            parts.append(f"cut {self.cut_sources} sources and {self.cut_targets} targets {limit}")
        return "; ".join(parts)


@dataclass(frozen=True)
class Encoding:
    """How examples become tokens: the tokenizers, the longest that is let be, and what then.

    `target_tokenizer` None is `tokenizer`; `truncation` and `side` are those of `encode_pairs`.
    """

    tokenizer: Tokenizer
    target_tokenizer: Tokenizer | None = None
    source_len: int = 128
    target_len: int = 128
    truncation: str = "drop"
    side: str = "both"

    def __post_init__(self):
        if self.truncation not in ("drop", "cut"):
            raise DataError(f"truncation is {self.truncation!r}; expected 'drop' or 'cut'")
        if self.side not in ("both", "source", "target"):
            raise DataError(f"side is {self.side!r}; expected 'both', 'source' or 'target'")
        if self.target_len < 2 or (self.side == "both" and self.source_len < 2):
            lengths = f"{self.source_len} and {self.target_len}"
            raise DataError(f"lengths are {lengths}; expected at least 2")

    @property
    def output_tokenizer(self) -> Tokenizer:
        """That of the targets."""
        return self.target_tokenizer or self.tokenizer

    @property
    def widths(self) -> dict[str, int]:
        """The greatest lengths, of the sides that are kept."""
        both = {"source": self.source_len, "target": self.target_len}
        return both if self.side == "both" else {"target": self.target_len}

    def chunk(self, examples: Sequence[dict[str, Any]], first: int = 0) -> EncodedPairs:
        """Those of a few examples that fit, without links; `first` is the index of the first one."""
        both = self.side == "both"
        key = "source" if self.side == "source" else "target"
        targets = self.output_tokenizer.encode_batch([example[key] for example in examples])
        around = len(self.output_tokenizer.frame)
        long_target = np.array([len(ids) + around > self.target_len for ids in targets], bool)
        sources = long_source = None
        if both:
            sources = self.tokenizer.encode_batch([example["source"] for example in examples])
            around = len(self.tokenizer.frame)
            long_source = np.array([len(ids) + around > self.source_len for ids in sources], bool)
        long = long_target if long_source is None else long_target | long_source
        keep = np.flatnonzero(~long) if self.truncation == "drop" else np.arange(len(examples))
        source = None
        if sources is not None:
            text = Text(self.tokenizer, self.source_len)
            source = Ragged.of([text.framed(sources[i]) for i in keep])
        text = Text(self.output_tokenizer, self.target_len, predicted=True)
        return EncodedPairs(
            source=source,
            target=Ragged.of([text.framed(targets[i]) for i in keep]),
            example=first + keep,
            total=len(examples),
            dropped=len(examples) - len(keep),
            cut_sources=0 if long_source is None else int(long_source[keep].sum()),
            cut_targets=int(long_target[keep].sum()),
        )

    def chunks(
        self, source: Sequence[dict[str, Any]], start: int = 0, stop: int | None = None
    ) -> Iterator[EncodedPairs]:
        """Examples `start` to below `stop` of a source, a few thousand at a time."""
        stop = len(source) if stop is None else stop
        for first in range(start, stop, _CHUNK):
            indices = range(first, min(first + _CHUNK, stop))
            yield self.chunk([source[i] for i in indices], first)


def encode_pairs(
    source: Sequence[dict[str, Any]],
    tokenizer: Tokenizer,
    *,
    target_tokenizer: Tokenizer | None = None,
    source_len: int,
    target_len: int,
    truncation: str = "drop",
    side: str = "both",
    link_share: float = 0.0,
    seed: int = 0,
) -> EncodedPairs:
    """Tokenises a source; `side` "source" or "target" takes that text alone, as the target.

    Cutting a source keeps its EOS; cutting a target loses its EOS, so that nothing learns to stop
    there. Above 0, `link_share` is that of `links.encode_links`.

    Raises:
        DataError: the source is empty, no example fits, an option is unknown, or links are asked
            for and there are none.
    """
    encoding = Encoding(tokenizer, target_tokenizer, source_len, target_len, truncation, side)
    if not len(source):
        raise DataError("the data source has no examples")
    if link_share and side != "both":
        raise DataError(f"links join a source and a target; side is {side!r}")
    encoded = joined(list(encoding.chunks(source)))
    encoded.refuse_empty(source_len, target_len)
    if link_share:
        links = encode_links(
            source,
            encoded.example,
            tokenizer,
            encoding.output_tokenizer,
            source_len=source_len,
            target_len=target_len,
            share=link_share,
            seed=seed,
        )
        encoded = replace(encoded, links=links)
    return encoded


def joined(parts: Sequence[EncodedPairs]) -> EncodedPairs:
    """The pairs of all parts, one behind the other; they have no links yet."""
    sources = [part.source for part in parts if isinstance(part.source, Ragged)]
    return EncodedPairs(
        source=Ragged.joined(sources) if sources else None,
        target=Ragged.joined([part.target for part in parts if isinstance(part.target, Ragged)]),
        example=np.concatenate([part.example for part in parts]),
        total=sum(part.total for part in parts),
        dropped=sum(part.dropped for part in parts),
        cut_sources=sum(part.cut_sources for part in parts),
        cut_targets=sum(part.cut_targets for part in parts),
    )
