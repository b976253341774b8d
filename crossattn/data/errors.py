"""Failures of data: wrong as a whole, wrong in one value, or not on this machine."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path


class DataError(ValueError):
    """Wrong data, or a wrong request for them; the message names file and line, or the option."""


class Unreadable(DataError):
    """A single value that cannot be read; its example can be left out."""


class DataUnavailable(RuntimeError):
    """Data that are not on this machine; the message says which file to put where."""


def absent(filenames: Sequence[str], folder: Path, reason: str) -> DataUnavailable:
    """Returns the error that asks for files in a folder."""
    return DataUnavailable(f"put {', '.join(filenames)} in {folder} ({reason.rstrip('.')})")


@contextlib.contextmanager
def needs(purpose: str, extra: str) -> Iterator[None]:
    """Names the extra of this library that brings a package which an import inside the context lacks.

    Raises:
        ModuleNotFoundError: a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{purpose}; {error.name} is not installed: pip install crossattn[{extra}]",
            name=error.name,
        ) from error
