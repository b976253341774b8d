"""The user's own texts without partners, a line each or JSONL: each is its source and its target."""

from collections.abc import Sequence
from typing import Any

from crossattn.data.sources import Example, Option
from crossattn.data.sources.files import identify
from crossattn.data.textfiles import is_jsonl, read_pairs

__all__ = ["FORM", "OPTIONS", "SPLITS", "identify", "open_split"]

FORM = "text:PATH"
SPLITS = ()
OPTIONS = {"source_column": Option(object, "The column of the text.")}


def open_split(
    path: str, split: str, *, data_dir: Any = None, source_column: int | str | None = None
) -> Sequence[Example]:
    """Returns the texts of a split; see `textfiles.read_pairs`."""
    if source_column is None:
        source_column = "text" if is_jsonl(path) else 0
    return read_pairs(path, split, source_column=source_column, target_column=source_column)
