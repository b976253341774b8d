"""The input side at any size: a corpus prepared, killed and not, and read while training.

    python -m experiments.bench.corpus
    python -m experiments.bench.corpus --pairs=200000 --folder=/tmp/corpus

Sentences of the phrase grammar, one to four in a pair, are written to files, prepared by
``experiments.prepare``, and read as training reads them: time from the start of the process to its first
batch, and the most memory that it held, at this size and at a small one. Takes some minutes.
"""

import hashlib
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from configs import libreoffice
from crossattn.data import fetch, prepare
from crossattn.data.sources import open_source
from experiments.bench.contest import machine
from experiments.options import Options
from experiments.tasks import make_task

_ROOT = Path(__file__).parents[2]
_SMALL, _BATCHES, _HELD_OUT = 20_000, 300, 200


def main() -> None:
    """Measure and print."""
    parser = Options(__doc__)
    parser.add_argument("--pairs", type=int, default=2_000_000, help="of the large corpus")
    parser.add_argument(
        "--folder", type=Path, help="for 1 GiB of files; default: in the data folder"
    )
    options = parser.parse_args()
    folder = options.folder or fetch.cache_dir() / "bench-corpus"
    print(machine(), flush=True)
    folders = {}
    for count in (_SMALL, options.pairs):
        folders[count] = folder / str(count)
        write_pairs(folders[count], count)
        whole = timed_prepare(folders[count])
    again = folders[options.pairs]
    shutil.rmtree(again / "again", ignore_errors=True)
    kills = killed_prepare(again)
    same = checksums(again / "data") == checksums(again / "again")
    print(
        f"killed {kills} times and started again: {'the same' if same else 'OTHER'} files ({whole})"
    )
    peaks = {count: measured(folders[count]) for count in folders}
    more = peaks[options.pairs] - peaks[_SMALL]
    print(f"{options.pairs:,} pairs take {more / 2**20:.0f} MiB more than {_SMALL:,}", flush=True)


def write_pairs(folder: Path, count: int) -> None:
    """`train.tsv` of so many pairs, and small ones of the other splits; always the same."""
    folder.mkdir(parents=True, exist_ok=True)
    known = [(e["source"], e["target"]) for e in open_source("phrases", "train")]
    for split, size in (("train", count), ("validation", _HELD_OUT), ("test", _HELD_OUT)):
        path, rng = folder / f"{split}.tsv", np.random.default_rng([count, size])
        if path.exists():
            continue
        partial = path.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as file:
            for sentences in rng.integers(1, 5, size).tolist():
                chosen = [known[i] for i in rng.integers(0, len(known), sentences).tolist()]
                file.write("\t".join(". ".join(side) for side in zip(*chosen, strict=True)) + "\n")
        partial.rename(path)


def config_of(folder: Path, data: str = "data") -> ConfigDict:
    """A translation of these files, kept under the folder."""
    config = libreoffice.get_config()
    config.data.name = f"files:{folder}/{{split}}.tsv"
    config.data.data_dir = str(folder / data)
    return config


def command_of(folder: Path, data: str) -> list[str]:
    """The command that prepares it."""
    config = config_of(folder, data).data
    names = [f"--config.data.name={config.name}", f"--config.data.data_dir={config.data_dir}"]
    path = _ROOT / "configs" / "libreoffice.py"
    return [sys.executable, "-m", "experiments.prepare", f"--config={path}:fr", *names]


def timed_prepare(folder: Path) -> str:
    """Prepares, prints what it took, and returns what the command said."""
    shutil.rmtree(folder / "data", ignore_errors=True)
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    watched = _Watched(command_of(folder, "data"))
    said = watched.finish()
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(
        f"prepared in {seconds:.1f} s, {used / seconds:.2f} cores busy, tokenizer and imports included; "
        f"at most {watched.most / 2**20:.0f} MiB held by all processes",
        flush=True,
    )
    return said


class _Watched:
    """A command and the memory of its processes."""

    def __init__(self, command: list[str]):
        self.command = command
        self.process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True)
        self.most = 0

    def finish(self) -> str:
        while self.process.poll() is None:
            self.most = max(self.most, sum(_memory(each, "VmRSS") for each in self._family()))
            time.sleep(0.1)
        if self.process.returncode:
            sys.exit(f"error: {' '.join(self.command)} ended with {self.process.returncode}")
        return self.process.communicate()[0].strip()

    def _family(self) -> list[int]:
        own = self.process.pid
        path = Path(f"/proc/{own}/task/{own}/children")
        try:
            return [own, *map(int, path.read_text().split())]
        except OSError:
            return [own]


def killed_prepare(folder: Path) -> int:
    """Prepares under another data folder, killed with -9 on the way; returns how often."""
    tokenizers = prepare.prepared_dir(folder / "data") / "tokenizers"
    shutil.copytree(tokenizers, prepare.prepared_dir(folder / "again") / "tokenizers")
    kills = 0
    for share in (0.2, 0.6):
        process = subprocess.Popen(
            command_of(folder, "again"), cwd=_ROOT, stdout=subprocess.DEVNULL
        )
        while process.poll() is None and _written(folder, "again") < share * _written(
            folder, "data"
        ):
            time.sleep(0.05)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
    _Watched(command_of(folder, "again")).finish()
    return kills


def _written(folder: Path, data: str) -> int:
    """Bytes, of whole files and others."""
    total = 0
    for path in prepare.prepared_dir(folder / data).glob("*/*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # it has got its name meanwhile
            continue
    return total


def checksums(data: Path) -> dict[str, str]:
    """Of the files of the corpora that are prepared there."""
    files = sorted(path for path in prepare.prepared_dir(data).glob("*/*") if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def measured(folder: Path) -> int:
    """Starts a process that reads batches, prints what it took, and returns the most that it held."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    start = time.time()
    process = context.Process(target=read_batches, args=(config_of(folder).to_dict(), theirs))
    process.start()
    first, rate, most = ours.recv()
    process.join()
    print(
        f"{folder.name} pairs: first batch {first - start:.1f} s after its start, then {rate:.0f} "
        f"batches/s; at most {most / 2**20:.0f} MiB held",
        flush=True,
    )
    return most


def read_batches(values: dict[str, Any], answer: Any) -> None:
    """What training reads, without a model: time of the first batch, batches a second, most memory."""
    iterator = make_task(ConfigDict(values)).train_iterator(0, 1)
    next(iterator)
    first = time.time()
    for _ in range(_BATCHES):
        next(iterator)
    answer.send((first, _BATCHES / (time.time() - first), _memory(os.getpid(), "VmHWM")))
    iterator.close()


def _memory(process: int, name: str) -> int:
    """Bytes, as Linux counts them; 0 of a process that is no more."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    fields = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(fields[0]) * 1024 if fields else 0


if __name__ == "__main__":
    main()
