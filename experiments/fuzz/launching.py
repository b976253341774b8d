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


def launched(launcher: str, *arguments: Any) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of ``python -m experiments.LAUNCHER ARGUMENTS``, run here."""
    main = importlib.import_module(f"experiments.{launcher}").main
    before = sys.argv
    sys.argv = [launcher, *map(str, arguments)]
    with _captured() as read:
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
    return code, *read()


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
def _captured() -> Iterator[Any]:
    """What the process prints meanwhile, libraries in C++ included."""
    kept, files = [], []
    for number in (1, 2):
        (sys.stdout, sys.stderr)[number - 1].flush()
        kept.append(os.dup(number))
        files.append(tempfile.TemporaryFile())
        os.dup2(files[-1].fileno(), number)

    def read() -> tuple[str, ...]:
        texts = []
        for file in files:
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
        return tuple(texts)

    try:
        yield read
    finally:
        for number in (1, 2):
            (sys.stdout, sys.stderr)[number - 1].flush()
            os.dup2(kept[number - 1], number)
            os.close(kept[number - 1])
