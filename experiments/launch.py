"""How every launcher starts: flags, help, devices, and errors as one line with exit code 2."""

import ctypes
import errno
import importlib.util
import os
import platform
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

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
from experiments import begun, help, logs, overrides
from experiments.errors import SettingsError
from experiments.settings import saved_config

CONFIG = config_flags.DEFINE_config_file("config", None, "Path of a config file, configs/NAME.py.")
WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "Folder of the run, here or in a store: runs/NAME, gs://BUCKET/NAME.",
)
PLOT = flags.DEFINE_string("plot", None, "Draw attention into this .png, .svg or .pdf file.")
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
_WORTH_KEEPING = 0.1  # seconds that a program took to compile
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

    ``FLAGS`` of its module are those that it takes. Exit code 0, or what ``main`` returns; 2 for anything
    the user can put right, told in one line; 130 after Ctrl-C.
    """
    own_process = begun()
    keep_heap()
    logs.begin(None, own_process)
    failed = True
    try:
        code = _started(main, own_process) or 0
        failed = False
    except (*_EXPECTED, Refused) as error:
        logs.keep(error)
        complain(error)
        code = 2
    except BrokenPipeError:  # whoever read the output has seen enough; nor is there more to flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except KeyboardInterrupt:
        if own_process:  # which ends now; a second Ctrl-C would only print where
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("stopped.", file=sys.stderr, flush=True)
        code = 130
    if failed:
        processes.leave(code)
    sys.exit(code)


def _started(main: Callable[[Sequence[str]], int | None], own_process: bool) -> int | None:
    """What ``main`` returns, or 0 after help."""
    module = sys.modules[main.__module__]
    taken = getattr(module, "FLAGS", None)
    about = help.asked(sys.argv[1:])
    if about is not None:
        _help(about, module, taken or ())
        return 0
    arguments = _parse(sys.argv, taken)
    logs.begin(WORKDIR.value, own_process)
    if DISTRIBUTED.value:
        processes.join(INITIALIZATION_TIMEOUT.value, HEARTBEAT_TIMEOUT.value)
    return main(arguments[1:])


def _help(about: str, module: ModuleType, taken: Sequence[Any]) -> None:
    """Print the text for ``--help``, or for ``--help=config`` the keys of the config that is named."""
    if not about:
        print(help.of_launcher(module, taken))
        return
    has_config = any(holder is CONFIG for holder in taken)
    if about != "config" or not has_config:
        known = " or --help=config" if has_config else ""
        raise Refused(f"there is no --help={about}; expected --help{known}.")
    _parse([word for word in sys.argv if word.partition("=")[0] not in help.ASKS], taken)
    if CONFIG.value is None and WORKDIR.value:
        config, title = saved_config(required_workdir()), f"the config of {WORKDIR.value}"
    elif CONFIG.value is None:
        _read([sys.argv[0], f"--config={_DEFAULT}"])
        config, title = CONFIG.value, f"the config of --config={_DEFAULT}"
    else:
        config, title = CONFIG.value, f"the config of --config={_config_path(sys.argv)}"
    print(help.of_config(config.to_dict(), title))


def required_workdir() -> Folder:
    """--workdir, which this launcher cannot do without."""
    if not WORKDIR.value:
        raise Refused("--workdir is missing; name the folder of the run, --workdir=runs/NAME.")
    return storage.folder(WORKDIR.value)


def required_config():
    """--config, which this launcher cannot do without."""
    if CONFIG.value is None:
        raise Refused("--config is missing; name a config file, --config=configs/libreoffice.py.")
    return CONFIG.value


def picture(flag: Any = PLOT) -> Path | None:
    """The file that a flag names, if it does; refused before any work when it cannot be drawn."""
    if not flag.value:
        return None
    path = Path(flag.value)
    if path.suffix.lower() not in FORMATS:
        raise Refused(f"--{flag.name} names {path}; expected one of {', '.join(FORMATS)}.")
    need("matplotlib", install="crossattn[viz]")
    writable(path)
    return path


def writable(path: Folder) -> None:
    """Refuse a file that results could not be written to, before they are computed."""
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
    turns this off. What JAX finds damaged there it compiles anew, with a warning; a folder that others may
    write to is not used, with a note.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or jax.config.jax_compilation_cache_dir:
        return
    folder = fetch.cache_dir() / "compiled"
    if why := build.not_private(folder):
        build.say(f"{folder} is not used for compiled programs: {why}")
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
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


def _parse(argv: Sequence[str], taken: Sequence[Any] | None) -> list[str]:
    """Flags read; what goes wrong in a config file becomes one sentence."""
    path = _config_path(argv)
    if path and not os.path.isfile(path):
        raise Refused(f"--config names {path}, which is no file; see configs/ for what there is.")
    if taken is not None:
        _refuse_foreign(argv, taken)
    argv, changes = overrides.taken_out(argv)
    try:
        arguments = _read(argv)
    except flags.UnrecognizedFlagError as error:
        raise Refused(help.unknown(error.flagname, taken or ())) from None
    except flags.Error as error:
        # What get_config raised comes as the text of a traceback; its last line says what is wrong.
        if "Traceback" in str(error):
            last = str(error).strip().splitlines()[-1].partition(": ")[2]
            raise Refused(f"--config={path}: {last}") from None
        raise
    except Exception as error:
        if isinstance(error, AttributeError) and "get_config" in str(error):
            raise Refused(f"{path} has no get_config(arg) that returns a ConfigDict.") from None
        raise Refused(f"--config={path} could not be read: {_one_line(error)}") from error
    if changes:
        overrides.put(CONFIG.value, changes)
    return arguments


def _read(argv: Sequence[str]) -> list[str]:
    """Flags read by absl; ml_collections looks for a config's in ``sys.argv``."""
    before, sys.argv = sys.argv, list(argv)
    try:
        return flags.FLAGS(sys.argv)
    finally:
        sys.argv = before


def _refuse_foreign(argv: Sequence[str], taken: Sequence[Any]) -> None:
    """Refuse flags that another launcher has and this one would not look at."""
    known = {holder.name for holder in taken}
    by_module = flags.FLAGS.flags_by_module_dict()
    ours = {flag.name for name, own in by_module.items() if _is_ours(name) for flag in own}
    for word in argv[1:]:
        if word == "--":
            return
        name = word.lstrip("-").partition("=")[0]
        bare = name.removeprefix("no") if name not in ours else name
        if word.startswith("-") and bare in ours - known:
            raise Refused(help.unknown(name, taken))


def _is_ours(module: str) -> bool:
    """Whether a module that defines flags is one of the launchers, by its name or its path."""
    return module.startswith("experiments.") or Path(module) == Path(sys.argv[0])


def _config_path(argv: Sequence[str]) -> str:
    """The file that --config=PATH:ARGUMENT or --config PATH:ARGUMENT names, or nothing."""
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        name, equals, value = argument.partition("=")
        if name in ("--config", "-config"):
            return (value if equals else following).partition(":")[0]
    return ""


def _one_line(error: BaseException) -> str:
    """The error without line breaks, and without halves of characters, which no terminal takes."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
