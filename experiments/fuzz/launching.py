"""Launchers started in this process, with the command line of a shell, and held to how they may end."""

import contextlib
import importlib
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain  # noqa: F401  or flagsaver takes back the flags that its first import defines
import jax
from absl import flags
from absl.testing import flagsaver

from experiments import launch
from experiments.fuzz import Wrong

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
TINY = (
    "--config=configs/libreoffice.py:fr,tiny",
    "--config.train.steps=12",
    "--config.train.log_every=1",
    "--config.checkpoint.every=4",
    "--config.checkpoint.keep=3",
    "--config.evaluate.examples=0",
)


def tiny_run(folder: Path) -> Path:
    """A finished run in the folder, trained where there is none yet; compiled programs are kept there too."""
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    workdir = folder / "whole"
    if not workdir.exists():
        code, said = ends_well("train", *TINY, f"--workdir={workdir}")
        if code:
            raise Wrong(f"the run that is to be spoilt is refused: {said}")
    return workdir


def launched(launcher: str, *arguments: Any) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of ``python -m experiments.LAUNCHER ARGUMENTS``, run here."""
    main = importlib.import_module(f"experiments.{launcher}").main
    before = sys.argv
    sys.argv = [launcher, *map(str, arguments)]
    with _captured() as printed:
        try:
            with flagsaver.flagsaver(), warnings.catch_warnings(), contextlib.chdir(ROOT):
                warnings.simplefilter("ignore", DeprecationWarning)
                for name in ("config", "workdir"):
                    flags.FLAGS[name].unparse()
                launch.run(main)
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            sys.argv = before
            sys.modules.pop("config_config", None)  # or the next config file is run on top of it
    return code, printed[0], printed[1]


def ends_well(launcher: str, *arguments: Any) -> tuple[int, str]:
    """Exit code 0, or 2 with one line that says why: (code, that line). No traceback either way.

    Raises:
      Wrong: it ended otherwise.
    """
    code, out, err = launched(launcher, *arguments)
    lines = [line for line in err.splitlines() if not line.startswith("note: ")]
    if "Traceback" in out + err:
        last = next((line for line in reversed(lines) if line.strip()), "")
        raise Wrong(f"{launcher} prints a traceback and ends with code {code}: {last}")
    if code not in (0, 2):
        raise Wrong(f"{launcher} ends with code {code}: {' '.join(lines)}")
    if code == 2 and (len(lines) != 1 or not lines[0].startswith("error: ")):
        raise Wrong(f"{launcher} refuses in {len(lines)} lines: {' '.join(lines)}")
    return code, lines[0] if code else ""


@contextlib.contextmanager
def _captured() -> Iterator[list[str]]:
    """What the process prints meanwhile, libraries in C++ included: [stdout, stderr] when it is over."""
    printed: list[str] = []
    kept = [os.dup(number) for number in (1, 2)]
    files = [tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") for _ in kept]
    try:
        for number, file in enumerate(files, 1):
            os.dup2(file.fileno(), number)
        with contextlib.redirect_stdout(files[0]), contextlib.redirect_stderr(files[1]):
            yield printed
    finally:
        for number, (before, file) in enumerate(zip(kept, files, strict=True), 1):
            file.flush()
            os.dup2(before, number)
            os.close(before)
            file.seek(0)
            printed.append(file.read())
            file.close()
