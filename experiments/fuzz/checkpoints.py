"""A tiny run with damaged files: the same parameters in the end, or one line that says why not."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from crossattn.train.checkpoint import load_params
from experiments.fuzz import Wrong, launching
from experiments.fuzz.damage import damage
from experiments.fuzz.launching import TINY, ends_well
from experiments.settings import saved_config
from experiments.tasks import make_task

ABOUT = "a tiny run with files flipped, cut, deleted and swapped: its own parameters in the end, or a line"
NEEDS = ("orbax", "grain", "tokenizers")
ENVIRONMENT = launching.ENVIRONMENT


def start(folder: Path) -> Callable[[np.random.Generator], None]:
    """One file of a run that stopped after step 8 of 12, damaged; the run is then gone on with."""
    whole = launching.tiny_run(folder)
    expected = parameters(whole)

    def case(random: np.random.Generator) -> None:
        run = folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(whole, run)
        shutil.rmtree(run / "checkpoints" / "12")
        path, how = _damage(random, run)
        code, said = ends_well("train", *TINY, f"--workdir={run}")
        what = f"{_kind(path)} {how}"
        if code:
            if path.name == "metrics.jsonl":
                raise Wrong(f"{what}: the resume is refused: {said}")
            return
        restored = parameters(run)
        same = jax.tree.map(np.array_equal, restored, expected)
        if not all(jax.tree.leaves(same)):
            raise Wrong(f"{what}: the run ends with other parameters, and says nothing")

    return case


def parameters(run: Path) -> Any:
    """Those of the newest checkpoint, as numpy."""
    task = make_task(saved_config(run), run / "assets")
    target = jax.eval_shape(task.init, jax.random.key(0))
    return jax.device_get(load_params(run / "checkpoints", target)[0])


def _damage(random: np.random.Generator, run: Path) -> tuple[Path, str]:
    """(file, what was done to it); files of the newest checkpoint most of the time."""
    where = ("checkpoints/8", "checkpoints/8", "checkpoints", "assets", ".")[random.integers(5)]
    files = sorted(p for p in (run / where).rglob("*") if p.is_file() and p.name != ".lock")
    path = files[random.integers(len(files))]
    if random.random() < 0.1:
        other = files[random.integers(len(files))]
        if other.read_bytes() != path.read_bytes():
            shutil.copyfile(other, path)
            return path.relative_to(run), f"replaced by {other.name}"
    return path.relative_to(run), damage(random, path)


def _kind(path: Path) -> str:
    """The file's place in a run without the numbers that differ from run to run."""
    parts = ["N" if part.isdigit() else part for part in path.parts]
    return "/".join(part if len(part) < 24 else part[:8] + "…" for part in parts)
