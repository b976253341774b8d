"""Streams: examples from files that need not all be there yet, packed as they come, without end.

The one thing to know: the examples are dealt to lanes like cards, and each lane is a stream of its own that
fills its own rows of every batch. A process reads its lanes alone, so tokenising is shared out, and a
batch is the same however many processes fill it. A lane's state is the name of a shard and four numbers.

A pattern such as "/data/*.jsonl" or "/data/{split}-*.array_record" names shards, which are read in the order
of their names. New ones may come while training, with names behind those that are there, and a JSONL file may
grow: a line counts once its line feed is there. ArrayRecord files hold a JSON object a record and are renamed
to their names when they are whole. Without "{split}", of the first 20,000 examples of the first shard every
20th is a test example, the next one a validation example, and neither is trained on.
"""

import functools
import glob
import logging
import math
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordReader

from crossattn.data.encoded import EncodedPairs, Encoding
from crossattn.data.errors import DataError
from crossattn.data.packing import Batch, Layout, plan_packed
from crossattn.data.pipeline import TrainIterator, check_batches
from crossattn.data.textfiles import check_text, json_record, texts_of

_LOG = logging.getLogger(__name__)
_EVERY, _HELD_OUT = 20, 20_000  # see above
_HEAD = 10_000  # examples of a split that are read to evaluate
_CHUNK, _RECORDS = 2**20, 4096  # bytes, or records, that are looked at together
_MOST_LANES = 16
_LEAST_WINDOW = 64
_PATIENCE = 1000  # windows in which nothing is short enough
_SECONDS = 1.0  # from one look for new shards to the next
_LINES, _RECORD_FILES = (".jsonl", ".ndjson"), (".array_record", ".arrayrecord")


@dataclass(frozen=True)
class Stream:
    """Where examples come from.

    Attributes:
      pattern: of the shards' names; "{split}" in it becomes the name of the split.
      source_column, target_column: the keys of both texts; the same one for a text without a partner.
      at_end: "repeat" begins again after the last shard; "wait" waits for more.
      lanes: into how many the examples are dealt, a divisor of the rows of a batch and a multiple of
        the processes; None is the largest power of two that divides the rows, up to 16.
    """

    pattern: str
    source_column: str = "source"
    target_column: str = "target"
    at_end: str = "repeat"
    lanes: int | None = None

    @classmethod
    def named(cls, pattern: str, *, reverse: bool = False, **options: Any) -> "Stream":
        """The stream of a pattern and options; `reverse` exchanges the columns.

        Raises:
          DataError: there is no such option, or it is out of range.
        """
        try:
            stream = cls(pattern, **options)
        except TypeError as error:
            raise DataError(f"stream:{pattern}: {error}") from None
        if stream.at_end not in ("repeat", "wait"):
            raise DataError(f"at_end is {stream.at_end!r}; expected 'repeat' or 'wait'")
        if not reverse:
            return stream
        return replace(
            stream, source_column=stream.target_column, target_column=stream.source_column
        )

    def shards(self, split: str) -> list[Path]:
        """The files that there are now, in the order of their names."""
        paths = sorted(glob.glob(self.pattern.replace("{split}", split), recursive=True))
        for name in paths:
            if not name.endswith(_LINES + _RECORD_FILES):
                known = ", ".join(_LINES + _RECORD_FILES)
                raise DataError(f"{name} is no shard of a stream; expected names in {known}")
        return [Path(name) for name in paths]

    @property
    def base(self) -> str:
        """The folder that names of shards in states are relative to: without patterns in it."""
        plain = re.split(r"[*?\[]|\{split\}", self.pattern)[0]
        return os.path.dirname(plain)

    def head(self, split: str, count: int = _HEAD) -> list[dict[str, str]]:
        """The first examples of a split that there are now, at most `count`.

        Raises:
          DataError: there is none, or one is wrong.
        """
        records: list[dict[str, str]] = []
        dealt, training = "{split}" not in self.pattern, split == "train"
        for number, shard in enumerate(self.shards(split)):
            if dealt and not training and number:
                break
            for line, raw in _lines_of(shard, last=not dealt and not training):
                if len(records) == count or (dealt and not training and line >= _HELD_OUT):
                    break
                if raw.strip() and split == (_split_of(number, line) if dealt else split):
                    records.append(self.example(raw, shard, line))
        if not records:
            name = self.pattern.replace("{split}", split)
            raise DataError(
                f"stream:{name} has no {split} examples; expected whole lines, or records"
            )
        return records

    def example(self, raw: bytes, shard: Path, line: int) -> dict[str, str]:
        """The example that a line, or a record, holds.

        Raises:
          DataError: it is not UTF-8 or JSON, or lacks a text.
        """
        place = f"{shard}, line {line + 1}"
        try:
            record = json_record(raw.decode("utf-8"), place)
        except UnicodeDecodeError as error:
            raise DataError(f"{place}: not UTF-8 (byte 0x{raw[error.start]:02X})") from None
        texts = texts_of(record, (self.source_column, self.target_column), place)
        for text, side in zip(texts, ("source", "target"), strict=True):
            check_text(text, side, place)
        return {"id": f"{shard.name}:{line + 1}", "source": texts[0], "target": texts[1]}

    def identity(self) -> dict[str, Any]:
        """What it begins with; the same as long as shards are only added behind the first 64 KiB."""
        begin = b""
        if shards := self.shards("train"):
            with shards[0].open("rb") as file:
                begin = file.read(2**16)
        return {"stream": asdict(self), "begin": zlib.crc32(begin)}


