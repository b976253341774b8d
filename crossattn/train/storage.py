"""Folders of a run on this machine or in an object store (gs://, s3://), behind one kind of path.

The one thing to know: a store has no folders, no renames and no appending; an object is written whole
or not at all, and is seen by all as soon as it is written. What a file system does by a rename is
therefore done here, once for both: copied, then deleted. Paths are `pathlib`'s on this machine and
`etils.epath`'s in a store, where `fsspec` (gcsfs, s3fs) moves the bytes and `tensorstore` the arrays.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etils import epath

from crossattn.train.errors import MissingPackage, StoreGone, TrainError

Folder = Path | epath.Path

# Scheme -> the package that speaks to it, its extra, and how its users say who they are.
_STORES = {
    "gs": ("gcsfs", "gcs", "gcloud auth application-default login"),
    "s3": ("s3fs", "s3", "aws configure, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
_GLOB = re.compile(r"[\[\]*?\\\x00-\x1f]")
_NO_CREDENTIALS = (
    *("credentials", "anonymous caller", "unauthorized", "unauthenticated", "invalid_grant"),
    *("invalidaccesskeyid", "signaturedoesnotmatch", "expiredtoken", "access key id"),
)
_AWAY = (
    *("could not connect", "cannot connect", "connect call failed", "connection refused"),
    *("connection reset", "failed to connect", "timed out", "timeout", "service unavailable"),
)
_ATTEMPTS = 15  # of a request to s3://, by delays that double up to 20 s: minutes in all


def folder(path: str | os.PathLike) -> Folder:
    """The path of a work directory, or of something in it, if it can be written and read again.

    Raises:
        TrainError: its scheme is none that is known here, or its name has characters that Orbax reads
            as a pattern.
        MissingPackage: what speaks to its store is not installed.
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
    scheme = elsewhere[1]
    if scheme not in _STORES:
        raise TrainError(
            f"the work directory is {text}; runs are kept in folders of this machine, in gs:// and in"
            " s3://: train into one of these and copy it there"
        )
    if not re.match(r"[a-z0-9]+://[^/]+/+[^/]", text):
        raise TrainError(f"the work directory is {text}; expected {scheme}://BUCKET/FOLDER")
    _prepare(scheme)
    return epath.Path(text)


def absolute(path: str | os.PathLike) -> Folder:
    """The path of a folder from the root of this machine or of its store. Raises as `folder` does."""
    path_there = folder(path)
    return path_there if in_store(path_there) else path_there.absolute()


def in_store(path: str | os.PathLike) -> bool:
    """Whether a path lies in an object store."""
    return not isinstance(path, Path) and bool(_URL.match(os.fspath(path)))


def reach(path: Folder) -> None:
    """Asks a store, once, whether it lets this process see a folder that need not exist yet.

    Raises:
        TrainError: it does not, or there is no such bucket.
    """
    if not in_store(path):
        return
    files, key = _files(path)
    try:
        with contextlib.suppress(FileNotFoundError):
            files.ls(key, detail=False)
            return
        files.ls(key.partition("/")[0], detail=False)
    except Exception as error:  # Each package has errors of its own.
        raise refusal(f"the work directory {path} cannot be reached", error, path) from error


def refusal(sentence: str, error: BaseException, path: Folder, advice: str = "") -> TrainError:
    """What to raise where a store refused: a sentence, why, and advice; or where it does not answer."""
    said = f"{sentence}: {told(error, path)}"
    if is_away(error):
        return StoreGone(f"{said}; start again when the store answers")
    return TrainError(f"{said}{advice}")


def is_away(error: BaseException | None) -> bool:
    """Whether an error comes from a store that does not answer, as far as packages tell."""
    while error is not None:
        text = f"{type(error).__name__} {error}".lower()
        if isinstance(error, ConnectionError | TimeoutError) or any(x in text for x in _AWAY):
            return True
        error = error.__cause__ or error.__context__
    return False


def told(error: BaseException, path: Folder) -> str:
    """In a few words why a store refused, and what to do."""
    text = " ".join(str(error).split()) or type(error).__name__
    scheme = os.fspath(path).partition(":")[0]
    bucket = os.fspath(path).split("/")[2]
    if isinstance(error, FileNotFoundError):
        return f"there is no bucket {bucket}, or it may not be seen"
    said = f"{type(error).__name__} {text}".lower()
    if any(word in said for word in _NO_CREDENTIALS):
        return f"the store does not know who asks ({text[:160]}); try {_STORES[scheme][2]}"
    if isinstance(error, PermissionError) or "403" in said or "forbidden" in said:
        return f"permission is denied in the bucket {bucket} ({text[:160]})"
    return text[:200]


