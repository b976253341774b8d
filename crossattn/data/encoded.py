"""Token ids of a whole source in flat arrays, made once, so that a training batch is only copying.

A source text ends with EOS. A target is stored as BOS, ids, EOS; the decoder reads all but the last
and predicts all but the first.
"""

import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from crossattn.data.errors import DataError
from crossattn.data.links import TokenLinks, encode_links
from crossattn.data.tokenizers import BOS, EOS, Tokenizer

_LOG = logging.getLogger(__name__)
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

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> "Ragged":
        """Packs lists of ids."""
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        flat = np.fromiter((i for row in rows for i in row), np.int32, count=int(offsets[-1]))
        return cls(flat, offsets)


@dataclass(frozen=True)
class EncodedPairs:
    """Tokenised pairs, within the maximal lengths, and what it took to make them fit.

    `source` is None for a language model's data, `links` unless they are asked for. `example` is
    the index in the source of each pair. `cut_sources` and `cut_targets` count texts that were
    shortened, `dropped` pairs that were left out, `total` all there were.
    """

    source: Ragged | None
    target: Ragged
    example: Int[np.ndarray, " pairs"]
    total: int
    dropped: int
    cut_sources: int
    cut_targets: int
    links: TokenLinks | None = None

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
        sides = (self.target,) if self.source is None else (self.source, self.target)
        crc = 0 if self.links is None else self.links.fingerprint()
        for side in sides:
            crc = zlib.crc32(side.offsets.tobytes(), zlib.crc32(side.ids.tobytes(), crc))
        return crc

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


def encode_pairs(
    source: Sequence[dict[str, Any]],
    tokenizer: Tokenizer,
    *,
    target_tokenizer: Tokenizer | None = None,
    source_len: int,
    target_len: int,
    overlong: str = "drop",
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
    _check_options(source, source_len, target_len, overlong, side)
    if link_share and side != "both":
        raise DataError(f"links join a source and a target; side is {side!r}")
    sources: list[list[int]] = []
    targets: list[list[int]] = []
    for start in range(0, len(source), _CHUNK):
        examples = [source[i] for i in range(start, min(start + _CHUNK, len(source)))]
        if side == "both":
            sources += tokenizer.encode_batch([example["source"] for example in examples])
        key = "source" if side == "source" else "target"
        targets += (target_tokenizer or tokenizer).encode_batch([e[key] for e in examples])
    source_sizes = np.array([len(ids) + 1 for ids in sources] or [0] * len(targets))
    target_sizes = np.array([len(ids) + 1 for ids in targets])
    long_source = (source_sizes > source_len) if side == "both" else np.zeros(len(targets), bool)
    long_target = target_sizes > target_len
    fits = ~(long_source | long_target)
    keep = np.flatnonzero(fits) if overlong == "drop" else np.arange(len(targets))
    links = None
    if link_share:
        lengths = {"source_len": source_len, "target_len": target_len}
        chosen = {"share": link_share, "seed": seed}
        links = encode_links(
            source, keep, tokenizer, target_tokenizer or tokenizer, **lengths, **chosen
        )
    encoded = EncodedPairs(
        source=Ragged.of([sources[i][: source_len - 1] + [EOS] for i in keep]) if sources else None,
        target=Ragged.of([([BOS] + targets[i] + [EOS])[: target_len + 1] for i in keep]),
        example=keep,
        total=len(targets),
        dropped=len(targets) - len(keep),
        cut_sources=int(long_source[keep].sum()),
        cut_targets=int(long_target[keep].sum()),
        links=links,
    )
    report = encoded.report(source_len, target_len)
    if not len(encoded):
        raise DataError(f"no example is short enough: {report}")
    if report:
        _LOG.warning("%s", report)
    return encoded


def _check_options(
    source: Sequence, source_len: int, target_len: int, overlong: str, side: str
) -> None:
    if overlong not in ("drop", "cut"):
        raise DataError(f"overlong is {overlong!r}; expected 'drop' or 'cut'")
    if side not in ("both", "source", "target"):
        raise DataError(f"side is {side!r}; expected 'both', 'source' or 'target'")
    if not len(source):
        raise DataError("the data source has no examples")
    if target_len < 2 or (side == "both" and source_len < 2):
        raise DataError(f"lengths are {source_len} and {target_len}; expected at least 2")
