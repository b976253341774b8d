"""The start of launchers and benchmarks: flags, help, devices, and errors as one line with exit code 2."""

import ctypes
import errno
import os
import platform
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import jax
from absl import flags
from ml_collections import config_flags

from crossattn.data import fetch
from crossattn.data.errors import DataError, DataUnavailable
from crossattn.ops.native import build
from crossattn.train import processes, storage
from crossattn.train.errors import TrainError
from crossattn.train.storage import Folder
from crossattn.train.workdir import refuse_unwritable
from crossattn.viz.writing import FORMATS
from crossattn.weights.formats.safetensors import CheckpointError
from experiments import begun, logs, options, settings
from experiments.errors import SettingsError

CONFIG = config_flags.DEFINE_config_file("config", None, "Path of a config file, configs/NAME.py.")
WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "Folder of the run, here or in a store: runs/NAME, gs://BUCKET/NAME.",
)
OUT = flags.DEFINE_string(
    "out", None, "Write the sound, picture or page into this .wav, .png or .html file."
)
PLOT = flags.DEFINE_string("plot", None, "Draw attention into this .png, .svg or .pdf file.")
GALLERY = flags.DEFINE_string(
    "gallery", None, "Draw all pictures with their captions into this .png, .svg or .pdf file."
)
DISTRIBUTED = flags.DEFINE_bool(
    "distributed",
    False,
    "Join the processes of one run through jax.distributed (cluster found by itself, or given by "
    "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID).",
)
INITIALIZATION_TIMEOUT = flags.DEFINE_integer(
    "initialization_timeout",
    300,
    "Seconds in which all processes of --distributed must have come.",
    lower_bound=1,
)
HEARTBEAT_TIMEOUT = flags.DEFINE_integer(
    "heartbeat_timeout_seconds",
    100,
    "Seconds without a sign of life after which a process of --distributed counts as dead.",
    lower_bound=1,
)
PROCESSES = (DISTRIBUTED, INITIALIZATION_TIMEOUT, HEARTBEAT_TIMEOUT)

_DEFAULT = "configs/libreoffice.py"
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
    """An error of the command line, in one sentence."""


def run(main: Callable[[Sequence[str]], int | None]) -> NoReturn:
    """Parses flags, sets the process up and calls ``main`` with the other arguments.

    ``FLAGS`` of its module are the flags of the launcher. The exit code is 0, or the value of ``main``; 2
    after errors that the user can correct, which are one line; 130 after Ctrl-C.
    """
    own_process = begun()
    keep_heap()
    logs.begin(None, own_process)
    _end(lambda: _started(main, own_process), own_process)


def script(main: Callable[[], int | None]) -> NoReturn:
    """Calls ``main`` of a benchmark, which parses ``Options``, and ends as a launcher does."""
    own_process = begun()
    logs.begin(None, own_process)
    _end(main, own_process)


def _end(main: Callable[[], int | None], own_process: bool) -> NoReturn:
    """Calls ``main`` and ends the process with its exit code, or that of an error."""
    failed = True
    try:
        code = main() or 0
        failed = False
    except (*_EXPECTED, Refused) as error:
        logs.keep(error)
        complain(error)
        code = 2
    except BrokenPipeError:  # the reader of the output has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except KeyboardInterrupt:
        if own_process:  # a second Ctrl-C would print a stack
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("stopped.", file=sys.stderr, flush=True)
        code = 130
    if failed:
        processes.leave(code)
    sys.exit(code)


def _started(main: Callable[[Sequence[str]], int | None], own_process: bool) -> int | None:
    """Returns the value of ``main``, or 0 after help."""
    module = sys.modules[main.__module__]
    taken = getattr(module, "FLAGS", None)
    about = options.asked(sys.argv[1:])
    if about is not None:
        _help(about, module, taken or ())
        return 0
    arguments = _parse(sys.argv, taken)
    logs.begin(WORKDIR.value, own_process)
    if DISTRIBUTED.value:
        processes.join(INITIALIZATION_TIMEOUT.value, HEARTBEAT_TIMEOUT.value)
    return main(arguments[1:])


def _help(about: str, module: ModuleType, taken: Sequence[Any]) -> None:
    """Prints the text of ``--help``, or of ``--help=config``, the keys of the config."""
    if not about:
        print(options.of_launcher(module, taken))
        return
    has_config = any(holder is CONFIG for holder in taken)
    if about != "config" or not has_config:
        known = " or --help=config" if has_config else ""
        raise Refused(f"there is no --help={about}; expected --help{known}.")
    _parse([word for word in sys.argv if word.partition("=")[0] not in options.ASKS], taken)
    if CONFIG.value is None and WORKDIR.value:
        config, title = settings.saved_config(required_workdir()), f"the config of {WORKDIR.value}"
    elif CONFIG.value is None:
        _read([sys.argv[0], f"--config={_DEFAULT}"])
        config, title = CONFIG.value, f"the config of --config={_DEFAULT}"
    else:
        config, title = CONFIG.value, f"the config of --config={options.config_path(sys.argv)}"
    print(options.of_config(config.to_dict(), title))


