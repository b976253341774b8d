"""The work directory: whose it is, and what is in it.

The one thing to know: `config.json` in it says which settings made it, and a run with other
settings is refused key by key rather than mixed in, but for the number of steps, which may grow.
Nothing is ever deleted.
"""

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from crossattn.train import processes
from crossattn.train.errors import TrainError, WorkdirBusy, WorkdirMismatch

# What a run writes, and what `resume="never"` puts aside.
OWNED = (
    *("config.json", "metrics.jsonl", "log.txt"),
    *("checkpoints", "tensorboard", "assets", "unreadable"),
)

# Settings that may differ from one start to the next: they change what is kept and shown, or
# where it is computed, not what is learnt. Matched against every part of a dotted key.
MAY_CHANGE = frozenset({"log_every", "eval_every", "checkpoint", "mesh", "resume", "writers"})

# The last step, as the launchers and as `train` itself call it. More of them go on from where the run
# ended; fewer would be another run.
MAY_GROW = ("train.steps", "steps")

_GLOB = re.compile(r"[\[\]*?\\\x00-\x1f]")
_ELSEWHERE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


def local_folder(path: str | Path) -> Path:
    """The path of a work directory, if it is one that can be written and read again.

    Raises:
        TrainError: it lies in a bucket, or its name has characters that Orbax reads as a pattern.
    """
    text = str(path)
    if _ELSEWHERE.match(text):
        raise TrainError(
            f"the work directory is {text}; runs are kept in folders of this machine only: train into one"
            " and copy it there"
        )
    if wrong := _GLOB.search(text):
        raise TrainError(
            f"the work directory {text!r} has {wrong.group()!r} in its name, which checkpoints cannot be"
            " read from; use a name without [, ], *, ? and backslashes"
        )
    return Path(path)


def refuse_unwritable(workdir: str | Path) -> None:
    """What can be known, before anything is made, of a work directory that cannot be written.

    Raises:
        TrainError: it is none, or the file system takes nothing there.
    """
    path = local_folder(workdir).absolute()
    try:
        while not path.exists() and not path.is_symlink():
            path = path.parent
        if not path.exists():
            raise _unwritable(workdir, f"{path} is a link to nothing")
        if not path.is_dir():
            raise _unwritable(workdir, f"{path} is a file")
        if not os.access(path, os.W_OK | os.X_OK):
            raise _unwritable(workdir, f"nothing may be written in {path}")
    except OSError as error:
        raise _unwritable(workdir, error.strerror) from None


def _unwritable(workdir: str | Path, reason: str | None) -> TrainError:
    return TrainError(
        f"the work directory {workdir} cannot be written: {reason}; name another with --workdir"
    )


@contextmanager
def claim(workdir: Path, settings: Mapping[str, Any], resume: str) -> Iterator[int | None]:
    """Holds the work directory for one run with these settings; gives the number of steps before, if
    it has grown.

    Raises:
        WorkdirMismatch: other settings made it.
        WorkdirBusy: another process is training in it.
        TrainError: it is no folder that can be written.
    """
    refuse_unwritable(workdir)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock = (workdir / ".lock").open("w") if processes.is_main() else None
    except OSError as error:
        raise _unwritable(workdir, error.strerror) from None
    if lock is None:
        processes.barrier("work directory claimed")
        yield None
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise WorkdirBusy(
                f"another process is training in {workdir}; wait for it or use another workdir"
            ) from None
        if resume == "never":
            _put_aside(workdir)
        grown = _settle_config(workdir, flatten(settings))
        processes.barrier("work directory claimed")
        yield grown


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level of dotted keys, with values as JSON gives them back."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = json.loads(json.dumps(value, default=str))
    return dict(sorted(flat.items()))


def read_settings(path: Path) -> dict[str, Any]:
    """What ``config.json`` holds: dotted keys and their values.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is no JSON object, or one that cannot be read.
    """
    try:
        found = json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__} where an object belongs")
    return found


def write_atomically(path: Path, text: str) -> None:
    """The whole text or the file as it was before."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def _settle_config(workdir: Path, settings: Mapping[str, Any]) -> int | None:
    """Writes the settings down; gives the number of steps that the run had before it grew."""
    path = workdir / "config.json"
    grown = None
    if path.exists():
        try:
            old = read_settings(path)
        except (OSError, ValueError) as error:
            raise WorkdirMismatch(
                f"{path} is damaged ({error}); use another workdir, or resume 'never', which puts"
                " the old run aside"
            ) from None
        missing = object()
        changed = [
            key
            for key in sorted(old.keys() | settings.keys())
            if old.get(key, missing) != settings.get(key, missing)
            and MAY_CHANGE.isdisjoint(key.split("."))
        ]
        longer = [key for key in changed if key in MAY_GROW and _is_more(old, settings, key)]
        if longer:
            changed.remove(longer[0])
            grown = old[longer[0]]
        if changed:
            differences = "; ".join(
                f"{key} was {_show(old, key)}, is {_show(settings, key)}" for key in changed
            )
            raise WorkdirMismatch(
                f"{workdir} was made by another config ({differences}): use the old values,"
                " another workdir, or resume 'never', which puts the old run aside"
            )
    write_atomically(path, json.dumps(settings, indent=1, ensure_ascii=False) + "\n")
    return grown


def _is_more(old: Mapping[str, Any], new: Mapping[str, Any], key: str) -> bool:
    before, now = old.get(key), new.get(key)
    return isinstance(before, int) and isinstance(now, int) and before < now


def _show(settings: Mapping[str, Any], key: str) -> str:
    return json.dumps(settings[key], ensure_ascii=False) if key in settings else "not set"


def _put_aside(workdir: Path) -> None:
    old = [workdir / name for name in OWNED if (workdir / name).exists()]
    if not old:
        return
    number = 1
    while (workdir / f"previous-{number}").exists():
        number += 1
    aside = workdir / f"previous-{number}"
    aside.mkdir()
    for path in old:
        path.rename(aside / path.name)
