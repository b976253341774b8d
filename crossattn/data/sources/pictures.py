"""The user's own pictures: "pictures:TABLE.tsv" or "pictures:TABLE.jsonl", a line a picture.

A TSV begins with the names of its columns, and a line of JSONL is an object of texts. `image` is the path
of the picture, seen from the folder of the table; what else there is, such as a label or a caption, stands
in the examples under its own name. A path with "{split}" in it names one table a split; otherwise lines are
dealt out: of twenty, the first is test, the second validation. Pictures are opened when they are prepared.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crossattn.data.errors import DataError
from crossattn.data.sources import Example, MappedSource, stat
from crossattn.data.textfiles import Dealt, Lines, json_record, split_files

FORM = "pictures:PATH"
SPLITS = ()
_IMAGE = "image"
_MOST = 1000  # classes; a column of more values is no label


def open_split(path: str, split: str, *, data_dir: Any = None) -> Sequence[Example]:
    """Examples {"id", "image", ...}: the path of a picture, and the texts that stand beside it.

    Raises:
        DataError: there is no such table, it has no pictures, or none for this split; of a line, the first
            now and others when they are read, that it has other columns; or the first names no picture.
    """
    table = _Table(_file(path, split))
    numbers = range(table.first, len(table.lines))
    if "{split}" not in path:
        numbers = Dealt(table.first, len(table.lines), split)
    if not len(numbers):
        raise DataError(f"{table.lines.path} has too few lines for a {split} split")
    first = table.example(numbers[0])[_IMAGE]  # which is refused now rather than in training
    if not Path(first).is_file():
        raise DataError(f"{table.lines.path}, line {numbers[0] + 1}: there is no picture {first}")
    return MappedSource(numbers, table.example)


def identify(path: str, split: str, **options: Any) -> dict[str, Any]:
    """The table by path, size and time of change."""
    return {"files": [stat(_file(path, split))]}


def classes(path: str, data_dir: Any = None) -> Mapping[str, tuple[str, ...]]:
    """The values of each column, sorted, of the table that is trained on; not of columns of too many."""
    table, found = _Table(_file(path, "train")), {}
    for number in range(table.first, len(table.lines)):
        for name, value in table.record(number).items():
            values = found.setdefault(name, set())
            if len(values) <= _MOST:
                values.add(value)
    found.pop(_IMAGE, None)
    return {name: tuple(sorted(values)) for name, values in found.items() if len(values) <= _MOST}


class _Table:
    """Lines of a table, and what stands in them."""

    def __init__(self, path: Path):
        self.lines = Lines(path)
        self.columns: list[str] | None = None
        if path.suffix not in (".jsonl", ".ndjson"):
            self.columns = self.lines[0].split("\t")
            if _IMAGE not in self.columns or len(set(self.columns)) < len(self.columns):
                raise DataError(
                    f"{path}, line 1: the columns are {', '.join(self.columns)}; expected their names, each "
                    f"once, {_IMAGE!r} among them"
                )
        self.first = 0 if self.columns is None else 1

    def record(self, number: int) -> dict[str, str]:
        """The texts of a line, by their columns."""
        place = f"{self.lines.path}, line {number + 1}"
        line = self.lines[number]
        if self.columns is not None:
            row = line.split("\t")
            if len(row) != len(self.columns):
                raise DataError(f"{place}: {len(row)} column(s), expected {len(self.columns)}")
            return dict(zip(self.columns, row, strict=True))
        record = json_record(line, place)
        if not isinstance(record, dict) or not isinstance(record.get(_IMAGE), str):
            raise DataError(f"{place}: no text under the key {_IMAGE!r}")
        return {name: value for name, value in record.items() if isinstance(value, str)}

    def example(self, number: int) -> Example:
        """The example of a line."""
        record, folder = self.record(number), self.lines.path.parent
        name = f"{self.lines.path.name}:{number + 1}"
        return record | {"id": name, _IMAGE: str(folder / record[_IMAGE])}


def _file(path: str, split: str) -> Path:
    files = split_files(path, split)
    if len(files) != 1:
        raise DataError(f"pictures:{path} names {len(files)} files; expected one table")
    return files[0]
