"""Random-access sources of sentence pairs, by name.

An example is {"id", "source", "target"} and, where there are gold word alignments, also
"source_spans" and "target_spans" (characters of each word) and "links" (source word, target word).
Tokenizers and pipelines read nothing else, so a list of such dicts is a source too.
"""

import contextlib
import functools
import io
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock

from crossattn.data import fetch, phrases, synthetic, textfiles
from crossattn.data.errors import DataError, DataUnavailable

if TYPE_CHECKING:
    from crossattn.data import stream

Example = dict[str, Any]
SPLITS = ("train", "validation", "test")
_SAMPLED = 64  # examples that tell one version of a source from another


def open_source(
    name: str,
    split: str = "train",
    *,
    data_dir: str | os.PathLike | None = None,
    reverse: bool = False,
    **options: Any,
) -> Sequence[Example]:
    """The examples of one split.

    Names: "libreoffice_help/en-fr" (de, es, ja, hi), "greek_english", "phrases", "copy",
        "files:PATH",
    "files:SOURCE,TARGET", "tfds:NAME/CONFIG"; where there is one text, which is then source and
    target, "text:PATH" (a text a line, or JSONL); and "stream:PATTERN", of which only the first examples
    are opened here (see `stream`). A direction written the other way round
    ("libreoffice_help/fr-en", "greek_english/en-el", "phrases/fr-en") exchanges source and target,
    as `reverse` does for every name.

    Args:
        name: the source; `options` are those of `synthetic.CopyTask` for "copy", of
            `textfiles.read_pairs` for "files:", `source_column` for "text:", of `stream.Stream` for
            "stream:", none otherwise.
        split: "train", "validation" or "test"; for "tfds:" any split or slice of that dataset.
        data_dir: where fetched and prepared data lie; default $CROSSATTN_DATA, else
            ~/.cache/crossattn.
        reverse: exchange source and target.

    Raises:
        DataError: the name, split, option or file content is wrong.
        DataUnavailable: the data cannot be brought to this machine; says which file to put where.
    """
    kind, _, rest = name.partition(":")
    if kind == "stream" and rest:
        return _stream(rest, reverse, options).head(split)
    if kind == "text" and rest:
        opened = _files(rest, split, _one_column(rest, **options))
    elif kind in ("files", "tfds") and rest:
        opened = (
            _files(rest, split, options)
            if kind == "files"
            else _tfds(rest, split, data_dir, options)
        )
    else:
        base, _, direction = name.partition("/")
        if base not in _OPENERS:
            kinds = ("files:PATH", "text:PATH", "tfds:NAME/CONFIG", "stream:PATTERN")
            known = ", ".join([*_OPENERS, *kinds])
            raise DataError(f"there is no data source {name!r}; expected one of {known}")
        if split not in SPLITS:
            raise DataError(f"{name} has no split {split!r}; it has {', '.join(SPLITS)}")
        opened, swapped = _OPENERS[base](direction, split, data_dir, options)
        reverse ^= swapped
    return MappedSource(opened, reversed_example) if reverse else opened


