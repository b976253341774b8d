"""The user's own parallel text: "files:PAIRS.tsv", "files:PAIRS.jsonl" or "files:SOURCE,TARGET"."""

from collections.abc import Sequence
from typing import Any

from crossattn.data.sources import Example, Option, stat
from crossattn.data.textfiles import read_pairs, split_files

FORM = "files:PATH or files:SOURCE,TARGET"
SPLITS = ()
OPTIONS = {
    "source_column": Option(object, "The column of the source."),
    "target_column": Option(object, "The column of the target."),
}


def open_split(
    paths: str, split: str, *, data_dir: Any = None, **columns: Any
) -> Sequence[Example]:
    """Returns the pairs of a split; see `textfiles.read_pairs`."""
    return read_pairs(paths, split, **columns)


def identify(paths: str, split: str, **options: Any) -> dict[str, Any]:
    """Returns path, size and time of change of the files, which are not opened."""
    return {"files": [stat(path) for path in split_files(paths, split)]}
