"""The kernels' shared library: compiled once for this machine, and looked at before it is loaded.

The library's name ends with its checksum, so one renaming makes it appear whole: what a killed builder leaves
is never loaded, and what was damaged later is compiled again. Of several processes one compiles.
"""

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

import jax

try:
    import fcntl
except ImportError:  # not a POSIX system: each process compiles what it does not find
    fcntl = None

_FLAGS = (
    *"-O3 -std=c++17 -fPIC -fno-math-errno -fno-trapping-math -ffp-contract=fast -w".split(),
    "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native",
)
_LONGEST = 300  # seconds for one compiler, and for another process to be done with it
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class Unavailable(Exception):
    """Reason for which there can be no library here."""


def library() -> Path:
    """Returns the shared library, from the cache when it is there and whole, else compiled into it.

    Raises:
      Unavailable: there is no compiler, it fails, or there is no folder that is the user's alone.
    """
    sources = _sources()
    made_from = sorted(sources.items()), _FLAGS, jax.__version__, _processor()
    name = f"kernels-{hashlib.sha256(repr(made_from).encode()).hexdigest()[:16]}"
    refused = []
    for folder in _folders():
        why = not_private(folder)
        if why is None and (built := _whole(folder, name)):
            return built
        if why is None and not os.access(folder, os.W_OK):
            why = "it cannot be written to"
        if why is None:
            return _built_once(folder, name, sources)
        refused.append(f"{folder} is not used for compiled kernels: {why}")
        say(refused[-1])
    raise Unavailable("; ".join(refused))


def say(line: str) -> None:
    """Prints one line to the user, who did not ask for what takes time now."""
    print(f"crossattn: {line}", file=sys.stderr, flush=True)


def _folders() -> Iterator[Path]:
    """Yields folders for the library: the cache, then a temporary folder of this user."""
    with contextlib.suppress(RuntimeError):  # nobody's home is known
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        yield Path(cache, "crossattn").absolute()
    user = os.geteuid() if hasattr(os, "geteuid") else "user"
    yield Path(tempfile.gettempdir(), f"crossattn-{user}").absolute()


def not_private(folder: Path) -> str | None:
    """Returns the reason for which compiled code there is not trusted, or None; makes a missing folder."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve(strict=True)
        own, above = folder.stat(), [parent.stat() for parent in folder.parents]
    except OSError as error:
        return f"it cannot be made or read ({error.strerror})"
    if fcntl is None:  # owners and modes are those of POSIX
        return None
    if own.st_uid not in (os.geteuid(), 0):
        return f"it belongs to another user (id {own.st_uid})"
    if own.st_mode & stat.S_IWOTH or (own.st_mode & stat.S_IWGRP and not _alone(own.st_gid)):
        return f"others may write to it; chmod go-w {shlex.quote(str(folder))}"
    for path, status in zip(folder.parents, above, strict=True):
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            return f"others may write to {path} and so replace it"
    return None


def _alone(group: int) -> bool:
    """Returns whether the group is this user's own, as many systems give each user one."""
    import grp
    import pwd

    try:
        user, members = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return members.gr_name == user.pw_name and set(members.gr_mem) <= {user.pw_name}


def _whole(folder: Path, name: str) -> Path | None:
    """Returns the library of that name whose content matches its checksum."""
    for path in sorted(folder.glob(f"{name}-*.so")):
        with contextlib.suppress(OSError):
            own = path.lstat()
            private = fcntl is None or own.st_uid in (os.geteuid(), 0)
            if stat.S_ISREG(own.st_mode) and private and not own.st_mode & _OTHERS:
                if path.stem == f"{name}-{_checksum(path)}":
                    return path
    return None


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def _built_once(folder: Path, name: str, sources: dict[str, str]) -> Path:
    """Compiles the library, unless another process has done so meanwhile."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        raise Unavailable("no C++ compiler (c++, g++ or clang++) was found to build it")
    try:
        with _alone_in(folder):
            if built := _whole(folder, name):
                return built
            say(
                f"compiling attention for this processor into {folder}, once, which takes about ten "
                "seconds; ahead of time: python -m crossattn build"
            )
            return _compiled(compiler, folder, name, sources)
    except OSError as error:
        raise Unavailable(f"it could not be built in {folder}: {error.strerror or error}") from None


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Waits until no other process builds there. The lock ends with the process that holds it."""
    if fcntl is None:
        yield
        return
    with (folder / ".building").open("ab") as file:
        deadline, waiting = time.monotonic() + _LONGEST, False
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    say("waiting for another process, which is compiling the kernel of attention")
                waiting = True
                time.sleep(0.05)
            except OSError:  # a file system without locks: more may compile, to the same end
                break
        yield


def _compiled(compiler: str, folder: Path, name: str, sources: dict[str, str]) -> Path:
    """Compiles the library aside and moves it into place; removes damaged ones."""
    for left in folder.glob(".build-*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
        for file, text in sources.items():
            Path(scratch, file).write_text(text, encoding="utf-8")
        units = [str(Path(scratch, file)) for file in sorted(sources) if file.endswith(".cc")]
        options = [*_FLAGS, "-I", jax.ffi.include_dir(), "-c"]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda unit: _run([compiler, *options, unit, "-o", f"{unit}.o"]), units))
        made = Path(scratch, "kernels.so")
        _run([compiler, "-shared", *(f"{unit}.o" for unit in units), "-o", str(made)])
        made.chmod(0o755)
        for damaged in folder.glob(f"{name}-*.so"):
            damaged.unlink()
        return made.replace(folder / f"{name}-{_checksum(made)}.so")


def _run(command: list[str]) -> None:
    pipes: dict[str, Any] = dict(stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        done = subprocess.run(command, text=True, errors="replace", timeout=_LONGEST, **pipes)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} was not done after {_LONGEST} seconds") from None
    if done.returncode:
        first = (done.stderr.strip() or "no message").splitlines()[0]
        raise Unavailable(f"{command[0]} could not build it: {first}")


def _sources() -> dict[str, str]:
    files = resources.files("crossattn.ops.native").iterdir()
    kept = (file for file in files if file.name.endswith((".cc", ".h")))
    return {file.name: file.read_text(encoding="utf-8") for file in kept}


def _processor() -> str:
    """Returns what ``-march=native`` depends on, as far as it can be told."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
