"""The user's own parallel text: one TSV or JSONL file, or two texts with a sentence a line.

Every refusal names the file and the line. A file is never held whole: only the place of every 64th line is
kept, and lines are read when they are asked for.
"""

import codecs
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from crossattn.data.errors import DataError
from crossattn.data.sources import Example, MappedSource

_HALF = re.compile("[\ud800-\udfff]")  # JSON can spell it, and nothing can write it
_EVERY = 20  # without a file a split, line i is a test line when i % 20 == 0, validation when 1
_BLOCK = 64  # lines between two places that are kept
_CHUNK = 2**22  # bytes searched for line feeds at a time
_CHECKED = 2**26
"""Bytes up to which all lines are checked on opening; those of larger files when they are read."""

_Texts = Callable[[int], tuple[str, str]]  # source and target of a line, by its number from 0


def read_pairs(
    paths: str,
    split: str,
    *,
    source_column: int | str | None = None,
    target_column: int | str | None = None,
) -> Sequence[Example]:
    """Returns examples {"id", "source", "target"} of "PAIRS.tsv", "PAIRS.jsonl" or "SOURCE,TARGET".

    A path with "{split}" in it names one file a split; otherwise lines are dealt out: of twenty,
    the first is test, the second validation. TSV columns are numbers from 0 (default 0 and 1) or
    names in a first line of names; a first line "source", "target" is one of names, too. JSONL columns
    are keys (default "source" and "target").

    Raises:
        DataError: a file is missing, empty, not UTF-8 or misaligned, or a line has an empty or
            missing column or two of that name, or holds half a character. Of a line in a file above 64
            MiB, when that line is read.
    """
    files = split_files(paths, split)
    if len(files) == 2 and (source_column is not None or target_column is not None):
        raise DataError(f"files:{paths} names two texts, which have no columns to choose from")
    tables, first = [Lines(file) for file in files], 0
    if len(files) == 2:
        texts = _two_texts(*tables)
    elif is_jsonl(files[0]):
        texts = _json_texts(tables[0], source_column or "source", target_column or "target")
    else:
        if files[0].suffix.lower() in (".csv", ".json"):
            raise DataError(
                f"{files[0]}: expected a table with tabs, .tsv, or one record a line, .jsonl"
            )
        left = 0 if source_column is None else source_column
        right = 1 if target_column is None else target_column
        if tables[0][0].split("\t") == ["source", "target"] and (left, right) == (0, 1):
            left, right = "source", "target"
        texts, first = _tsv_texts(tables[0], left, right)

    def example(number: int) -> Example:
        pair = texts(number)
        for text, side, table in zip(
            pair, ("source", "target"), (tables[0], tables[-1]), strict=True
        ):
            _check_text(text, side, f"{table.path}, line {number + 1}")
        return {"id": f"{files[0].name}:{number + 1}", "source": pair[0], "target": pair[1]}

    numbers: Sequence[int] = range(first, len(tables[0]))
    if sum(file.stat().st_size for file in files) <= _CHECKED:
        for number in numbers:
            example(number)
    if "{split}" not in paths:
        numbers = dealt(first, len(tables[0]), split)
        if not len(numbers):
            raise DataError(
                f"{files[0]} has too few lines for a {split} split: of {_EVERY}, the first is test, the "
                "second validation, and the others are train"
            )
    return MappedSource(numbers, example)


def split_files(paths: str, split: str) -> list[Path]:
    """Returns the one or two files that "PATH" or "SOURCE,TARGET" names for a split.

    Raises:
        DataError: there is no such split, or it names more files.
    """
    if split not in ("train", "validation", "test"):
        raise DataError(f"files have no split {split!r}; they have train, validation, test")
    files = [Path(path.strip().replace("{split}", split)) for path in paths.split(",")]
    if len(files) > 2:
        raise DataError(f"files:{paths} names {len(files)} files; expected one table or two texts")
    return files


def is_jsonl(path: Path | str) -> bool:
    """Returns whether a path names a JSONL file."""
    return str(path).endswith((".jsonl", ".ndjson"))


def dealt(first: int, stop: int, split: str) -> Sequence[int]:
    """Returns the numbers from ``first`` to below ``stop`` that fall to one split: of twenty, one or 18."""
    if split != "train":
        return range(first + (split == "validation"), stop, _EVERY)
    rounds, rest = divmod(max(stop - first, 0), _EVERY)
    held_out, size = 2, _EVERY - 2
    return MappedSource(
        range(rounds * size + max(rest - held_out, 0)),
        lambda index: first + index // size * _EVERY + held_out + index % size,
    )


def _check_text(text: str, side: str, place: str) -> None:
    if not text.strip():
        raise DataError(f"{place}: the {side} text is empty; take the line out, or write one")
    if not text.isascii() and (half := _HALF.search(text)):
        raise DataError(
            f"{place}: the {side} text has \\u{ord(half[0]):04x}, half a "
            "character; write both halves of its surrogate pair, or the character"
        )


