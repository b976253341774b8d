"""Random-access sources of examples, by name: a file of this folder is a source.

The first part of a name is that of its file, and the file reads the rest, "libreoffice_help/en-fr",
"files:PATH". A first part with a dot, "mine.letters/large", is a module of your own on the import path. A
file has

    FORM        the form of its names: "phrases/fr-en", "files:PATH"; without "/" or ":" they have no rest
    OPTIONS     the options that it takes, with their help; default {}
    SPLITS      its splits; default train, validation and test; () where open_split checks them
    CLASSES     the names of the classes of the examples' labels, by the labels' names; default {}
    classes     (argument, data_dir): the same where they are found in the data
    open_split  (argument, split, *, data_dir, **options): the examples of a split
    identify    (argument, split, *, reverse, **options): a JSON-able value that differs between versions of
                the data; default a sample of the examples

An example is a dict. A pair of texts is {"id", "source", "target"} and, where there are gold word alignments,
also "source_spans" and "target_spans" (characters of each word) and "links" (source word, target word); where
phrases are linked, "phrases" (rows of characters: start and end in the source, start and end in the target)
and their "kinds". Examples of one "family", such as the paragraphs of a file, are not independent. Other
examples hold the values that their file documents, for `crossattn.data.features`. A list of dicts is a source
too.
"""

import hashlib
import importlib
import os
import pkgutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from crossattn.data.errors import DataError

Example = dict[str, Any]
SPLITS = ("train", "validation", "test")
_SAMPLED = 64  # examples that tell one version of a source from another


@dataclass(frozen=True)
class Option:
    """An option of a source.

    Attributes:
        kind: bool, int, float or str; object is the name or the number of a column.
        meaning: one line.
        within: the range of a number, in the notation of intervals.
        choices: the texts that are allowed; () is any.
    """

    kind: type
    meaning: str
    within: str = "(-inf, inf)"
    choices: tuple[str, ...] = ()


def open_source(
    name: str,
    split: str = "train",
    *,
    data_dir: str | os.PathLike | None = None,
    reverse: bool = False,
    **options: Any,
) -> Sequence[Example]:
    """Returns the examples of one split.

    Args:
        name: the source, "phrases" or "files:mine.tsv", see `known` for the first parts, `form` for the rest.
            A direction written the other way round ("libreoffice_help/fr-en", "phrases/fr-en") exchanges
            source and target, as `reverse` does for every name.
        split: "train", "validation" or "test"; for "tfds:" any split or slice of that dataset.
        data_dir: folder of fetched and prepared data; default $CROSSATTN_DATA, else ~/.cache/crossattn.
        reverse: exchange source and target.
        options: of the source, see `options_of`.

    Raises:
        DataError: the name, split, option or file content is wrong.
        DataUnavailable: the data cannot be brought to this machine; says which file to put where.
    """
    module, argument = _find(name, options)
    splits = getattr(module, "SPLITS", SPLITS)
    if splits and split not in splits:
        raise DataError(f"{name} has no split {split!r}; it has {', '.join(splits)}")
    opened = module.open_split(argument, split, data_dir=data_dir, **options)
    if not reverse:
        return opened
    if len(opened):
        reversed_example(opened[0])  # refused now rather than in training
    return MappedSource(opened, reversed_example)


