"""The user's own parallel text: one TSV or JSONL file, or two texts with a sentence a line.

Every complaint names the file and the line, because the file is the user's to mend. A file is never held
whole: where every 64th line begins is known, and lines are read when they are asked for.
"""

import codecs
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from crossattn.data.errors import DataError

_HALF = re.compile("[\ud800-\udfff]")  # JSON can spell it, and nothing can write it
_EVERY = 20  # without a file a split, line i is a test line when i % 20 == 0, validation when 1
_BLOCK = 64  # lines from one place that is kept in mind to the next
_CHUNK = 2**22  # bytes searched for line feeds at a time
_CHECKED = 2**26
"""Bytes up to which all lines are looked at on opening; those of larger files when they are read."""


def read_pairs(
    paths: str,
    split: str,
    *,
    source_column: int | str | None = None,
    target_column: int | str | None = None,
) -> "TextPairs":
    """Examples {"id", "source", "target"} of "PAIRS.tsv", "PAIRS.jsonl" or "SOURCE,TARGET".

    A path with "{split}" in it names one file a split; otherwise lines are dealt out: of twenty,
    the first is test, the second validation. TSV columns are numbers from 0 (default 0 and 1) or
    names in a first line of names; JSONL columns are keys (default "source" and "target").

    Raises:
        DataError: a file is missing, empty, not UTF-8 or misaligned, or a line has an empty or
            missing column, or holds half a character. Of a line in a file above 64 MiB, when that
            line is read.
    """
    files = split_files(paths, split)
    if len(files) == 2:
        if source_column is not None or target_column is not None:
            raise DataError(f"files:{paths} names two texts, which have no columns to choose from")
        tables, first, parse = *_two_texts(*files), _sentence
    elif files[0].suffix in (".jsonl", ".ndjson"):
        tables, first = [Lines(files[0])], 0
        parse = json_columns(source_column or "source", target_column or "target")
    else:
        left = 0 if source_column is None else source_column
        right = 1 if target_column is None else target_column
        tables = [Lines(files[0])]
        first, parse = _tsv(tables[0], left, right)
    every = TextPairs(tables, parse, range(first, len(tables[0])))
    if sum(file.stat().st_size for file in files) <= _CHECKED:
        for index in range(len(every)):
            every[index]
    if "{split}" in paths:
        return every
    if not (dealt := TextPairs(tables, parse, Dealt(first, len(tables[0]), split))):
        raise DataError(f"{files[0]} has too few lines for a {split} split; it takes {_EVERY}")
    return dealt


def split_files(paths: str, split: str) -> list[Path]:
    """The one or two files that "PATH" or "SOURCE,TARGET" names for a split.

    Raises:
        DataError: there is no such split, or it names more files.
    """
    if split not in ("train", "validation", "test"):
        raise DataError(f"files have no split {split!r}; they have train, validation, test")
    files = [Path(path.strip().replace("{split}", split)) for path in paths.split(",")]
    if len(files) > 2:
        raise DataError(f"files:{paths} names {len(files)} files; expected one table or two texts")
    return files


class TextPairs(Sequence):
    """Examples of some lines of a table, or of two texts, read when they are asked for."""

    def __init__(self, tables: "Sequence[Lines]", parse: "Parse", numbers: Sequence[int]):
        self._tables, self._parse, self._numbers = tables, parse, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, str]:
        number = self._numbers[index]
        return example(self._tables, number, self._parse(self._tables, number))


def example(tables: "Sequence[Lines]", number: int, texts: tuple[str, str]) -> dict[str, str]:
    """The example of line ``number``, from 0, of a table or of two texts.

    Raises:
        DataError: a text is empty, or holds half a character.
    """
    for text, side, table in zip(texts, ("source", "target"), (tables[0], tables[-1]), strict=True):
        check_text(text, side, f"{table.path}, line {number + 1}")
    name = f"{tables[0].path.name}:{number + 1}"
    return {"id": name, "source": texts[0], "target": texts[1]}


