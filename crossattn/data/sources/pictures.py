"""The user's own pictures: "pictures:FOLDER", a folder a class, or "pictures:TABLE", a line a picture.

Examples of a folder hold `image`, the path of a picture, and `label`, the name of the folder in it that has
the picture, however deep. A table is a TSV that begins with the names of its columns, or JSONL, an object of
texts a line. `image` is the path of the picture, from the folder of the table; other columns, such as a label
or a caption, keep their names. A path with "{split}" in it names one folder or table a split; otherwise
pictures are dealt out: of twenty, the first is test, the second validation. Preparing a picture opens it.
"""

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crossattn.data.errors import DataError
from crossattn.data.sources import Example, MappedSource, stat
from crossattn.data.textfiles import Lines, dealt, is_jsonl, json_record, split_files

FORM = "pictures:PATH"
SPLITS = ()
_IMAGE = "image"
_SUFFIXES = (
    ".jpg", ".jpeg", ".png", ".gif", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".pgm",
)  # fmt: skip
_MOST = 1000  # classes; a column of more values is no label


def open_split(path: str, split: str, *, data_dir: Any = None) -> Sequence[Example]:
    """Returns examples {"id", "image", ...}: the path of a picture, and the other texts of its line.

    Raises:
        DataError: there is no such table or folder, or it has no pictures for this split; of a line, the
            first now and others when they are read, that it has other columns; or the first names no picture.
    """
    opened = _opened(path, split)
    numbers: Sequence[int] = opened.numbers
    if "{split}" not in path:
        numbers = dealt(numbers.start, numbers.stop, split)
    if not len(numbers):
        raise DataError(f"{opened.path} has too few pictures for a {split} split")
    first = opened.example(numbers[0])[_IMAGE]  # which is refused now rather than in training
    if not Path(first).is_file():
        raise DataError(f"{opened.path}, line {numbers[0] + 1}: there is no picture {first}")
    return MappedSource(numbers, opened.example)


def identify(path: str, split: str, **options: Any) -> dict[str, Any]:
    """Returns path, size and time of change of the table, or a checksum of those of a folder's files."""
    opened = _opened(path, split)
    if isinstance(opened, _Table):
        return {"files": [stat(opened.path)]}
    return {
        "pictures": zlib.crc32(repr([stat(opened.path / file) for file in opened.files]).encode())
    }


def classes(path: str, data_dir: Any = None) -> Mapping[str, tuple[str, ...]]:
    """Returns the names of a folder's folders, or the sorted values of each column of the training table.

    Columns of more than a thousand values are left out.
    """
    opened, found = _opened(path, "train"), {}
    for number in opened.numbers:
        for name, value in opened.record(number).items():
            values = found.setdefault(name, set())
            if len(values) <= _MOST:
                values.add(value)
    found.pop(_IMAGE, None)
    return {name: tuple(sorted(values)) for name, values in found.items() if len(values) <= _MOST}


def _opened(path: str, split: str) -> "_Table | _Folder":
    files = split_files(path, split)
    if len(files) != 1:
        raise DataError(f"pictures:{path} names {len(files)} files; expected one folder or table")
    return _Folder(files[0]) if files[0].is_dir() else _Table(files[0])


class _Folder:
    """Pictures in one folder a class."""

    def __init__(self, path: Path):
        found = sorted(file.relative_to(path) for file in path.glob("*/**/*"))
        self.path, self.files = path, [file for file in found if _is_picture(file)]
        self.numbers = range(len(self.files))

    def record(self, number: int) -> dict[str, str]:
        """Returns the class of a picture."""
        return {"label": self.files[number].parts[0]}

    def example(self, number: int) -> Example:
        """Returns the example of a picture."""
        file = self.files[number]
        return self.record(number) | {"id": str(file), _IMAGE: str(self.path / file)}


def _is_picture(file: Path) -> bool:
    """Returns whether a file has the name of a picture, and neither it nor its folder is hidden."""
    hidden = any(part.startswith(".") for part in file.parts)
    return file.suffix.lower() in _SUFFIXES and not hidden


class _Table:
    """Lines of a table and their columns."""

    def __init__(self, path: Path):
        self.path, self.lines = path, Lines(path)
        self.columns: list[str] | None = None
        if not is_jsonl(path):
            self.columns = self.lines[0].split("\t")
            if _IMAGE not in self.columns or len(set(self.columns)) < len(self.columns):
                raise DataError(
                    f"{path}, line 1: the columns are {', '.join(self.columns)}; expected their names, each "
                    f"once, {_IMAGE!r} among them"
                )
        self.numbers = range(0 if self.columns is None else 1, len(self.lines))

    def record(self, number: int) -> dict[str, str]:
        """Returns the texts of a line, by their columns."""
        place = f"{self.path}, line {number + 1}"
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
        """Returns the example of a line."""
        record, folder = self.record(number), self.path.parent
        name = f"{self.path.name}:{number + 1}"
        return record | {"id": name, _IMAGE: str(folder / record[_IMAGE])}