def known() -> list[str]:
    """Returns the first parts of all names."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(name: str) -> ModuleType:
    """Returns the file of the source that a name begins with.

    Raises:
        DataError: there is none, or it is no source; the message lists the sources.
    """
    first = _first_part(name)
    inside = "." not in first
    if inside and first not in known():
        near = get_close_matches(first, known(), n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        if Path(name).exists():
            hint = f" (did you mean files:{name}, text:{name} or pictures:{name}?)"
        raise DataError(
            f"there is no data source {name!r}; expected one of {', '.join(known())}{hint}"
        )
    try:
        module = importlib.import_module(f"{__name__}.{first}" if inside else first)
    except ImportError as error:
        if inside:  # it lacks a package, and says which
            raise
        raise DataError(f"the data source {first} cannot be imported ({error})") from error
    if lacking := [part for part in ("FORM", "open_split") if not hasattr(module, part)]:
        raise DataError(
            f"{module.__name__} is no data source: it has no {' and no '.join(lacking)}"
        )
    return module


def form(name: str) -> str:
    """Returns the form of names that begin like this one, "files:PATH"."""
    return find(name).FORM


def options_of(name: str) -> Mapping[str, Option]:
    """Returns the options of the source that a name begins with."""
    return getattr(find(name), "OPTIONS", {})


def classes_of(
    name: str, data_dir: str | os.PathLike | None = None
) -> Mapping[str, tuple[str, ...]]:
    """Returns the classes of the labels of the source that a name begins with, by the labels' names.

    Raises:
        DataError: there is no such source, or its files are wrong.
    """
    module, argument = _find(name, {})
    found = getattr(module, "classes", None)
    return getattr(module, "CLASSES", {}) if found is None else found(argument, data_dir)


def identity(
    name: str,
    split: str = "train",
    *,
    data_dir: str | os.PathLike | None = None,
    reverse: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Returns a JSON-able identity of the data of `open_source`, which differs when the data do.

    The user's files are known by path, size and time of change, and not opened; other data by their files,
    the number of examples, and some of them.

    Raises:
        DataError, DataUnavailable: as `open_source`.
    """
    module, argument = _find(name, options)
    fields: dict[str, Any] = {"name": name, "split": split, "reverse": reverse, "options": options}
    if hasattr(module, "identify"):
        return fields | module.identify(argument, split, reverse=reverse, **options)
    source = open_source(name, split, data_dir=data_dir, reverse=reverse, **options)
    crc = 0
    for index in range(0, len(source), max(len(source) // _SAMPLED, 1)):
        crc = checksum(source[index], crc)
    files = [stat(path) for path in _record_files(source)]
    return fields | {"files": files, "examples": len(source), "sample": crc}


def checksum(example: Example, crc: int = 0) -> int:
    """Returns a checksum of an example's values, going on from another one."""
    if "source" in example:
        crc = zlib.crc32(f"{example['id']}\n{example['source']}\n{example['target']}".encode(), crc)
        return zlib.crc32(np.asarray(example.get("links", ()), np.int32).tobytes(), crc)
    for name, value in sorted(example.items()):
        raw = value if isinstance(value, bytes) else None
        if raw is None:
            raw = value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
        crc = zlib.crc32(raw, zlib.crc32(name.encode(), crc))
    return crc


def stat(path: Path) -> list[Any]:
    """Returns a file's path, size and time of change.

    Raises:
        DataError: it cannot be read.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    return [str(path.absolute()), status.st_size, status.st_mtime_ns]


class MappedSource(Sequence):
    """A sequence whose items are computed from another's when they are asked for."""

    def __init__(self, items: Sequence, function: Callable[[Any], Any]):
        self.items, self._function = items, function

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of a source of {len(self)}")
        return self._function(self.items[int(index) % len(self)])

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Returns several items at once, four times as fast from files as one by one."""
        return [self._function(item) for item in items_of(self.items, indices)]


def items_of(source: Sequence, indices: Sequence[int]) -> list[Any]:
    """Returns the items of these indices, from 0 on, at once where the source can do that."""
    together = getattr(source, "__getitems__", None)
    return [source[i] for i in indices] if together is None else list(together(indices))


def reversed_example(example: Example) -> Example:
    """Returns the example with source and target exchanged, gold links too.

    Raises:
        DataError: it has no source and target.
    """
    if "source" not in example or "target" not in example:
        raise DataError(
            f"reverse exchanges source and target; these examples hold {', '.join(example)}"
        )
    turned: Example = {
        "id": example["id"],
        "source": example["target"],
        "target": example["source"],
    }
    if "family" in example:
        turned["family"] = example["family"]
    if "links" in example:
        turned["source_spans"] = example["target_spans"]
        turned["target_spans"] = example["source_spans"]
        links = example["links"][:, ::-1]
        turned["links"] = links[np.lexsort((links[:, 1], links[:, 0]))]
    if "phrases" in example:
        turned |= {"phrases": example["phrases"][:, [2, 3, 0, 1]], "kinds": example["kinds"]}
    return turned


def hashed_split(key: str, *, test: int, validation: int) -> str:
    """Returns the split of a key, by its hash; so many percent of the keys are test, so many validation."""
    bucket = int(hashlib.md5(key.encode(), usedforsecurity=False).hexdigest(), 16) % 100
    return "test" if bucket < test else "validation" if bucket < test + validation else "train"


def is_backward(name: str, direction: str, forward: str, backward: str) -> bool:
    """Returns whether a direction is the backward one; none is forward.

    Raises:
        DataError: it is neither.
    """
    if direction not in ("", forward, backward):
        raise DataError(f"{name} has no direction {direction!r}; expected {forward} or {backward}")
    return direction == backward


def _find(name: str, options: Mapping[str, Any]) -> tuple[ModuleType, str]:
    """Returns the source of a name and the rest of the name, and refuses options that it lacks."""
    module, first = find(name), _first_part(name)
    given = name.removeprefix(first)
    separator = next((each for each in ":/" if each in module.FORM), "")
    if given[:1] not in ("", separator) or (separator == ":" and len(given) < 2):
        raise DataError(f"there is no data source {name!r}; expected {module.FORM}")
    taken = getattr(module, "OPTIONS", {})
    if unknown := sorted(options.keys() - taken):
        takes = ", ".join(taken) or "no options"
        near = get_close_matches(unknown[0], taken, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise DataError(f"{first} takes {takes}; {', '.join(unknown)} was given{hint}")
    return module, given[1:]


def _first_part(name: str) -> str:
    return name.partition(":")[0].partition("/")[0]


def _record_files(source: Any) -> list[Path]:
    """Returns the files of a dataset of TFDS; none for examples that are made by code."""
    while isinstance(source, MappedSource):
        source = source.items
    info = getattr(source, "dataset_info", None)
    return [] if info is None else sorted(Path(info.data_dir).iterdir())
