"""Corpora prepared once, so that training begins in seconds whatever their size.

Several processes prepare examples, a shard each at a time, in a folder named by source, features and options;
`manifest.json` is written last, and without it there is no corpus. After a kill the same call keeps the whole
shards, and ends with the same bytes. One process at a time prepares a folder and others wait for it; hosts
that do not share the folder prepare their own. Numbers are in flat files: the index of ArrayRecord takes 55
bytes of memory an example.
"""

import bisect
import contextlib
import hashlib
import json
import logging
import os
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock, Timeout
from loky import BrokenProcessPool, ProcessPoolExecutor
from tqdm import tqdm

from crossattn.data import fetch, sources
from crossattn.data.errors import DataError, DataUnavailable
from crossattn.data.examples import refuse, widths_of
from crossattn.data.pairs import pair_examples
from crossattn.data.prepared import (
    Prepared,
    Storable,
    checksum,
    dtype_of,
    parts,
    starts_of,
)
from crossattn.data.tokenizers import Tokenizer
from crossattn.files import whole

_LOG = logging.getLogger(__name__)
_VERSION = 3  # of the files in a folder
_SHARD, _MOST_SHARDS = 2**16, 128
_MANIFEST = "manifest.json"
_READ = 2**22  # bytes read at a time of a whole file


@dataclass(frozen=True)
class PreparedCorpus:
    """One split of a source of pairs under its features, the content of a folder.

    Attributes:
      name, opening: the arguments of `sources.open_source`; `opening` is all but the name.
      features: of `pairs.pair_features`.
      truncation: "drop" or "cut", for texts longer than a feature lets them be.
      side: of `pairs.pair_examples`.
    """

    name: str
    features: Mapping[str, Storable]
    opening: Mapping[str, Any] = field(default_factory=dict)
    truncation: str = "drop"
    side: str = "both"

    @cached_property
    def description(self) -> dict[str, Any]:
        """The properties that tell it from others, JSON-able."""
        return {
            "version": _VERSION,
            "source": sources.identity(self.name, **self.opening),
            "features": {name: _described(feature) for name, feature in self.features.items()},
            "truncation": self.truncation,
            "side": self.side,
        }

    @cached_property
    def folder(self) -> Path:
        """Its folder, which may not be there yet."""
        key = hashlib.sha256(json.dumps(self.description, sort_keys=True).encode()).hexdigest()
        split = self.opening.get("split", "train")
        title, split = (re.sub(r"[^A-Za-z0-9]+", "-", x) for x in (Path(self.name).name, split))
        root = prepared_dir(self.opening.get("data_dir"))
        return root / f"{title.strip('-')[:40]}-{split[:20]}-{key[:16]}"

    def examples(self) -> Sequence[Mapping[str, Any]]:
        """Returns its examples, as its features read them."""
        source = sources.open_source(self.name, **self.opening)
        return pair_examples(source, self.side, "links" in self.features)


def _described(feature: Any) -> list[str]:
    """Describes a feature, its tokenizers as checksums."""
    inside = [vars(each) for each in (feature, *vars(feature).values()) if hasattr(each, "lengths")]
    tokenizers = [each["tokenizer"].to_json() for each in inside if "tokenizer" in each]
    return [repr(feature), *(hashlib.sha256(text.encode()).hexdigest() for text in tokenizers)]


def prepared_dir(data_dir: str | os.PathLike | None = None) -> Path:
    """Returns the folder of all prepared corpora."""
    return fetch.cache_dir(data_dir) / "prepared"


def is_prepared(corpus: PreparedCorpus) -> bool:
    """Returns whether its folder is whole: no file is missing or of another size than was written."""
    manifest = _manifest(corpus.folder)
    return manifest is not None and not _wrong_files(corpus.folder, manifest)


def prepare(corpus: PreparedCorpus, workers: int | None = None) -> Path:
    """Prepares a corpus, unless that is done, and returns its folder.

    Args:
      workers: processes; default the cores that this one may use.

    Raises:
      DataError: the data are wrong, or no example is short enough.
      DataUnavailable: the data cannot be read, the folder cannot be written, or a process died.
    """
    folder = corpus.folder
    if is_prepared(corpus):
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            if not is_prepared(corpus):  # by the process that held the lock
                _prepare(corpus, workers or len(os.sched_getaffinity(0)))
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


