"""Files that appear whole or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def put_folder(made: Path, path: Path) -> None:
    """Gives a folder its name, unless another process has been faster."""
    try:
        os.replace(made, path)
    except OSError:
        if not path.is_dir():
            raise


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Gives the path of a file beside ``path``, which takes its place at the end.

    After an error ``path`` is as it was, and the file beside it is deleted; after a crash that one stays.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
