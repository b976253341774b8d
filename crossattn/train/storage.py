"""Folders of a run, on this machine or in a bucket of gs://.

Paths are `pathlib`'s on this machine and `etils.epath`'s in a store, with the same methods. A store has
neither renames nor appending: the functions here bridge the difference.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from etils import epath

from crossattn.files import whole
from crossattn.train.errors import MissingPackage, TrainError

Folder = Path | epath.Path

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
_GLOB = re.compile(r"[\[\]*?\\\x00-\x1f]")


def folder(path: str | os.PathLike) -> Folder:
    """Returns the path of a work directory, or of a file in it, for reading and writing.

    Raises:
        TrainError: its scheme is unknown, or its name has characters that Orbax reads as a pattern.
        MissingPackage: gcsfs, the client of gs://, is not installed.
    """
    text = str(path)
    if wrong := _GLOB.search(text):
        raise TrainError(
            f"the work directory {text!r} has {wrong.group()!r} in its name, which checkpoints cannot be"
            " read from; use a name without [, ], *, ? and backslashes"
        )
    elsewhere = _URL.match(text)
    if elsewhere is None:
        return Path(path)
    if elsewhere[1] != "gs":
        raise TrainError(
            f"the work directory is {text}; runs are kept in folders of this machine and in gs://: train"
            " into one of these and copy it there"
        )
    if not re.match(r"gs://[^/]+/+[^/]", text):
        raise TrainError(f"the work directory is {text}; expected gs://BUCKET/FOLDER")
    if importlib.util.find_spec("gcsfs") is None:
        raise MissingPackage(
            "work directories in gs:// need the package gcsfs: pip install 'crossattn[gcs]'"
        )
    import fsspec.config

    # Orbax writes arrays past fsspec, whose cache of listings would be stale.
    for protocol in ("gcs", "gs"):
        fsspec.config.conf.setdefault(protocol, {})["use_listings_cache"] = False
    return epath.Path(text)


def absolute(path: str | os.PathLike) -> Folder:
    """Returns the absolute path of a folder. Raises as `folder` does."""
    path_there = folder(path)
    return path_there if in_store(path_there) else path_there.absolute()


def in_store(path: str | os.PathLike) -> bool:
    """Returns whether a path is in an object store."""
    return not isinstance(path, Path) and bool(_URL.match(os.fspath(path)))


def children(path: Folder) -> list[Folder]:
    """Returns the sorted files and folders in a folder, none if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(path.iterdir(), key=lambda each: each.name)
    return []


def sizes(path: Folder) -> dict[str, int]:
    """Returns {relative name: bytes} of every file below a folder."""
    found: dict[str, int] = {}
    for each in children(path):
        if each.is_dir():
            below = sizes(each)
            found |= {f"{each.name}/{name}": size for name, size in below.items()}
        else:
            found[each.name] = epath.Path(each).stat().length
    return found


def write_whole(path: Folder, text: str) -> None:
    """Writes a file as a whole; a failure leaves it as it was."""
    if in_store(path):
        path.write_text(text)
        return
    with whole(Path(path)) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def delete(path: Folder) -> None:
    """Deletes a file, or a folder and its contents, if it exists."""
    if path.is_dir():
        epath.Path(path).rmtree(missing_ok=True)
    else:
        path.unlink(missing_ok=True)


def move(source: Folder, target: Folder) -> None:
    """Moves a file or a folder to a new path."""
    if not in_store(source):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(source, target)
        return
    if source.is_dir():
        _copy_files(source, target)
    else:
        target.write_bytes(source.read_bytes())
    delete(source)


def local_copy(path: Folder) -> Path:
    """Returns the folder itself if it is on this machine, else a copy, deleted when the process ends."""
    if isinstance(path, Path):
        return path
    scratch = tempfile.TemporaryDirectory(prefix="crossattn-")
    _COPIES.append(scratch)
    _copy_files(path, Path(scratch.name))
    return Path(scratch.name)


_COPIES: list[tempfile.TemporaryDirectory] = []


@contextlib.contextmanager
def filled(path: Folder) -> Iterator[Path]:
    """Gives a folder of this machine to write into; its files end up in ``path``."""
    if isinstance(path, Path):
        path.mkdir(parents=True, exist_ok=True)
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="crossattn-") as scratch:
        yield Path(scratch)
        _copy_files(Path(scratch), path)


def _copy_files(source: Folder, target: Folder) -> None:
    for name in sizes(source):
        if not in_store(target):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes((source / name).read_bytes())