def open_prepared(corpus: PreparedCorpus) -> Prepared:
    """Opens a prepared corpus; its numbers stay on disk.

    Raises:
      DataError: no example was short enough.
      DataUnavailable: it is not prepared.
    """
    folder, manifest = corpus.folder, _manifest(corpus.folder)
    if manifest is None:
        raise DataUnavailable(f"there is no prepared corpus in {folder}; prepare it first")
    files = [_File(folder / f"numbers-{shard}") for shard in manifest["shards"]]
    ends, dtype = np.cumsum(manifest["numbers"]).tolist(), dtype_of(corpus.features)

    def read(start: int, size: int) -> np.ndarray:
        shard = bisect.bisect_right(ends, start)
        first = start - (ends[shard - 1] if shard else 0)
        return np.frombuffer(
            files[shard].read(size * dtype.itemsize, first * dtype.itemsize), dtype
        )

    prepared = Prepared(
        features=corpus.features,
        lengths={name: _mapped(folder, f"lengths-{name}") for name in corpus.features},
        starts=_mapped(folder, "starts"),
        read=read,
        example=_mapped(folder, "example"),
        linked=_mapped(folder, "linked"),
        **{name: manifest[name] for name in ("total", "cut", "checksum")},
    )
    prepared.refuse_empty()
    return prepared


def keep_tokenizer(path: Path, train: Callable[[], Tokenizer]) -> Tokenizer:
    """Returns the tokenizer in a file of `prepared_dir`; the first process that asks trains it.

    Raises:
      DataUnavailable: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path):
            if not path.exists():
                train().save(path.parent, path.stem)
    except OSError as error:
        raise _unwritable(path.parent, error) from error
    return Tokenizer.load(path.parent, path.stem)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(timeout=1)
    except Timeout:
        _LOG.warning("waiting for another process that makes %s", path)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _prepare(corpus: PreparedCorpus, workers: int) -> None:
    folder = corpus.folder
    _remove_partial(folder)
    _forget_wrong_files(folder)
    source = corpus.examples()
    refuse(source, corpus.truncation)
    shards = shard_indices(len(source))
    missing = {name: part for name, part in shards.items() if not _is_whole(folder, name)}
    there = len(source) - sum(map(len, missing.values()))
    with tqdm(
        total=len(source),
        initial=there,
        desc=f"preparing {corpus.name}",
        unit=" examples",
        disable=None,
    ) as bar:
        if workers == 1 or len(missing) <= 1:
            for name, indices in missing.items():
                bar.update(_write_shard(corpus, source, name, indices))
        else:
            del source  # each process has its own
            for done in _by_processes(corpus, missing, min(workers, len(missing))):
                bar.update(done)
    if sources.identity(corpus.name, **corpus.opening) != corpus.description["source"]:
        raise DataError(f"{corpus.name} changed while it was being prepared; start again")
    record = _write_columns(corpus, list(shards))
    _remove_partial(folder)  # of processes that outlived a killed one by a moment
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    record |= {"shards": list(shards), "files": files, "corpus": corpus.description}
    with _written(folder / _MANIFEST) as file:
        file.write(json.dumps(record, indent=1).encode())


def shard_indices(examples: int) -> dict[str, range]:
    """Returns name and examples of each shard, which depend on the number of examples alone."""
    size = _SHARD * max(1, -(-examples // (_SHARD * _MOST_SHARDS)))
    count = -(-examples // size)
    return {
        f"{i:05}-of-{count:05}": range(i * size, min((i + 1) * size, examples))
        for i in range(count)
    }


def _write_shard(
    corpus: PreparedCorpus, source: Sequence[Mapping[str, Any]], shard: str, indices: range
) -> int:
    """Writes the prepared examples of these indices, the index last; returns the number of indices."""
    made = []
    with _written(corpus.folder / f"numbers-{shard}") as file:
        for part in parts(source, corpus.features, corpus.truncation, indices):
            file.write(part.numbers.tobytes())
            columns = {f"lengths-{name}": column for name, column in part.lengths.items()}
            columns |= {name: getattr(part, name) for name in ("sizes", "example", "linked")}
            counts = [part.total, len(part.numbers), *part.cut.values()]
            made.append(columns | {"counts": np.array([counts])})
    with _written(corpus.folder / f"index-{shard}") as file:
        columns: dict[str, Any] = {n: np.concatenate([each[n] for each in made]) for n in made[0]}
        np.savez(file, **columns)
    return len(indices)


def _is_whole(folder: Path, shard: str) -> bool:
    return all((folder / f"{part}-{shard}").exists() for part in ("numbers", "index"))


def _write_columns(corpus: PreparedCorpus, shards: Sequence[str]) -> dict[str, Any]:
    """Writes the arrays of all shards that are mapped into memory; returns entries of the manifest."""
    folder = corpus.folder

    def each(name: str) -> Iterator[np.ndarray]:
        for shard in shards:
            with np.load(folder / f"index-{shard}", allow_pickle=False) as index:
                yield index[name]

    counts = [counts.sum(0).tolist() for counts in each("counts")]
    total, numbers, *cut = np.sum(counts, 0).tolist()
    for name in (*(f"lengths-{name}" for name in corpus.features), "example", "linked"):
        _write_column(folder / f"{name}.npy", sum(map(len, each(name))), each(name))

    def starts() -> Iterator[np.ndarray]:
        first = 0
        for sizes in each("sizes"):
            edges = starts_of(corpus.features, sizes, first)
            first = int(edges[-1])
            yield edges[:-1]

    _write_column(folder / "starts.npy", sum(map(len, each("sizes"))), starts())
    mapped = {name: _mapped(folder, f"lengths-{name}") for name in corpus.features}
    pieces = (raw for shard in shards for raw in _File(folder / f"numbers-{shard}").pieces())
    return {
        "total": total,
        "numbers": [count[1] for count in counts],
        "cut": dict(zip(widths_of(corpus.features), cut, strict=True)),
        "checksum": checksum(mapped, pieces),
    }


def _write_column(path: Path, size: int, columns: Iterator[np.ndarray]) -> None:
    """Writes an array of `size` numbers in parts, one of which is in memory at a time."""
    first = next(columns)
    header = {"descr": first.dtype.str, "fortran_order": False, "shape": (size,)}
    with _written(path) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for column in (first, *columns):
            file.write(column.tobytes())


def _mapped(folder: Path, name: str) -> np.ndarray:
    path = folder / f"{name}.npy"
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataUnavailable(f"{path} cannot be read ({error}); remove its folder") from None


class _File:
    """A file that is opened at the first reading, and shared by threads."""

    def __init__(self, path: Path):
        self.path = path
        self._handle: int | None = None

    def read(self, size: int, start: int) -> bytes:
        """Returns so many bytes from a place on.

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

    def pieces(self) -> Iterator[bytes]:
        """Yields the whole content in pieces."""
        end = self.path.stat().st_size
        for start in range(0, end, _READ):
            yield self.read(min(_READ, end - start), start)

    def _broken(self, reason: str) -> DataUnavailable:
        return DataUnavailable(
            f"{self.path} cannot be read ({reason}); start again to prepare it anew"
        )


