"""Preparing a corpus once, so that training begins in seconds whatever its size.

Examples are tokenised, dropped or cut, and linked by several processes, a shard each at a time, into a folder
that source, tokenizers and options name; `manifest.json` is written last, and without it there is no
corpus. Killed at any moment, the same call goes on with the shards that are whole, and ends with the same
bytes. One process at a time prepares a folder and others wait for it; hosts that do not share the folder
prepare their own.
"""

import contextlib
import hashlib
import json
import logging
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from tqdm import tqdm

from crossattn.data import fetch, sources
from crossattn.data.encoded import EncodedPairs, Encoding
from crossattn.data.errors import DataError, DataUnavailable
from crossattn.data.published_tokenizer import tokenizer_of
from crossattn.data.shards import (
    read_shards,
    remove_partial,
    sides_of,
    write_index,
    write_shard,
    written,
)
from crossattn.data.tokenizers import Tokenizer

_LOG = logging.getLogger(__name__)
_VERSION = 1  # of what lies in a folder
_SHARD, _MOST_SHARDS = 2**16, 128
_MANIFEST = "manifest.json"
_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (DataError, DataUnavailable)
}


@dataclass(frozen=True)
class PreparedCorpus:
    """One split of a source under one encoding, which is what a folder holds.

    Attributes:
      name, split, data_dir, reverse, options: those of `sources.open_source`.
      links: whether gold links are kept.
    """

    name: str
    encoding: Encoding
    split: str = "train"
    data_dir: str | None = None
    reverse: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    links: bool = False

    @cached_property
    def description(self) -> dict[str, Any]:
        """What tells it from others, JSON-able."""
        encoding = self.encoding
        return {
            "version": _VERSION,
            "source": sources.identity(self.name, **self.opening),
            "tokenizer": _sha256(encoding.tokenizer.to_json()),
            "target_tokenizer": _sha256(encoding.output_tokenizer.to_json()),
            "source_len": encoding.source_len if encoding.side == "both" else 0,
            "target_len": encoding.target_len,
            "truncation": encoding.truncation,
            "side": encoding.side,
            "links": self.links,
        }

    @property
    def folder(self) -> Path:
        """Where it lies, or will lie."""
        key = _sha256(json.dumps(self.description, sort_keys=True))[:16]
        title = re.sub(r"[^A-Za-z0-9]+", "-", Path(self.name).name).strip("-")[:40]
        return prepared_dir(self.data_dir) / f"{title}-{self.split_title}-{key}"

    @property
    def split_title(self) -> str:
        """The split as a part of a file's name."""
        return re.sub(r"[^A-Za-z0-9]+", "-", self.split)[:20]

    @property
    def opening(self) -> dict[str, Any]:
        """What `sources.open_source` is given beside the name."""
        given = {"split": self.split, "data_dir": self.data_dir, "reverse": self.reverse}
        return given | dict(self.options)

    def open_source(self) -> Sequence[dict[str, Any]]:
        """Its examples, as `sources.open_source` gives them."""
        return sources.open_source(self.name, **self.opening)

    def to_json(self) -> str:
        """All that another process needs to work on it."""
        encoding = vars(self.encoding).copy()
        for side in ("tokenizer", "target_tokenizer"):
            encoding[side] = encoding[side] and encoding[side].to_json()
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return json.dumps(own | {"options": dict(self.options), "encoding": encoding})

    @classmethod
    def from_json(cls, text: str) -> "PreparedCorpus":
        """The corpus that `to_json` gave."""
        given = json.loads(text)
        encoding = given.pop("encoding")
        for side in ("tokenizer", "target_tokenizer"):
            encoding[side] = encoding[side] and tokenizer_of(encoding[side])
        return cls(encoding=Encoding(**encoding), **given)


def prepared_dir(data_dir: str | os.PathLike | None = None) -> Path:
    """The folder of all prepared corpora."""
    return fetch.cache_dir(data_dir) / "prepared"


def is_prepared(corpus: PreparedCorpus) -> bool:
    """Whether its folder is whole: no file is missing, and none of another size than was written."""
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
            if not is_prepared(corpus):  # by whom this one has waited for
                _prepare(corpus, folder, workers or _cores())
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


def open_prepared(corpus: PreparedCorpus, link_share: float = 0.0, seed: int = 0) -> EncodedPairs:
    """The pairs of a prepared corpus, as `encode_pairs` would give them; their ids stay on disk.

    Raises:
      DataError: no example was short enough; or the share is out of range, or there are no links.
      DataUnavailable: it is not prepared.
    """
    folder = corpus.folder
    manifest = _manifest(folder)
    if manifest is None:
        raise DataUnavailable(f"there is no prepared corpus in {folder}; prepare it first")
    pairs = read_shards(
        folder, manifest["shards"], corpus.encoding, manifest, link_share=link_share, seed=seed
    )
    pairs.refuse_empty(corpus.encoding.source_len, corpus.encoding.target_len)
    return pairs