def required_workdir() -> Folder:
    """Returns --workdir; raises Refused without it."""
    if not WORKDIR.value:
        raise Refused("--workdir is missing; name the folder of the run, --workdir=runs/NAME.")
    return storage.folder(WORKDIR.value)


def required_config():
    """Returns --config; raises Refused without it."""
    if CONFIG.value is None:
        raise Refused("--config is missing; name a config file, --config=configs/libreoffice.py.")
    return CONFIG.value


def picture(flag: Any = PLOT) -> Path | None:
    """Returns the file of a flag, or None; raises Refused where it cannot be drawn."""
    if not flag.value:
        return None
    path = Path(flag.value)
    if path.suffix.lower() not in FORMATS:
        raise Refused(f"--{flag.name} names {path}; expected one of {', '.join(FORMATS)}.")
    need("matplotlib", install="crossattn[viz]")
    writable(path)
    return path


def writable(path: Folder) -> None:
    """Raises Refused where a file of results cannot be written."""
    if storage.in_store(path):
        refuse_unwritable(path.parent)
        return
    trial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with trial.open("x"):
            pass
        trial.unlink()
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error.strerror}.") from None


def need(*modules: str, install: str) -> None:
    """Raises Refused without modules that ``pip install`` of ``install`` brings."""
    if lack := options.lacking(*modules, install=install):
        raise Refused(lack)


def complain(error: BaseException) -> None:
    """Prints an error in one line of stderr."""
    print(f"error: {_one_line(error)}", file=sys.stderr, flush=True)


def keep_compiled() -> None:
    """Turns on JAX's cache of compiled programs, in ``compiled`` in the data folder.

    JAX_COMPILATION_CACHE_DIR names another folder, or none if it is empty. A folder that others may write to
    is not used, with a note.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or jax.config.jax_compilation_cache_dir:
        return
    folder = fetch.cache_dir() / "compiled"
    if why := build.not_private(folder):
        build.say(f"{folder} is not used for compiled programs: {why}")
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def keep_heap() -> None:
    """Keeps freed memory in the process.

    XLA's CPU backend allocates its temporaries anew in every call. By default the C library maps and unmaps
    large ones, and the page faults cost 10 to 30 % of a training step.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    trim_threshold, mmap_max, arena_max = -1, -4, -8
    libc.mallopt(trim_threshold, 2**31 - 1)
    libc.mallopt(mmap_max, 0)
    libc.mallopt(arena_max, 1)


def trim_heap() -> None:
    """Gives freed memory back to the system, whatever ``keep_heap`` has set."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def _parse(argv: Sequence[str], taken: Sequence[Any] | None) -> list[str]:
    """Reads flags; errors of a config file become one sentence."""
    path = options.config_path(argv)
    if path and not os.path.isfile(path):
        raise Refused(f"--config names {path}, which is no file; see configs/ for what there is.")
    if taken is not None:
        _refuse_foreign(argv, taken)
    argv, changes = options.overrides(argv)
    try:
        arguments = _read(argv)
    except flags.UnrecognizedFlagError as error:
        raise Refused(options.unknown(error.flagname, taken or ())) from None
    except flags.Error as error:
        # An error of get_config is the text of a traceback; its last line has the message.
        if "Traceback" in str(error):
            last = str(error).strip().splitlines()[-1].partition(": ")[2]
            raise Refused(f"--config={path}: {last}") from None
        raise
    except Exception as error:
        if isinstance(error, AttributeError) and "get_config" in str(error):
            raise Refused(f"{path} has no get_config(arg) that returns a ConfigDict.") from None
        raise Refused(f"--config={path} could not be read: {_one_line(error)}") from error
    if changes:
        settings.put(CONFIG.value, changes)
    return arguments


def _read(argv: Sequence[str]) -> list[str]:
    """Reads flags by absl; ml_collections reads those of a config from ``sys.argv``."""
    before, sys.argv = sys.argv, list(argv)
    try:
        return flags.FLAGS(sys.argv)
    finally:
        sys.argv = before


def _refuse_foreign(argv: Sequence[str], taken: Sequence[Any]) -> None:
    """Refuses flags of other launchers."""
    known = {holder.name for holder in taken}
    by_module = flags.FLAGS.flags_by_module_dict()
    ours = {flag.name for name, own in by_module.items() if _is_ours(name) for flag in own}
    for word in argv[1:]:
        if word == "--":
            return
        name = word.lstrip("-").partition("=")[0]
        bare = name.removeprefix("no") if name not in ours else name
        if word.startswith("-") and bare in ours - known:
            raise Refused(options.unknown(name, taken))


def _is_ours(module: str) -> bool:
    """Whether a module that defines flags is a launcher, by its name or its path."""
    return module.startswith("experiments.") or Path(module) == Path(sys.argv[0])


def _one_line(error: BaseException) -> str:
    """Returns the message without line breaks and lone surrogates."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
