"""Preparation of a corpus, and the batches that training reads from it, at any size.

    python -m experiments.bench.corpus
    python -m experiments.bench.corpus --pairs=200000 --folder=/tmp/corpus

Writes sentences of the phrase grammar to files, one to four a pair, prepares them by ``experiments.prepare``,
and reads them as training does. Prints processor time and memory of the preparation, the time from the start
of a process to its first batch, and its peak memory, at this size and at a small one. Takes some minutes.
"""

import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from configs import libreoffice
from crossattn.data import fetch
from crossattn.data.sources import open_source
from crossattn.files import whole
from experiments import launch
from experiments.bench import contest
from experiments.options import Options
from experiments.tasks import make_task

_ROOT = Path(__file__).parents[2]
_SMALL, _BATCHES, _HELD_OUT = 20_000, 300, 200


def main() -> None:
    """Measures and prints."""
    parser = Options(__doc__)
    parser.add_argument("--pairs", type=int, default=2_000_000, help="pairs of the large corpus")
    parser.add_argument("--folder", type=Path, help="for 1 GiB of files; in the data folder")
    options = parser.parse_args()
    folder = options.folder or fetch.cache_dir() / "bench-corpus"
    print(contest.machine(), flush=True)
    peaks = {}
    for count in (_SMALL, options.pairs):
        write_pairs(folder / str(count), count)
        timed_prepare(folder / str(count))
        peaks[count] = measured(folder / str(count))
    more = peaks[options.pairs] - peaks[_SMALL]
    print(f"{options.pairs:,} pairs take {more / 2**20:.0f} MiB more than {_SMALL:,}", flush=True)


def write_pairs(folder: Path, count: int) -> None:
    """Writes `train.tsv` with ``count`` pairs and small files of the other splits; always the same."""
    folder.mkdir(parents=True, exist_ok=True)
    known = [(e["source"], e["target"]) for e in open_source("phrases", "train")]
    for split, size in (("train", count), ("validation", _HELD_OUT), ("test", _HELD_OUT)):
        path, rng = folder / f"{split}.tsv", np.random.default_rng([count, size])
        if path.exists():
            continue
        with whole(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
            for sentences in rng.integers(1, 5, size).tolist():
                chosen = [known[i] for i in rng.integers(0, len(known), sentences).tolist()]
                file.write("\t".join(". ".join(side) for side in zip(*chosen, strict=True)) + "\n")


def data_of(folder: Path) -> dict[str, str]:
    """Returns the keys of ``config.data`` for these files, prepared in the folder."""
    return {"name": f"files:{folder}/{{split}}.tsv", "data_dir": str(folder / "data")}


def timed_prepare(folder: Path) -> None:
    """Prepares the files, and prints time, processor time and memory of all processes."""
    shutil.rmtree(folder / "data", ignore_errors=True)
    command = [sys.executable, "-m", "experiments.prepare", "--config=configs/libreoffice.py:fr"]
    command += [f"--config.data.{key}={value}" for key, value in data_of(folder).items()]
    before, start, most = _processor_seconds(), time.perf_counter(), 0
    process = subprocess.Popen(command, cwd=_ROOT)
    while process.poll() is None:
        most = max(most, sum(contest.memory("VmRSS", each) for each in _family(process.pid)))
        time.sleep(0.1)
    if process.returncode:
        sys.exit(f"error: {' '.join(command)} ended with exit code {process.returncode}")
    seconds = time.perf_counter() - start
    print(
        f"prepared in {seconds:.1f} s, {_processor_seconds() - before:.1f} s of processor time, imports "
        f"included; all processes had at most {most / 2**20:.0f} MiB",
        flush=True,
    )


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _family(process: int) -> list[int]:
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:  # the process has ended
        children = []
    return [process, *map(int, children)]


def measured(folder: Path) -> int:
    """Returns peak bytes of a process that reads batches; prints them and the time of the first batch."""
    config = libreoffice.get_config()
    config.data.update(data_of(folder))
    start = time.time()
    with contest.elsewhere(reader, config.to_dict()) as read:
        first, rate, most = read()
    print(
        f"{folder.name} pairs: first batch {first - start:.1f} s after the start of the process, then "
        f"{rate:.0f} batches/s; at most {most / 2**20:.0f} MiB",
        flush=True,
    )
    return most


def reader(values: dict[str, Any]) -> Callable[[], tuple[float, float, int]]:
    """Returns a function that reads batches: time of the first one, batches a second, peak bytes."""

    def read() -> tuple[float, float, int]:
        iterator = make_task(ConfigDict(values)).train_iterator(0, 1)
        next(iterator)
        first = time.time()
        for _ in range(_BATCHES):
            next(iterator)
        rate = _BATCHES / (time.time() - first)
        iterator.close()
        return first, rate, contest.memory("VmHWM")

    return read


if __name__ == "__main__":
    launch.script(main)