def _split_of(shard: int, line: int) -> str:
    """The split that an example falls to, by the number of its shard and its own in that."""
    if shard or line >= _HELD_OUT:
        return "train"
    return {0: "test", 1: "validation"}.get(line % _EVERY, "train")


def stream_batches(
    stream: Stream,
    encoding: Encoding,
    *,
    batch_size: int = 16,
    seed: int = 0,
    process_index: int = 0,
    process_count: int = 1,
    batch_multiple: int = 1,
    window: int = 8192,
    prefetch: int = 2,
) -> "StreamIterator":
    """Packed batches of a stream, as `pipeline.make_train_iterator` makes them of a corpus.

    Each lane packs so many of its examples together that all lanes hold `window`; the state says where
    that window began and how many of its batches are taken.

    Raises:
      DataError: an option is out of range, or there are no shards and none are waited for.
    """
    lanes = stream.lanes or math.gcd(batch_size, _MOST_LANES)
    multiple = int(np.lcm(process_count, batch_multiple))
    check_batches("pack", batch_size, multiple, process_index, process_count, window)
    if lanes < 1 or batch_size % lanes or lanes % process_count:
        raise DataError(
            f"lanes is {lanes}; expected a divisor of batch_size, {batch_size}, and a multiple of the number "
            f"of processes, {process_count}"
        )
    if stream.at_end == "repeat" and not stream.shards("train"):
        raise DataError(f"stream:{stream.pattern} has no shards yet; at_end 'wait' waits for some")
    shape = {"rows": batch_size // lanes, "widths": encoding.widths}
    size, stop = max(window // lanes, _LEAST_WINDOW), threading.Event()
    own = lanes // process_count
    mine = range(process_index * own, (process_index + 1) * own)
    parts = []
    for lane in mine:
        windows = _Lane(functools.partial(_LaneIterator, stream, lane, lanes, size, stop))
        pack = _Pack(encoding, functools.partial(plan_packed, **shape), [seed % 2**32, lane])
        parts.append(grain.experimental.FlatMapIterDataset(windows, pack))
    batches = grain.experimental.ZipIterDataset(parts).map(_joined)
    if prefetch:
        batches = grain.experimental.ThreadPrefetchIterDataset(
            batches, prefetch_buffer_size=prefetch
        )
    known = [shape, lanes, size, seed, encoding.truncation, encoding.side, stream.source_column]
    tokenizers = [encoding.tokenizer.to_json(), encoding.output_tokenizer.to_json()]
    identity = f"stream {known} {stream.target_column} {tokenizers}"
    return StreamIterator(batches, mine, zlib.crc32(identity.encode()), stop)


class StreamIterator(TrainIterator):
    """Iterator of batches of a stream; its state is that of its lanes, by their numbers.

    The states of several processes are one when their lanes are put together, from which any number of
    processes goes on.
    """

    def __init__(
        self, dataset: grain.IterDataset, lanes: range, fingerprint: int, stop: threading.Event
    ):
        super().__init__(dataset, None, fingerprint, stop)
        self._lanes = lanes

    def get_state(self) -> dict[str, Any]:
        """A JSON-able state, from which the batch after the last one handed out comes next."""
        state = super().get_state()
        parts = state.pop("stream")["parents"]
        return state | {"lanes": dict(zip(map(str, self._lanes), parts, strict=True))}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from a state that has the lanes of this process.

        Raises:
          DataError: it has not, or belongs to another stream or other options.
        """
        missing = [lane for lane in self._lanes if str(lane) not in state.get("lanes", {})]
        if missing and state.get("fingerprint") == self._fingerprint:
            raise DataError(
                f"the saved state of the stream lacks lane {missing[0]}; it is that of one process of "
                "several, and goes on with as many"
            )
        parts = [state.get("lanes", {}).get(str(lane)) for lane in self._lanes]
        kept = {"fingerprint": state.get("fingerprint"), "stream": {"parents": parts}}
        super().set_state(kept)


def _joined(parts: Sequence[tuple[Layout, EncodedPairs]]) -> Batch:
    filled = [encoded.fill(layout) for layout, encoded in parts]
    return {name: np.concatenate([part[name] for part in filled]) for name in filled[0]}


class _Pack(grain.experimental.FlatMapTransform):
    """What a window of a lane becomes: layouts, each with the tokens that fill it."""

    def __init__(self, encoding: Encoding, plan: Any, seed: list[int]):
        self._encoding, self._plan, self._seed = encoding, plan, seed
        self._empty = 0

    def flat_map(
        self, element: tuple[int, list[dict[str, str]]]
    ) -> list[tuple[Layout, EncodedPairs]]:
        window, examples = element
        encoded = self._encoding.chunk(examples)
        self._empty = 0 if len(encoded) else self._empty + 1
        if self._empty > _PATIENCE:
            report = encoded.report(self._encoding.source_len, self._encoding.target_len)
            raise DataError(f"no example of the stream is short enough: {report}")
        pairs, rng = np.arange(len(encoded)), np.random.default_rng([*self._seed, window])
        layouts = self._plan(pairs, encoded.lengths_of(pairs), rng=rng)
        return [(layout, encoded) for layout in layouts]


@dataclass
class _Place:
    """Where a lane stands: in a shard, behind so many bytes or records and lines of it.

    `seen` counts the lines of all shards and rounds, `window` the windows that are handed out.
    """

    shard: str = ""
    offset: int = 0
    line: int = 0
    seen: int = 0
    window: int = 0


class _Lane(grain.IterDataset):
    """Windows of the examples of one lane, each with its number."""

    def __init__(self, begin: Callable[[], "_LaneIterator"]):
        super().__init__()
        self._begin = begin

    def __iter__(self) -> "_LaneIterator":
        return self._begin()


class _LaneIterator(grain.DatasetIterator):
    """Takes the lines whose number, over all shards and rounds, is that of the lane modulo the lanes.

    Counted over rounds, every lane gets its share of however few lines there are.
    """

    def __init__(self, stream: Stream, lane: int, lanes: int, size: int, stop: threading.Event):
        super().__init__()
        self._stream, self._lane, self._lanes = stream, lane, lanes
        self._size, self._stop = size, stop
        self._place, self._first, self._told = _Place(), "", False
        self._shard: _Shard | None = None

    def __next__(self) -> tuple[int, list[dict[str, str]]]:
        window, place = self._place.window, replace(self._place)
        examples: list[dict[str, str]] = []
        rounds = 0
        while len(examples) < self._size:
            wanted = self._size - len(examples)
            taken = self._some(place, wanted)
            following = None if taken is not None else self._following(place)
            if following is not None and following > place.shard:
                taken = self._some(place, wanted, last=True)
            if taken is not None:
                examples += taken
                rounds = 0 if taken else rounds
            elif following is None:
                self._wait()
            else:
                rounds += following <= place.shard
                place.shard, place.offset, place.line = following, 0, 0
            if rounds > self._lanes + 1:
                raise DataError(f"stream:{self._stream.pattern} has no examples to train on")
        self._place = replace(place, window=window + 1)
        return window, examples

    def _some(self, place: _Place, wanted: int, last: bool = False) -> list | None:
        """Some examples from a place on, which moves behind them; None at the end of a shard."""
        if not place.shard:
            return None
        path = Path(self._stream.base, place.shard)
        if self._shard is None or self._shard.path != path:
            self._shard = _Shard(path)
        skipped = (self._lane - place.seen) % self._lanes
        lines, count, end = self._shard.read(place.offset, skipped, self._lanes, wanted, last)
        if not count:
            return None
        first, dealt = place.line, "{split}" not in self._stream.pattern
        place.offset, place.line, place.seen = end, place.line + count, place.seen + count
        number = 0 if place.shard == self._first else 1
        return [
            self._stream.example(raw, path, first + index)
            for index, raw in lines
            if raw.strip() and not (dealt and _split_of(number, first + index) != "train")
        ]

    def _following(self, place: _Place) -> str | None:
        """The next shard, or the first one again; None where more is to be waited for."""
        base = self._stream.base or "."
        names = [os.path.relpath(shard, base) for shard in self._stream.shards("train")]
        self._first = names[0] if names else ""
        later = [name for name in names if name > place.shard]
        if not later and self._stream.at_end == "wait":
            return None
        if not names:
            raise DataError(f"stream:{self._stream.pattern} has lost all its shards")
        return later[0] if later else names[0]

    def _wait(self) -> None:
        if not self._told:
            _LOG.warning("waiting for more of stream:%s", self._stream.pattern)
        self._told = True
        if self._stop.wait(_SECONDS):
            raise StopIteration

    def get_state(self) -> dict[str, Any]:
        """The place before the next window."""
        return asdict(self._place)

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a place."""
        self._place = _Place(**state)


class _Shard:
    """A file of lines, or of records, of which every so manieth is read from a place on."""

    def __init__(self, path: Path):
        self.path = path
        self._records: ArrayRecordReader | None = None
        if path.name.endswith(_RECORD_FILES):
            self._records = ArrayRecordReader(
                str(path), "readahead_buffer_size:0,max_parallelism:0"
            )
            if not self._records.ok():
                raise DataError(
                    f"{path} is no whole ArrayRecord file; give one its name when it is finished"
                )

    def read(
        self, offset: int, skipped: int, stride: int, wanted: int, last: bool
    ) -> tuple[list[tuple[int, bytes]], int, int]:
        """Some records with their numbers from the place on; how many it has gone by; where that ends.

        Args:
          offset: bytes of lines, or records, that come before.
          skipped: records before the first that is wanted.
          stride: from one that is wanted to the next.
          wanted: of which so many are enough.
          last: whether text behind the last line feed is a line.

        Raises:
          DataError: it cannot be read, or is shorter than that.
        """
        if self._records is not None:
            return self._read_records(offset, skipped, stride, wanted)
        data, complete = self._chunk(offset)
        ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
        if last and complete and data and not data.endswith(b"\n"):
            ends = np.append(ends, len(data))
        own = range(skipped, len(ends), stride)[:wanted]
        count = own[-1] + 1 if len(own) == wanted else len(ends)
        starts = np.concatenate([[0], ends + 1])
        lines = [(k, data[starts[k] : ends[k]]) for k in own]
        return lines, count, offset + min(int(starts[count]), len(data))

    def _chunk(self, offset: int) -> tuple[bytes, bool]:
        """Bytes from a place on, a whole line at least, and whether they go to the end."""
        size = _CHUNK
        try:
            with self.path.open("rb") as file:
                if offset > os.fstat(file.fileno()).st_size:
                    raise DataError(f"{self.path} is shorter than it was; a stream only grows")
                while True:
                    file.seek(offset)
                    data = file.read(size)
                    if len(data) < size or b"\n" in data:
                        return data, len(data) < size
                    size *= 4
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}") from None

    def _read_records(
        self, offset: int, skipped: int, stride: int, wanted: int
    ) -> tuple[list[tuple[int, bytes]], int, int]:
        total = self._records.num_records()
        own = range(skipped, min(_RECORDS, total - offset), stride)[:wanted]
        count = own[-1] + 1 if len(own) == wanted else max(min(_RECORDS, total - offset), 0)
        raw = self._records.read([offset + k for k in own]) if len(own) else []
        return list(zip(own, raw, strict=True)), count, offset + count


def _lines_of(shard: Path, last: bool) -> Iterator[tuple[int, bytes]]:
    """All lines, or records, of a shard with their numbers."""
    file, offset, line, count = _Shard(shard), 0, 0, 1
    while count:
        lines, count, offset = file.read(offset, 0, 1, _RECORDS, last)
        yield from ((line + index, raw) for index, raw in lines)
        line += count
