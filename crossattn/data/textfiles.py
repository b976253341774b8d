"""The user's own parallel text: one TSV or JSONL file, or two texts with a sentence a line.

Every complaint names the file and the line, because the file is the user's to mend.
"""

import codecs
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from crossattn.data.errors import DataError

_HALF = re.compile("[\ud800-\udfff]")  # JSON can spell it, and nothing can write it
_EVERY = 20  # without a file a split, line i is a test line when i % 20 == 0, validation when 1


def read_pairs(
    paths: str,
    split: str,
    *,
    source_column: int | str | None = None,
    target_column: int | str | None = None,
) -> list[dict[str, str]]:
    """Examples {"id", "source", "target"} of "PAIRS.tsv", "PAIRS.jsonl" or "SOURCE,TARGET".

    A path with "{split}" in it names one file a split; otherwise lines are dealt out: of twenty,
    the first is test, the second validation. TSV columns are numbers from 0 (default 0 and 1) or
    names in a first line of names; JSONL columns are keys (default "source" and "target").

    Raises:
        DataError: a file is missing, empty, not UTF-8 or misaligned, or a line has an empty or
            missing column, or holds half a character.
    """
    if split not in ("train", "validation", "test"):
        raise DataError(f"files have no split {split!r}; they have train, validation, test")
    files = [Path(path.strip().replace("{split}", split)) for path in paths.split(",")]
    if len(files) == 2:
        if source_column is not None or target_column is not None:
            raise DataError(f"files:{paths} names two texts, which have no columns to choose from")
        pairs = _two_texts(*files)
    elif len(files) == 1 and files[0].suffix in (".jsonl", ".ndjson"):
        pairs = _jsonl(files[0], source_column or "source", target_column or "target")
    elif len(files) == 1:
        left = 0 if source_column is None else source_column
        right = 1 if target_column is None else target_column
        pairs = _tsv(files[0], left, right)
    else:
        raise DataError(f"files:{paths} names {len(files)} files; expected one table or two texts")
    examples = []
    for number, source, target in pairs:
        for text, side, file in ((source, "source", files[0]), (target, "target", files[-1])):
            if not text.strip():
                raise DataError(f"{file}, line {number}: the {side} text is empty")
            if not text.isascii() and (half := _HALF.search(text)):
                raise DataError(
                    f"{file}, line {number}: the {side} text has \\u{ord(half[0]):04x}, half a "
                    "character; write both halves of its surrogate pair, or the character"
                )
        examples.append({"id": f"{files[0].name}:{number}", "source": source, "target": target})
    if "{split}" not in paths:
        wanted = {"test": {0}, "validation": {1}, "train": set(range(2, _EVERY))}[split]
        examples = [example for i, example in enumerate(examples) if i % _EVERY in wanted]
        if not examples:
            raise DataError(f"{files[0]} has too few lines for a {split} split; it takes {_EVERY}")
    return examples


def _lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file; only a line feed ends one, whatever Unicode calls a separator.

    Blank lines at the end, which editors leave, are none.
    """
    if path.exists() and not path.is_file():  # a device may have no end
        raise DataError(f"{path} is no file; expected a file of text")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: not UTF-8 (byte 0x{raw[error.start]:02X} at offset "
            f"{error.start}); convert the file to UTF-8"
        ) from None
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    if not text.strip():
        raise DataError(f"{path}, line 1: the file is empty")
    while not lines[-1].strip():
        lines.pop()
    return lines


def _two_texts(source: Path, target: Path) -> Iterator[tuple[int, str, str]]:
    sources, targets = _lines(source), _lines(target)
    if len(sources) != len(targets):
        longer = source if len(sources) > len(targets) else target
        first = min(len(sources), len(targets)) + 1
        raise DataError(
            f"{longer}, line {first}: no partner ({source} has {len(sources)} lines, "
            f"{target} has {len(targets)})"
        )
    for number, pair in enumerate(zip(sources, targets, strict=True), start=1):
        yield number, *pair


def _tsv(path: Path, source: int | str, target: int | str) -> Iterator[tuple[int, str, str]]:
    rows = [line.split("\t") for line in _lines(path)]
    first = 0
    if isinstance(source, str) or isinstance(target, str):
        header, first = rows[0], 1
        source, target = _column(path, header, source), _column(path, header, target)
        if len(rows) == 1:
            raise DataError(f"{path}, line 1: there is nothing after the column names")
    for number, row in enumerate(rows[first:], start=first + 1):
        if len(row) <= max(source, target):
            needed = max(source, target) + 1
            raise DataError(
                f"{path}, line {number}: {len(row)} column(s), expected {needed}, tab-separated"
            )
        yield number, row[source], row[target]


def _column(path: Path, header: list[str], column: int | str) -> int:
    if isinstance(column, int):
        return column
    if column not in header:
        raise DataError(
            f"{path}, line 1: no column {column!r}; the columns are {', '.join(header)}"
        )
    return header.index(column)


def _jsonl(path: Path, source: int | str, target: int | str) -> Iterator[tuple[int, str, str]]:
    for number, line in enumerate(_lines(path), start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: not JSON ({error.msg})") from None
        except RecursionError:
            raise DataError(f"{path}, line {number}: nested too deeply to be read") from None
        except ValueError:
            most = sys.get_int_max_str_digits()
            raise DataError(
                f"{path}, line {number}: a number of more than {most} digits; make it text"
            ) from None
        for key in (source, target):
            if not isinstance(record, dict) or not isinstance(record.get(key), str):
                raise DataError(f"{path}, line {number}: no text under the key {key!r}")
        yield number, record[source], record[target]