def check_text(text: str, side: str, place: str) -> None:
    """Refuses what nothing can be learnt from, or written as UTF-8.

    Raises:
        DataError: the text is empty, or holds half a character; the message begins with the place.
    """
    if not text.strip():
        raise DataError(f"{place}: the {side} text is empty")
    if not text.isascii() and (half := _HALF.search(text)):
        raise DataError(
            f"{place}: the {side} text has \\u{ord(half[0]):04x}, half a "
            "character; write both halves of its surrogate pair, or the character"
        )


Parse = Callable[[Sequence["Lines"], int], tuple[str, str]]
"""Source and target of the line of a number, from 0."""


class Dealt(Sequence):
    """The numbers from ``first`` to below ``stop`` that fall to one split."""

    def __init__(self, first: int, stop: int, split: str):
        of_twenty = {"test": [0], "validation": [1], "train": list(range(2, _EVERY))}[split]
        self._first, self._of_twenty = first, of_twenty
        rounds, rest = divmod(max(stop - first, 0), _EVERY)
        self._size = rounds * len(of_twenty) + sum(place < rest for place in of_twenty)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        if not -self._size <= index < self._size:
            raise IndexError(f"line {index} of {self._size}")
        rounds, place = divmod(index % self._size, len(self._of_twenty))
        return self._first + rounds * _EVERY + self._of_twenty[place]


class Lines(Sequence):
    """The lines of a UTF-8 file; only a line feed ends one, whatever Unicode calls a separator.

    Blank lines at the end, which editors leave, are none.

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
    """Where every 64th line begins and the file ends, and how many lines there are."""
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


def _two_texts(source: Path, target: Path) -> tuple[list[Lines], int]:
    texts = [Lines(source), Lines(target)]
    sizes = [len(text) for text in texts]
    if sizes[0] != sizes[1]:
        longer = source if sizes[0] > sizes[1] else target
        raise DataError(
            f"{longer}, line {min(sizes) + 1}: no partner ({source} has {sizes[0]} lines, "
            f"{target} has {sizes[1]})"
        )
    return texts, 0


def _sentence(tables: Sequence[Lines], number: int) -> tuple[str, str]:
    return tables[0][number], tables[1][number]


def _tsv(table: Lines, source: int | str, target: int | str) -> tuple[int, Parse]:
    """The number of its first line of text, and how a line is read."""
    first = 0
    if isinstance(source, str) or isinstance(target, str):
        header, first = table[0].split("\t"), 1
        source, target = (_column(table.path, header, column) for column in (source, target))
        if len(table) == 1:
            raise DataError(f"{table.path}, line 1: there is nothing after the column names")

    def parse(tables: Sequence[Lines], number: int) -> tuple[str, str]:
        row = tables[0][number].split("\t")
        if len(row) <= max(source, target):
            needed = max(source, target) + 1
            raise DataError(
                f"{tables[0].path}, line {number + 1}: {len(row)} column(s), expected {needed}, "
                "tab-separated"
            )
        return row[source], row[target]

    return first, parse


def _column(path: Path, header: list[str], column: int | str) -> int:
    if isinstance(column, int):
        return column
    if column not in header:
        raise DataError(
            f"{path}, line 1: no column {column!r}; the columns are {', '.join(header)}"
        )
    return header.index(column)


def json_columns(source: int | str, target: int | str) -> Parse:
    """How a line of JSONL is read, by the keys of both texts."""

    def parse(tables: Sequence[Lines], number: int) -> tuple[str, str]:
        record = json_record(tables[0][number], f"{tables[0].path}, line {number + 1}")
        return texts_of(record, (source, target), f"{tables[0].path}, line {number + 1}")

    return parse


def json_record(line: str, place: str) -> object:
    """A line of JSON.

    Raises:
        DataError: it is none; the message begins with the place.
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


def texts_of(record: object, keys: tuple[int | str, int | str], place: str) -> tuple[str, str]:
    """Source and target of a record.

    Raises:
        DataError: it has no text under one of the keys.
    """
    texts = []
    for key in keys:
        text = record.get(key) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise DataError(f"{place}: no text under the key {key!r}")
        texts.append(text)
    return texts[0], texts[1]