def keep_tokenizer(path: Path, train: Callable[[], Tokenizer]) -> Tokenizer:
    """The tokenizer in a file of `prepared_dir`, trained by the first process that asks for it.

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


def _prepare(corpus: PreparedCorpus, folder: Path, workers: int) -> None:
    remove_partial(folder)
    _forget_wrong_files(folder)
    source = corpus.open_source()
    if not len(source):
        raise DataError("the data source has no examples")
    if corpus.links and "links" not in source[0]:
        raise DataError("the training data has no gold links between words")
    shards = shard_indices(len(source))
    parts = ["index", *sides_of(corpus.encoding, corpus.links)]
    there = {path.name for path in folder.iterdir()}
    missing = [name for name in shards if not there >= {f"{part}-{name}" for part in parts}]
    sizes = {name: len(indices) for name, indices in shards.items()}
    with tqdm(
        total=len(source),
        initial=sum(sizes.values()) - sum(sizes[name] for name in missing),
        desc=f"preparing {corpus.name}",
        unit=" examples",
        disable=None,
    ) as bar:
        if workers == 1 or len(missing) <= 1:
            for name in missing:
                options = {"links": corpus.links, "done": bar.update}
                write_shard(folder, name, corpus.encoding, source, shards[name], **options)
        else:
            del source  # each process has its own
            _by_processes(
                corpus, {n: shards[n] for n in missing}, min(workers, len(missing)), bar.update
            )
    if sources.identity(corpus.name, **corpus.opening) != corpus.description["source"]:
        raise DataError(f"{corpus.name} changed while it was being prepared; start again")
    record = write_index(folder, list(shards), corpus.encoding, corpus.links)
    files = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    record["shards"] = list(shards)
    record["files"] = {name: (folder / name).stat().st_size for name in files}
    record["corpus"] = corpus.description
    remove_partial(folder)  # of processes that outlived the one that was killed by a moment
    with written(folder / _MANIFEST) as file:
        file.write(json.dumps(record, indent=1).encode())


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def shard_indices(examples: int) -> dict[str, range]:
    """Name and examples of each shard; they depend on nothing but the number of examples."""
    size = _SHARD * max(1, -(-examples // (_SHARD * _MOST_SHARDS)))
    count = -(-examples // size)
    return {
        f"{i:05}-of-{count:05}": range(i * size, min((i + 1) * size, examples))
        for i in range(count)
    }


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
    """Those that are not there, or not of the size that was written."""
    there = {entry.name: entry.stat().st_size for entry in os.scandir(folder) if entry.is_file()}
    return [name for name, size in manifest["files"].items() if there.get(name) != size]


def _forget_wrong_files(folder: Path) -> None:
    """Of a corpus that was whole once: what says so goes first, then the shards to be made anew."""
    manifest = _manifest(folder)
    if manifest is None:
        return
    wrong = _wrong_files(folder, manifest)
    _LOG.warning("%s has lost %s, which will be made anew", folder, ", ".join(wrong))
    (folder / _MANIFEST).unlink()
    for shard in manifest["shards"]:
        if any(name.endswith(f"-{shard}") for name in wrong):
            (folder / f"index-{shard}").unlink(missing_ok=True)


def _by_processes(
    corpus: PreparedCorpus, shards: Mapping[str, range], workers: int, done: Callable[[int], Any]
) -> None:
    """Each process asks for the next shard when it has written one."""
    waiting, lock = iter(shards.items()), threading.Lock()
    processes = [_Worker() for _ in range(workers)]

    def work(process: _Worker) -> None:
        process.send(corpus.to_json())
        process.send(str(corpus.folder))
        while True:
            with lock:
                following = next(waiting, None)
            if following is None:
                return
            shard, indices = following
            process.send(json.dumps([shard, indices.start, indices.stop]))
            for count in process.counts(corpus):
                with lock:
                    done(count)

    pool = ThreadPoolExecutor(workers)
    try:
        results = [pool.submit(work, process) for process in processes]
        for result in wait(results, return_when=FIRST_EXCEPTION).done:
            result.result()
    finally:
        for process in processes:
            process.end()
        pool.shutdown()


class _Worker:
    """Another process, which runs `main` of this module: told of a corpus, then of shards, a line each."""

    def __init__(self):
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        # One thread each: the processes are as many as the cores.
        environment = {"PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | environment,
            start_new_session=True,  # Ctrl-C is for the one that ends them
        )

    def send(self, line: str) -> None:
        """A line to the process, which may have died."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def counts(self, corpus: PreparedCorpus) -> Iterator[int]:
        """How many examples more are written, until the shard is.

        Raises:
          DataError, DataUnavailable: what the process met; or it died.
        """
        while line := self._process.stdout.readline():
            said = json.loads(line)
            if "error" in said:
                raise _ERRORS[said["error"]](said["message"])
            if not said["done"]:
                return
            yield said["done"]
        code = self._process.wait()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        hint = " (was there too little memory?)" if code == -signal.SIGKILL else ""
        raise DataUnavailable(
            f"a process that prepared {corpus.name} ended {how}{hint}; what is finished is kept: start "
            "again to go on"
        )

    def end(self) -> None:
        """Ends the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def main() -> None:
    """One of the processes: reads corpus, folder and shards from stdin, says on stdout what is done."""
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read_or_end, args=(lines,), daemon=True).start()
    corpus, folder = PreparedCorpus.from_json(lines.get()), Path(lines.get())
    options = {"links": corpus.links, "done": lambda count: _say(done=count)}
    try:
        source = corpus.open_source()
        while True:
            shard, start, stop = json.loads(lines.get())
            write_shard(folder, shard, corpus.encoding, source, range(start, stop), **options)
            _say(done=0)
    except OSError as error:
        _say(error="DataUnavailable", message=str(_unwritable(folder, error)))
    except tuple(_ERRORS.values()) as error:
        _say(error=type(error).__name__, message=str(error))
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # the thread that waits for lines would hold up the usual end


def _read_or_end(lines: queue.Queue) -> None:
    """When the other end of stdin is gone, so is this process, in the middle of a shard too."""
    for line in sys.stdin.buffer:
        lines.put(line.decode().strip())
    os._exit(0)


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def _unwritable(folder: Path, error: OSError) -> DataUnavailable:
    return DataUnavailable(
        f"{folder} cannot be written: {error.strerror or error}; what is finished is kept: free some space, "
        "or name another folder by data_dir, and start again"
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    main()