@contextlib.contextmanager
def _written(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that gets its name when it is whole and on the disk, and never after an error."""
    with whole(path) as unfinished, unfinished.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _remove_partial(folder: Path) -> None:
    for path in folder.glob(".*.partial"):
        path.unlink(missing_ok=True)


def _manifest(folder: Path) -> dict[str, Any] | None:
    try:
        return json.loads((folder / _MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise DataUnavailable(
            f"{folder / _MANIFEST} is damaged ({error}); remove {folder}"
        ) from None


def _wrong_files(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Returns files that are missing, or not of the size that was written."""
    there = {entry.name: entry.stat().st_size for entry in os.scandir(folder) if entry.is_file()}
    return [name for name, size in manifest["files"].items() if there.get(name) != size]


def _forget_wrong_files(folder: Path) -> None:
    """Removes the manifest of a damaged corpus, then its damaged files, to be made anew."""
    manifest = _manifest(folder)
    if manifest is None:
        return
    wrong = _wrong_files(folder, manifest)
    _LOG.warning("%s has lost %s, which will be made anew", folder, ", ".join(wrong))
    for name in (_MANIFEST, *wrong):
        (folder / name).unlink(missing_ok=True)


def _by_processes(
    corpus: PreparedCorpus, shards: Mapping[str, range], workers: int
) -> Iterator[int]:
    """Yields the number of examples of each shard, as processes write them.

    The processes of loky do not import the program that starts them, and JAX with it.
    """
    few = {"TOKENIZERS_PARALLELISM": "false"}  # the processes are as many as the cores
    # Those of a program that is killed end after so many idle seconds.
    pool = ProcessPoolExecutor(workers, timeout=2, env=os.environ | few)
    try:
        tasks = [pool.submit(_write_shard_of, corpus, *shard) for shard in shards.items()]
        for done in as_completed(tasks):
            yield done.result()
    except BrokenProcessPool as error:
        raise DataUnavailable(
            f"a process that prepared {corpus.name} ended by itself (was there too little memory?); "
            "what is finished is kept: start again to go on"
        ) from error
    finally:
        pool.shutdown(kill_workers=True)


_OPENED: dict[Path, Sequence[Mapping[str, Any]]] = {}
"""The examples of a corpus by its folder, in a process that writes its shards."""


def _write_shard_of(corpus: PreparedCorpus, shard: str, indices: range) -> int:
    """Writes a shard in a process of its own, which opens the corpus once."""
    if corpus.folder not in _OPENED:
        _OPENED[corpus.folder] = corpus.examples()
    return _write_shard(corpus, _OPENED[corpus.folder], shard, indices)


def _unwritable(folder: Path, error: OSError) -> DataUnavailable:
    return DataUnavailable(
        f"{folder} cannot be written: {error.strerror or error}; what is finished is kept: free some space, "
        "or name another folder by data_dir, and start again"
    )
