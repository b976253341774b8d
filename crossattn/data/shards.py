"""Token ids of a corpus on disk: written a shard at a time, read a row at a time.

What is known of every pair (its lengths, where it begins) is mapped into memory; the ids themselves are read
from their files when a batch asks for them, so that a process holds neither, however large the corpus is.
A file is written under another name, flushed to the disk and renamed: what has its name is whole.
"""

import contextlib
import os
import secrets
import socket
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Bool, Int, Integer

from crossattn.data.encoded import EncodedPairs, Encoding, Ragged
from crossattn.data.errors import DataUnavailable
from crossattn.data.links import choose_linked, links_in_batches

_HOST = socket.gethostname().replace(".", "-")
_READ = 2**22  # bytes of a file read at a time when all of it is
_LINK_COLUMNS = 4  # of a table of links

COUNTS = ("total", "dropped", "cut_sources", "cut_targets")
"""Of an `EncodedPairs`."""


@dataclass(frozen=True)
class RaggedShards:
    """Rows of different lengths in files, to be read like a `Ragged`.

    Attributes:
      files: one a shard, ids of one row behind those of another.
      edges: rows before each shard, and of all.
      lengths: of every row.
      starts: ids before it in its file.
      dtype: of the ids in the files.
      columns: numbers that an element of a row has.
    """

    files: tuple["ShardFile", ...]
    edges: Int[np.ndarray, " edges"]
    lengths: Integer[np.ndarray, " rows"]
    starts: Int[np.ndarray, " rows"]
    dtype: np.dtype
    columns: int = 1

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> np.ndarray:
        shard = int(np.searchsorted(self.edges, row, "right")) - 1
        size = self.dtype.itemsize * self.columns
        raw = self.files[shard].read(int(self.lengths[row]) * size, int(self.starts[row]) * size)
        return np.frombuffer(raw, self.dtype).astype(np.int32)

    def lengths_of(self, rows: Int[np.ndarray, " some"]) -> Int[np.ndarray, " some"]:
        """Lengths of some rows."""
        return self.lengths[rows].astype(np.int64)

    def fingerprint(self, crc: int = 0) -> int:
        """That of the same rows in a `Ragged`, going on from another checksum."""
        for file in self.files:
            for raw in file.pieces(_READ):
                crc = zlib.crc32(np.frombuffer(raw, self.dtype).astype(np.int32).tobytes(), crc)
        crc, end = zlib.crc32(np.zeros(1, np.int64).tobytes(), crc), 0
        for first in range(0, len(self), _READ // 8):
            offsets = end + np.cumsum(self.lengths[first : first + _READ // 8], dtype=np.int64)
            crc, end = zlib.crc32(offsets.tobytes(), crc), int(offsets[-1])
        return crc


class ShardFile:
    """A file that is opened when it is first read, and shared by threads."""

    def __init__(self, path: Path):
        self.path = path
        self._handle: int | None = None

    def read(self, size: int, start: int) -> bytes:
        """So many bytes from a place on.

        Raises:
          DataUnavailable: the file is gone, or shorter.
        """
        try:
            if self._handle is None:
                handle = os.open(self.path, os.O_RDONLY)
                weakref.finalize(self, os.close, handle)
                self._handle = handle
            raw = os.pread(self._handle, size, start)
        except OSError as error:
            raise self._broken(str(error.strerror)) from None
        if len(raw) != size:
            raise self._broken("it is cut short")
        return raw

    def pieces(self, size: int) -> Iterator[bytes]:
        """All of it, so many bytes at a time."""
        end = self.path.stat().st_size
        for start in range(0, end, size):
            yield self.read(min(size, end - start), start)

    def _broken(self, reason: str) -> DataUnavailable:
        return DataUnavailable(
            f"{self.path} cannot be read ({reason}); start again to prepare it anew"
        )


@dataclass(frozen=True)
class LinkShards:
    """Links of all pairs in files, to be read like `TokenLinks`; `known` says whose are given."""

    rows: RaggedShards
    known: Bool[np.ndarray, " pairs"]

    def __getitem__(self, pair: int) -> Int[np.ndarray, "links 4"]:
        if not self.known[pair]:
            return np.zeros((0, _LINK_COLUMNS), np.int32)
        return self.rows[pair].reshape(-1, _LINK_COLUMNS)

    def fingerprint(self) -> int:
        """That of the same links in `TokenLinks`."""
        crc = zlib.crc32(self.known.tobytes())
        for shard, file in enumerate(self.rows.files):
            mine = slice(*self.rows.edges[shard : shard + 2])
            raw = b"".join(file.pieces(_READ))
            table = np.frombuffer(raw, np.int32).reshape(-1, _LINK_COLUMNS)
            given = np.repeat(self.known[mine], self.rows.lengths[mine])
            crc = zlib.crc32(table[given].tobytes(), crc)
        return crc


def write_shard(
    folder: Path,
    shard: str,
    encoding: Encoding,
    source: Sequence[dict[str, Any]],
    indices: range,
    *,
    links: bool = False,
    done: Callable[[int], Any] = lambda count: None,
) -> None:
    """Writes what becomes of the examples of these indices; the shard's index comes last.

    Args:
      shard: its name, which its files end with.
      links: whether gold links are kept too, of all examples that have any.
      done: is told how many examples more are written.
    """
    sides = sides_of(encoding, links)
    index: dict[str, list[np.ndarray]] = {name: [] for name in (*sides, "counts")}
    if links:
        index |= {"example": [], "linked": []}
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(written(folder / f"{name}-{shard}")) for name in sides}
        first = indices.start
        for part in encoding.chunks(source, indices.start, indices.stop):
            for name in ("source", "target"):
                if name in sides:
                    side = getattr(part, name)
                    files[name].write(side.ids.astype(dtype_of(encoding, name)).tobytes())
                    index[name].append(side.lengths.astype(np.int32))
            if links:
                tables = [_links(source[i], encoding) for i in part.example.tolist()]
                files["links"].write(b"".join(table.tobytes() for table in tables))
                index["links"].append(np.array([len(table) for table in tables], np.int32))
                index["example"].append(part.example)
                those = range(first, first + part.total)
                index["linked"].append(np.array([_has_links(source[i]) for i in those]))
            index["counts"].append(np.array([[getattr(part, name) for name in COUNTS]]))
            first += part.total
            done(part.total)
    arrays: dict[str, Any] = {name: np.concatenate(pieces) for name, pieces in index.items()}
    with written(folder / f"index-{shard}") as file:
        np.savez(file, **arrays)


def sides_of(encoding: Encoding, links: bool) -> list[str]:
    """What each pair has a row of."""
    both = encoding.side == "both"
    return [*(["source"] if both else []), "target", *(["links"] if links else [])]


def dtype_of(encoding: Encoding, side: str) -> np.dtype:
    """Of the ids of a side in its files: the smallest that holds the vocabulary."""
    tokenizer = encoding.tokenizer if side == "source" else encoding.output_tokenizer
    short = side != "links" and tokenizer.vocab_size <= 2**16
    return np.dtype(np.uint16 if short else np.int32)


def _has_links(example: dict[str, Any]) -> bool:
    return len(example.get("links", ())) > 0


def _links(example: dict[str, Any], encoding: Encoding) -> Int[np.ndarray, "links 4"]:
    if not _has_links(example):
        return np.zeros((0, _LINK_COLUMNS), np.int32)
    lengths = encoding.source_len, encoding.target_len
    return links_in_batches(example, encoding.tokenizer, encoding.output_tokenizer, *lengths)


def write_index(
    folder: Path, shards: Sequence[str], encoding: Encoding, links: bool
) -> dict[str, Any]:
    """Writes for all shards together what is mapped into memory, and returns what a manifest says.

    Those are for each side `SIDE-lengths.npy` and `SIDE-starts.npy`, and with links `example.npy`, the index
    of each pair in the source, and `linked.npy`, which examples of the source have links.
    """
    read = partial(_column, folder, shards)
    counts = np.concatenate(list(read("counts"))).sum(0).tolist()
    pairs = [len(targets) for targets in read("target")]
    record: dict[str, Any] = dict(zip(COUNTS, counts, strict=True)) | {"pairs": pairs}
    total = sum(pairs)
    for side in sides_of(encoding, links):
        short = side != "links" and max(encoding.source_len, encoding.target_len + 1) < 2**16
        dtype = np.uint16 if short else np.int32
        _write_column(folder / f"{side}-lengths.npy", total, dtype, read(side))
        starts = (np.cumsum(targets, dtype=np.int64) - targets for targets in read(side))
        _write_column(folder / f"{side}-starts.npy", total, np.int64, starts)
    if links:
        _write_column(folder / "example.npy", total, np.int64, read("example"))
        _write_column(folder / "linked.npy", record["total"], bool, read("linked"))
    if total:
        record["fingerprint"] = read_shards(folder, shards, encoding, record).fingerprint()
    return record


def _column(folder: Path, shards: Sequence[str], name: str) -> Iterator[np.ndarray]:
    for shard in shards:
        with np.load(folder / f"index-{shard}", allow_pickle=False) as index:
            yield index[name]


def _write_column(path: Path, size: int, dtype: Any, parts: Iterator[np.ndarray]) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False}
    with written(path) as file:
        np.lib.format.write_array_header_1_0(file, header | {"shape": (size,)})
        for part in parts:
            file.write(part.astype(dtype).tobytes())


def read_shards(
    folder: Path,
    shards: Sequence[str],
    encoding: Encoding,
    record: dict[str, Any],
    *,
    link_share: float = 0.0,
    seed: int = 0,
) -> EncodedPairs:
    """The pairs of shards, whose `record` is that of `write_index`, as `encode_pairs` would give them.

    Raises:
      DataError: links are asked for and there are none, or the share is out of range.
    """
    counts = {name: record[name] for name in COUNTS}
    if not sum(record["pairs"]):
        none = Ragged.of([])
        source = none if encoding.side == "both" else None
        return EncodedPairs(source, none, np.zeros(0, np.int64), **counts)
    edges = np.cumsum([0, *record["pairs"]])
    mapped = partial(_mapped, folder)

    def rows(side: str) -> RaggedShards:
        return RaggedShards(
            files=tuple(ShardFile(folder / f"{side}-{shard}") for shard in shards),
            edges=edges,
            lengths=mapped(f"{side}-lengths"),
            starts=mapped(f"{side}-starts"),
            dtype=dtype_of(encoding, side),
            columns=_LINK_COLUMNS if side == "links" else 1,
        )

    links = None
    if link_share:
        chosen = np.zeros(record["total"], bool)
        chosen[choose_linked(np.flatnonzero(mapped("linked")), link_share, seed)] = True
        links = LinkShards(rows("links"), chosen[mapped("example")])
    return EncodedPairs(
        source=rows("source") if encoding.side == "both" else None,
        target=rows("target"),
        example=mapped("example") if link_share else np.zeros(0, np.int64),
        **counts,
        links=links,
        checksum=record.get("fingerprint"),
    )


def _mapped(folder: Path, name: str) -> np.ndarray:
    path = folder / f"{name}.npy"
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataUnavailable(f"{path} cannot be read ({error}); remove its folder") from None


@contextlib.contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name when it is whole and on the disk, and not at all after an error."""
    name = f".{path.name}.{_HOST}-{os.getpid()}-{secrets.token_hex(4)}.partial"
    partial_path = path.with_name(name)
    try:
        with partial_path.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial_path, path)
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except BaseException:
        partial_path.unlink(missing_ok=True)
        raise


def remove_partial(folder: Path) -> None:
    """Removes what this machine's processes have not finished; for whoever is alone in the folder."""
    for path in folder.glob(f".*.{_HOST}-*.partial"):
        path.unlink(missing_ok=True)
