"""The work directory: whose it is, and what is in it.

The one thing to know: `config.json` in it says which settings made it, and a run with other
settings is refused key by key rather than mixed in. Nothing is ever deleted.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from crossattn.train import processes
from crossattn.train.errors import WorkdirBusy, WorkdirMismatch

# What a run writes, and what `resume="never"` puts aside.
OWNED = ("config.json", "metrics.jsonl", "checkpoints", "tensorboard", "assets", "unreadable")

# Settings that may differ from one start to the next: they change what is kept and shown, or
# where it is computed, not what is learnt. Matched against every part of a dotted key.
MAY_CHANGE = frozenset({"log_every", "eval_every", "checkpoint", "mesh", "resume", "writers"})


@contextmanager
def claim(workdir: Path, settings: Mapping[str, Any], resume: str) -> Iterator[None]:
    """Holds the work directory for one run with these settings.

    Raises:
        WorkdirMismatch: other settings made it.
        WorkdirBusy: another process is training in it.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    if not processes.is_main():
        processes.barrier("work directory claimed")
        yield
        return
    with (workdir / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise WorkdirBusy(
                f"another process is training in {workdir}; wait for it or use another workdir"
            ) from None
        if resume == "never":
            _put_aside(workdir)
        _settle_config(workdir, flatten(settings))
        processes.barrier("work directory claimed")
        yield


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


def write_atomically(path: Path, text: str) -> None:
    """The whole text or the file as it was before."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def _settle_config(workdir: Path, settings: Mapping[str, Any]) -> None:
    path = workdir / "config.json"
    if path.exists():
        try:
            old = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
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
        if changed:
            differences = "; ".join(
                f"{key} was {_show(old, key)}, is {_show(settings, key)}" for key in changed
            )
            raise WorkdirMismatch(
                f"{workdir} was made by another config ({differences}): use the old values,"
                " another workdir, or resume 'never', which puts the old run aside"
            )
    write_atomically(path, json.dumps(settings, indent=1, ensure_ascii=False) + "\n")


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