def names(path: Folder) -> list[str]:
    """What lies in a folder, nothing where there is none."""
    with contextlib.suppress(FileNotFoundError):
        if not in_store(path):
            return sorted(os.listdir(path))
        files, key = _files(path)
        children = {each.rstrip("/") for each in files.ls(key, detail=False)}
        return sorted(each.removeprefix(f"{key}/") for each in children - {key})
    return []


def sizes(path: Folder) -> dict[str, int]:
    """Relative name -> bytes, of every file below a folder."""
    if not in_store(path):
        files_below = (each for each in path.rglob("*") if each.is_file())
        return {each.relative_to(path).as_posix(): each.stat().st_size for each in files_below}
    files, key = _files(path)
    files_below = files.find(key, detail=True)
    inside = {
        name.removeprefix(f"{key}/"): entry for name, entry in files_below.items() if name != key
    }
    # A name with a slash at its end is what some tools put in place of a folder.
    return {name: entry["size"] for name, entry in inside.items() if not name.endswith("/")}


def write_whole(path: Folder, text: str) -> None:
    """The whole text or the file as it was before."""
    if in_store(path):
        path.write_text(text)
        return
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def delete(path: Folder) -> None:
    """A file, or a folder with all that is in it; nothing where there is none."""
    if in_store(path):
        files, key = _files(path)
        with contextlib.suppress(FileNotFoundError):
            files.rm(key, recursive=True)
    elif path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def move(source: Folder, target: Folder) -> None:
    """Move a file or a folder to where there is none, whose parent is there.

    Cut short in a store, the source is whole or its copy is.
    """
    if not in_store(source):
        shutil.move(source, target)
        return
    files, key = _files(source)
    _, new = _files(target)
    old = sorted(files.find(key))
    files.copy(old, [new + name.removeprefix(key) for name in old])
    files.rm(key, recursive=True)


def local_copy(path: Folder) -> Path:
    """The folder itself where it lies on this machine, else a copy of its files.

    The copy is gone when this process ends.
    """
    if isinstance(path, Path):
        return path
    scratch = tempfile.TemporaryDirectory(prefix="crossattn-")
    _COPIES.append(scratch)
    copy = Path(scratch.name)
    for name in sizes(path):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((path / name).read_bytes())
    return copy


_COPIES: list[tempfile.TemporaryDirectory] = []


@contextlib.contextmanager
def filled(path: Folder) -> Iterator[Path]:
    """A folder of this machine to write into; what is in it in the end lies in ``path``."""
    if isinstance(path, Path):
        path.mkdir(parents=True, exist_ok=True)
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="crossattn-") as scratch:
        yield Path(scratch)
        for name in sorted(sizes(Path(scratch))):
            (path / name).write_bytes((Path(scratch) / name).read_bytes())


def kvstore(path: Folder) -> dict[str, Any]:
    """How tensorstore finds a folder of a store: a key-value store of its objects."""
    scheme, _, rest = os.fspath(path).partition("://")
    bucket, _, inside = rest.partition("/")
    spec = {"driver": "gcs" if scheme == "gs" else "s3", "bucket": bucket, "path": inside}
    if scheme == "gs":
        return spec
    # Unlike s3fs, tensorstore does not look these up itself.
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint:
        spec |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        spec |= {"aws_credentials": {"type": "environment"}}
    return spec


def _prepare(scheme: str) -> None:
    """What must hold before the first path of a store is made."""
    package, extra, _ = _STORES[scheme]
    if importlib.util.find_spec(package) is None:
        raise MissingPackage(
            f"work directories in {scheme}:// need the package {package}:"
            f" pip install 'crossattn[{extra}]'"
        )
    import fsspec.config

    # Arrays are written past fsspec: what it remembers of a folder is soon wrong.
    for protocol in ("gcs", "gs") if scheme == "gs" else ("s3",):
        fsspec.config.conf.setdefault(protocol, {})["use_listings_cache"] = False
    if scheme == "s3":
        retries = {"mode": "standard", "max_attempts": _ATTEMPTS}
        fsspec.config.conf["s3"].setdefault("config_kwargs", {})["retries"] = retries
    # Else epath leaves gs:// to TensorFlow wherever that is installed.
    os.environ.setdefault("EPATH_USE_TF", "false")
    if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
        os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", emulator)
    if scheme == "s3":
        from crossattn.train import orbax_s3

        orbax_s3.install()


def _files(path: Folder) -> tuple[Any, str]:
    """The file system of a store, and the name that a path has there."""
    import fsspec.core

    files, key = fsspec.core.url_to_fs(os.fspath(path))
    return files, key.rstrip("/")
