"""Work directory of a run: one process at a time, and one config.

`config.json` has its settings. A run with other settings is refused key by key, except for more steps; where
no step was trained, what is there is put aside. Nothing is ever deleted.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from filelock import FileLock, Timeout

from crossattn.train import processes, storage
from crossattn.train.errors import TrainError, WorkdirBusy, WorkdirMismatch
from crossattn.train.storage import Folder

_LOG = logging.getLogger(__name__)

# Files of a run, which `resume="never"` moves aside.
OWNED = (
    *("config.json", "metrics.jsonl", "log.txt"),
    *("checkpoints", "tensorboard", "assets", "unreadable", "profile", "attention"),
    *("results-train.json", "results-validation.json", "results-test.json"),
)

# Settings that may differ between starts, as they do not change the parameters. Any part of a dotted
# key may match.
MAY_CHANGE = frozenset(
    ("log_every", "eval_every", "checkpoint", "mesh", "resume", "writers")
    + ("attention_stats", "offload_optimizer", "xla_flags", "profile_first", "profile_steps")
)

# The number of steps, by the names of the launchers and of `train`.
MAY_GROW = ("train.steps", "steps")


def refuse_unwritable(workdir: str | Folder) -> None:
    """Checks that a work directory can be written, before anything is created.

    Raises:
        TrainError: it is no folder, or the file system refuses to write there.
    """
    path = storage.absolute(workdir)
    try:
        if storage.in_store(path):
            if processes.is_main():
                trial = path / f".writable-{os.getpid()}"
                trial.write_bytes(b"")
                trial.unlink()
            return
        while not path.exists() and not path.is_symlink():
            path = path.parent
        if not path.exists():
            raise _unwritable(workdir, f"{path} is a link to nothing")
        if not path.is_dir():
            raise _unwritable(workdir, f"{path} is a file")
        if not os.access(path, os.W_OK | os.X_OK):
            raise _unwritable(workdir, f"nothing may be written in {path}")
    except TrainError:
        raise
    except Exception as error:  # A store's package raises its own.
        raise _unwritable(workdir, getattr(error, "strerror", None) or str(error)) from error


def _unwritable(workdir: str | Folder, reason: str | None) -> TrainError:
    return TrainError(
        f"the work directory {workdir} cannot be written: {reason}; name another with --workdir"
    )


@contextmanager
def claim(workdir: Folder, settings: Mapping[str, Any], resume: str) -> Iterator[int | None]:
    """Locks the work directory for a run with these settings; gives its former number of steps, if it grows.

    Raises:
        WorkdirMismatch: it belongs to a run with other settings.
        WorkdirBusy: another process is training in it.
        TrainError: it cannot be written.
    """
    refuse_unwritable(workdir)
    with ExitStack() as held:
        if not storage.in_store(workdir):  # a store has neither folders nor locks
            try:
                workdir.mkdir(parents=True, exist_ok=True)
                if processes.is_main():
                    held.enter_context(FileLock(workdir / ".lock", timeout=0))
            except Timeout:
                raise WorkdirBusy(
                    f"another process is training in {workdir}; wait for it or use another workdir"
                ) from None
            except OSError as error:
                raise _unwritable(workdir, error.strerror) from None
        grown = None
        if processes.is_main():
            if resume == "never":
                _put_aside(workdir)
            grown = _settle_config(workdir, flatten(settings))
        processes.barrier("work directory claimed")
        yield grown


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested settings to dotted keys, with values as JSON returns them."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = json.loads(json.dumps(value, default=str))
    return dict(sorted(flat.items()))


def read_settings(path: Folder) -> dict[str, Any]:
    """Reads ``config.json``: dotted keys and their values.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is no JSON object.
    """
    try:
        settings = json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(settings, dict):
        raise ValueError(f"it holds a {type(settings).__name__} where an object belongs")
    return settings


def _settle_config(workdir: Folder, settings: Mapping[str, Any]) -> int | None:
    """Writes the settings; returns the former number of steps of a run that grows."""
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
        if changed and _is_untrained(workdir):
            _put_aside(workdir)
            _LOG.warning("the run in %s had trained no step; it was put aside", workdir)
        elif changed:
            differences = "; ".join(
                f"{key} was {_show(old, key)}, is {_show(settings, key)}" for key in changed
            )
            raise WorkdirMismatch(
                f"{workdir} was made by another config ({differences}): use the old values,"
                " another workdir, or resume 'never', which puts the old run aside"
            )
    storage.write_whole(path, json.dumps(settings, indent=1, ensure_ascii=False) + "\n")
    return grown


def _is_untrained(workdir: Folder) -> bool:
    """Whether a local folder is of a run alone, which logged no step and wrote no checkpoint.

    In a store another process may be training.
    """
    names = {each.name for each in storage.children(workdir)} - {".lock"}
    others = {name for name in names if not name.startswith("previous-")} - {*OWNED}
    if storage.in_store(workdir) or others or "metrics.jsonl" in names:
        return False
    return not any(each.name.isdigit() for each in storage.children(workdir / "checkpoints"))


def _is_more(old: Mapping[str, Any], new: Mapping[str, Any], key: str) -> bool:
    before, now = old.get(key), new.get(key)
    return isinstance(before, int) and isinstance(now, int) and before < now


def _show(settings: Mapping[str, Any], key: str) -> str:
    return json.dumps(settings[key], ensure_ascii=False) if key in settings else "not set"


def _put_aside(workdir: Folder) -> None:
    there = {each.name for each in storage.children(workdir)}
    if not (old := [name for name in OWNED if name in there]):
        return
    number = 1
    while f"previous-{number}" in there:
        number += 1
    # config.json last: if this is interrupted, another config is still refused.
    for name in reversed(old):
        storage.move(workdir / name, workdir / f"previous-{number}" / name)
