"""How every launcher starts: flags, devices, and errors as one line with exit code 2."""

import ctypes
import importlib.util
import logging
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from absl import flags
from ml_collections import config_flags

from crossattn.data import fetch
from crossattn.data.errors import DataError, DataUnavailable
from crossattn.train.errors import TrainError
from crossattn.viz.writing import FORMATS
from crossattn.weights.safetensors import CheckpointError
from experiments.settings import SettingsError

CONFIG = config_flags.DEFINE_config_file("config", None, "Path of a config file, configs/NAME.py.")
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
PLOT = flags.DEFINE_string("plot", None, "Draw attention into this .png, .svg or .pdf file.")
DISTRIBUTED = flags.DEFINE_bool(
    "distributed",
    False,
    "Join the processes of one run through jax.distributed (cluster found by itself, or given by "
    "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID).",
)

_WORTH_KEEPING = 0.1  # seconds that a program took to compile
_PROCESSES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_EXPECTED = (
    DataError,
    DataUnavailable,
    TrainError,
    CheckpointError,
    SettingsError,
    ImportError,
    flags.Error,
)


class Refused(Exception):
    """What a launcher cannot do, in one sentence."""


def run(main: Callable[[Sequence[str]], int | None]) -> None:
    """Parse flags, set the process up, call ``main`` with what is left of the command line.

    Exit code 0, or what ``main`` returns; 2 for anything the user can put right, told in one line;
    130 after Ctrl-C.
    """
    keep_heap()
    logging.basicConfig(level=logging.WARNING, format="note: %(message)s", force=True)
    try:
        arguments = _parse(sys.argv)
        if DISTRIBUTED.value:
            _join()
        code = main(arguments[1:])
    except (*_EXPECTED, Refused) as error:
        complain(error)
        code = 2
    except KeyboardInterrupt:
        print("stopped.", file=sys.stderr, flush=True)
        code = 130
    sys.exit(code or 0)


def required_workdir() -> str:
    """--workdir, which this launcher cannot do without."""
    if not WORKDIR.value:
        raise Refused("--workdir is missing; name the folder of the run, --workdir=runs/NAME.")
    return WORKDIR.value


def required_config():
    """--config, which this launcher cannot do without."""
    if CONFIG.value is None:
        raise Refused("--config is missing; name a config file, --config=configs/libreoffice.py.")
    return CONFIG.value


def picture() -> Path | None:
    """The file that --plot names, if it does; refused before any work when it cannot be drawn."""
    if not PLOT.value:
        return None
    path = Path(PLOT.value)
    if path.suffix.lower() not in FORMATS:
        raise Refused(f"--plot names {path}; expected one of {', '.join(FORMATS)}.")
    need("matplotlib", install="crossattn[viz]")
    return path


def need(*modules: str, install: str) -> None:
    """Refuse to begin without modules that ``pip install`` of ``install`` would bring."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        quoted = f"'{install}'" if "[" in install else install
        raise Refused(f"{' and '.join(missing)} {verb} not installed: pip install {quoted}")


def complain(error: BaseException) -> None:
    """Say in one line of stderr what went wrong."""
    print(f"error: {_one_line(error)}", file=sys.stderr, flush=True)


def keep_compiled() -> None:
    """Read programs that an earlier start compiled, and keep those that this one compiles.

    They lie in ``compiled`` in the data folder, unless JAX_COMPILATION_CACHE_DIR names another; empty, it
    turns this off. What JAX finds damaged there it compiles anew, with a warning.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or jax.config.jax_compilation_cache_dir:
        return
    jax.config.update("jax_compilation_cache_dir", str(fetch.cache_dir() / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_KEEPING)


def keep_heap() -> None:
    """Keep freed memory in the process instead of giving it back to the system after each step.

    XLA's CPU backend allocates its temporaries anew in every call. By default the C library maps and
    unmaps large ones, and the page faults cost 10 to 30 % of a training step.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    trim_threshold, mmap_max, arena_max = -1, -4, -8
    libc.mallopt(trim_threshold, 2**31 - 1)
    libc.mallopt(mmap_max, 0)
    libc.mallopt(arena_max, 1)


def _parse(argv: Sequence[str]) -> list[str]:
    """Flags read; what goes wrong in a config file becomes one sentence."""
    path = _config_path(argv)
    if path and not os.path.isfile(path):
        raise Refused(f"--config names {path}, which is no file; see configs/ for what there is.")
    try:
        return flags.FLAGS(list(argv))
    except flags.Error as error:
        # What get_config raised comes as the text of a traceback; its last line says what is wrong.
        if "Traceback" in str(error):
            last = str(error).strip().splitlines()[-1].partition(": ")[2]
            raise Refused(f"--config={path}: {last}") from None
        raise
    except AttributeError as error:
        if "get_config" in str(error):
            raise Refused(f"{path} has no get_config(arg) that returns a ConfigDict.") from None
        key = _one_line(error).strip("\"'")
        raise Refused(f"the config has no key {key}; {path} says what it has.") from None
    except Exception as error:
        raise Refused(f"--config={path} could not be read: {_one_line(error)}") from error


def _config_path(argv: Sequence[str]) -> str:
    """The file that --config=PATH:ARGUMENT or --config PATH:ARGUMENT names, or nothing."""
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        name, equals, value = argument.partition("=")
        if name in ("--config", "-config"):
            return (value if equals else following).partition(":")[0]
    return ""


def _join() -> None:
    """Becomes one process of several; what is not in the environment, JAX finds out itself."""
    address, count, index = map(os.environ.get, _PROCESSES)
    try:
        if address and count and index:
            jax.distributed.initialize(address, int(count), int(index))
        else:
            jax.distributed.initialize()
    except (RuntimeError, ValueError) as error:
        raise Refused(
            f"--distributed could not join the other processes ({_one_line(error)}); outside a "
            f"cluster that JAX knows, set {', '.join(_PROCESSES)}."
        ) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