def identity(
    name: str,
    split: str = "train",
    *,
    data_dir: str | os.PathLike | None = None,
    reverse: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """What `open_source` of the same arguments depends on, JSON-able; differs when the data do.

    The user's files are known by path, size and time of change, and not opened; everything else by its
    files, where it has any, its number of examples, and some of them.

    Raises:
        DataError, DataUnavailable: as `open_source`.
    """
    found: dict[str, Any] = {"name": name, "split": split, "reverse": reverse, "options": options}
    kind, _, rest = name.partition(":")
    if kind in ("files", "text") and rest:
        return found | {"files": [_stat(path) for path in textfiles.split_files(rest, split)]}
    if kind == "stream" and rest:
        return found | _stream(rest, reverse, options).identity()
    source = open_source(name, split, data_dir=data_dir, reverse=reverse, **options)
    crc = 0
    for index in range(0, len(source), max(len(source) // _SAMPLED, 1)):
        example = source[index]
        crc = zlib.crc32(f"{example['id']}\n{example['source']}\n{example['target']}".encode(), crc)
        crc = zlib.crc32(np.asarray(example.get("links", ()), np.int32).tobytes(), crc)
    files = [_stat(path) for path in _record_files(source)]
    return found | {"files": files, "examples": len(source), "sample": crc}


def _stat(path: Path) -> list[Any]:
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    return [str(path.absolute()), found.st_size, found.st_mtime_ns]


def _record_files(source: Any) -> list[Path]:
    """The files of a dataset of TFDS; none for examples that are made by code."""
    while isinstance(source, MappedSource | _Numbered):
        source = source.items
    info = getattr(source, "dataset_info", None)
    return [] if info is None else sorted(Path(info.data_dir).iterdir())


class MappedSource(Sequence):
    """A sequence whose items are computed from another's when they are asked for."""

    def __init__(self, items: Sequence, function: Callable[[Any], Example]):
        self.items, self._function = items, function

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Example:
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of a source of {len(self)}")
        return self._function(self.items[int(index) % len(self)])


def reversed_example(example: Example) -> Example:
    """The example with source and target exchanged, gold links too."""
    turned: Example = {
        "id": example["id"],
        "source": example["target"],
        "target": example["source"],
    }
    if "links" in example:
        turned["source_spans"] = example["target_spans"]
        turned["target_spans"] = example["source_spans"]
        links = example["links"][:, ::-1]
        turned["links"] = links[np.lexsort((links[:, 1], links[:, 0]))]
    return turned


def _libreoffice_help(direction: str, split: str, data_dir, options: dict):
    _no_options("libreoffice_help", options)
    from crossattn.data.builders import libreoffice_help

    languages = libreoffice_help.LANGUAGES
    pair = direction.split("-")
    if len(pair) != 2 or "en" not in pair or not set(pair) & set(languages):
        raise DataError(
            f"libreoffice_help has no direction {direction!r}; expected en-X or X-en, "
            f"X of {', '.join(languages)}"
        )
    other = next(language for language in pair if language != "en")
    builder_class = libreoffice_help.LibreofficeHelp
    rows = _prepared(builder_class, f"en-{other}", split, data_dir)
    return MappedSource(rows, functools.partial(_example, source="en", target=other)), pair[
        0
    ] != "en"


def _greek_english(direction: str, split: str, data_dir, options: dict):
    _no_options("greek_english", options)
    from crossattn.data.builders import greek_english

    swapped = _swapped("greek_english", direction, "el-en", "en-el")
    rows = _prepared(greek_english.GreekEnglish, "el-en", split, data_dir)
    return MappedSource(rows, functools.partial(_example, source="el", target="en")), swapped


def _phrases(direction: str, split: str, data_dir, options: dict):
    _no_options("phrases", options)
    return phrases.phrase_pairs(split), _swapped("phrases", direction, "en-fr", "fr-en")


def _copy(direction: str, split: str, data_dir, options: dict):
    if direction:
        raise DataError(f"the copy task has no direction; {direction!r} was given")
    try:
        return synthetic.CopyTask(split, **options), False
    except TypeError as error:
        raise DataError(f"the copy task: {error}") from None


_OPENERS: dict[str, Callable] = {
    "libreoffice_help": _libreoffice_help,
    "greek_english": _greek_english,
    "phrases": _phrases,
    "copy": _copy,
}


def _stream(pattern: str, reverse: bool, options: dict) -> "stream.Stream":
    from crossattn.data import stream

    return stream.Stream.named(pattern, reverse=reverse, **options)


def _files(paths: str, split: str, options: dict) -> Sequence[Example]:
    try:
        return textfiles.read_pairs(paths, split, **options)
    except TypeError as error:
        raise DataError(f"files:{paths}: {error}") from None


def _one_column(path: str, **options: Any) -> dict[str, Any]:
    """The options of a file whose one text is source and target.

    Raises:
        DataError: there are others than `source_column`.
    """
    column = options.pop("source_column", "text" if path.endswith((".jsonl", ".ndjson")) else 0)
    if options:
        raise DataError(f"text:{path} takes source_column; {', '.join(sorted(options))} was given")
    return {"source_column": column, "target_column": column}


def _tfds(name: str, split: str, data_dir, options: dict) -> Sequence[Example]:
    """Any TFDS dataset whose supervised pair is two texts, or which has a text under "text"."""
    _no_options(f"tfds:{name}", options)
    import tensorflow_datasets as tfds
    import tensorflow_datasets.translate

    folder = fetch.cache_dir(data_dir) / "tfds"
    try:
        # Before the dataset is prepared its builder is made from code; afterwards it is read from
        # its folder.
        builder = tfds.builder(name, data_dir=folder, file_format="array_record")
    except Exception as error:
        known = "the name is not one of TensorFlow Datasets or its files are not in"
        raise DataUnavailable(
            f"tfds:{name} cannot be opened: {known} {folder} ({_first(error)})"
        ) from error
    _prepare(builder, f"tfds:{name}", folder)
    if split.split("[")[0].split("+")[0] not in builder.info.splits:
        raise DataError(
            f"tfds:{name} has no split {split!r}; it has {', '.join(builder.info.splits)}"
        )
    features: Any = builder.info.features or ()
    keys = builder.info.supervised_keys or [name for name in ("text", "text") if name in features]
    if not keys:
        raise DataError(
            f"tfds:{name} is no dataset of texts: it names no source and target, and has no 'text'"
        )
    source, target = map(str, keys[:2])
    rows: Any = builder.as_data_source(split=split)  # pyright: ignore[reportCallIssue]
    return MappedSource(_Numbered(rows), functools.partial(_example, source=source, target=target))


class _Numbered(Sequence):
    """Rows with their place as "id", for datasets that have none."""

    def __init__(self, rows: Sequence):
        self.items = rows

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Example:
        return {"id": str(index)} | self.items[index]


def _prepared(builder_class, config: str, split: str, data_dir) -> Sequence:
    import tensorflow_datasets as tfds

    files = fetch.cache_dir(data_dir)
    folder = files / "tfds"
    builder = builder_class(
        config=config, data_dir=str(folder), file_format="array_record", files_dir=str(files)
    )
    tfds.disable_progress_bar()  # it takes seconds, and the bars would cut into the caller's own
    try:
        _prepare(builder, f"{builder.name}/{config}", folder)
    finally:
        tfds.enable_progress_bar()
    return builder.as_data_source(split=split)


def _prepare(builder, name: str, folder) -> None:
    """Builds the dataset once, however many processes ask at the same time."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / f".{name.replace('/', '-').replace(':', '-')}.lock"
    with FileLock(lock), contextlib.redirect_stdout(io.StringIO()):
        try:
            builder.download_and_prepare()
        except (DataError, DataUnavailable):
            raise
        except Exception as error:
            raise DataUnavailable(
                f"{name} cannot be prepared here: put its prepared files in {builder.data_dir} "
                f"({_first(error)})"
            ) from error


def _example(row: dict, *, source: str, target: str) -> Example:
    example: Example = {
        "id": _text(row["id"]),
        "source": _text(row[source]),
        "target": _text(row[target]),
    }
    if "links" in row:
        example["source_spans"] = np.asarray(row[f"{source}_spans"], np.int32).reshape(-1, 2)
        example["target_spans"] = np.asarray(row[f"{target}_spans"], np.int32).reshape(-1, 2)
        example["links"] = np.asarray(row["links"], np.int32).reshape(-1, 2)
    return example


def _text(value: bytes | str) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def _swapped(name: str, direction: str, forward: str, backward: str) -> bool:
    if direction not in ("", forward, backward):
        raise DataError(f"{name} has no direction {direction!r}; expected {forward} or {backward}")
    return direction == backward


def _no_options(name: str, options: dict) -> None:
    if options:
        raise DataError(f"{name} takes no options; {', '.join(sorted(options))} was given")


def _first(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