class Lines(Sequence):
    """The lines of a UTF-8 file, read when they are asked for; only a line feed ends one.

    Blank lines at the end, which editors leave, do not count.

    Raises:
        DataError: it cannot be read, or is empty; or on reading, a line is not UTF-8.
    """

    def __init__(self, path: Path):
        self.path = path
        if path.exists() and not path.is_file():  # a device may have no end
            raise DataError(f"{path} is no file; expected a file of text")
        try:
            self._edges, self._size = _line_edges(path)
            self._block: tuple[int, list[bytes]] = -1, []
            while self._size and not self._raw(self._size - 1).decode("utf-8", "replace").strip():
                self._size -= 1
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from None
        if not self._size:
            raise DataError(f"{path}, line 1: the file is empty")

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> str:
        if not -self._size <= index < self._size:
            raise IndexError(f"line {index} of {self._size}")
        index %= self._size
        try:
            raw = self._raw(index)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}") from None
        try:
            return raw.decode("utf-8").removesuffix("\r")
        except UnicodeDecodeError as error:
            before = sum(len(line) + 1 for line in self._block[1][: index % _BLOCK])
            at = int(self._edges[index // _BLOCK]) + before + error.start
            raise DataError(
                f"{self.path}, line {index + 1}: not UTF-8 (byte 0x{raw[error.start]:02X} at offset "
                f"{at}); convert the file to UTF-8"
            ) from None

    def _raw(self, index: int) -> bytes:
        number, place = divmod(index, _BLOCK)
        cached, lines = self._block
        if cached != number:
            start, end = map(int, self._edges[number : number + 2])
            with self.path.open("rb") as file:
                file.seek(start)
                lines = file.read(end - start).removesuffix(b"\n").split(b"\n")
            self._block = number, lines
        if place >= len(lines):
            raise DataError(f"{self.path} became shorter while it was being read")
        return lines[place]


def _line_edges(path: Path) -> tuple[np.ndarray, int]:
    """Returns the places of every 64th line and of the end of the file, and the number of lines."""
    with path.open("rb") as file:
        begin = len(codecs.BOM_UTF8) * (file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8)
        file.seek(begin)
        at, lines, last = begin, 0, b"\n"
        parts = [np.array([begin])]
        for chunk in iter(lambda: file.read(_CHUNK), b""):
            ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n"))
            parts.append(at + 1 + ends[-(lines + 1) % _BLOCK :: _BLOCK])
            at, lines, last = at + len(chunk), lines + len(ends), chunk[-1:]
    edges = np.concatenate(parts)
    # A line feed that ends the file begins no line.
    return np.append(edges[edges < at], at), lines + (last != b"\n")


def _two_texts(source: Lines, target: Lines) -> _Texts:
    sizes = [len(source), len(target)]
    if sizes[0] != sizes[1]:
        longer = source if sizes[0] > sizes[1] else target
        raise DataError(
            f"{longer.path}, line {min(sizes) + 1}: no partner ({source.path} has {sizes[0]} lines, "
            f"{target.path} has {sizes[1]})"
        )
    return lambda number: (source[number], target[number])


def _tsv_texts(table: Lines, source: int | str, target: int | str) -> tuple[_Texts, int]:
    """Returns the texts of a table and the number of its first line of text."""
    first = 0
    if isinstance(source, str) or isinstance(target, str):
        header, first = table[0].split("\t"), 1
        source, target = (_column(table.path, header, column) for column in (source, target))
        if len(table) == 1:
            raise DataError(f"{table.path}, line 1: there is nothing after the column names")
    needed = max(source, target) + 1

    def texts(number: int) -> tuple[str, str]:
        row = table[number].split("\t")
        if len(row) < needed:
            raise DataError(
                f"{table.path}, line {number + 1}: {len(row)} column(s), expected {needed}, "
                "tab-separated"
            )
        return row[source], row[target]

    return texts, first


def _column(path: Path, header: list[str], column: int | str) -> int:
    if isinstance(column, int):
        return column
    if column not in header:
        raise DataError(
            f"{path}, line 1: no column {column!r}; the columns are {', '.join(header)}"
        )
    if header.count(column) > 1:
        raise DataError(f"{path}, line 1: two columns are named {column!r}; name each once")
    return header.index(column)


def _json_texts(table: Lines, source: int | str, target: int | str) -> _Texts:
    def texts(number: int) -> tuple[str, str]:
        place = f"{table.path}, line {number + 1}"
        record = json_record(table[number], place)
        found = []
        for key in (source, target):
            text = record.get(key) if isinstance(record, dict) else None
            if not isinstance(text, str):
                raise DataError(f"{place}: no text under the key {key!r}")
            found.append(text)
        return found[0], found[1]

    return texts


def json_record(line: str, place: str) -> object:
    """Reads a line of JSON.

    Raises:
        DataError: it is no JSON; the message begins with the place.
    """
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not JSON ({error.msg})") from None
    except RecursionError:
        raise DataError(f"{place}: nested too deeply to be read") from None
    except ValueError:
        most = sys.get_int_max_str_digits()
        raise DataError(f"{place}: a number of more than {most} digits; make it text") from None
