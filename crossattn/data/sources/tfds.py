"""Any TFDS dataset of texts, pictures, classes and numbers.

A dataset whose supervised pair is two texts gives source and target; one that names no pair, and holds
neither classes nor pictures but a text under "text", gives that text as both. Examples of others hold values
under their own names: the bytes of a picture, the name of a class, a text, an array.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets
import tensorflow_datasets.translate
from tensorflow_datasets import decode, features

from crossattn.data import fetch, records
from crossattn.data.errors import DataError, DataUnavailable
from crossattn.data.sources import Example, MappedSource, items_of

FORM = "tfds:NAME/CONFIG"
SPLITS = ()


def open_split(name: str, split: str, *, data_dir: Any = None) -> Sequence[Example]:
    """Returns the examples of a split, or of a slice of one.

    Raises:
        DataError: it has no such split, or values of a kind that no feature of this library reads.
        DataUnavailable: there is no such dataset, or it cannot be prepared.
    """
    builder = _builder(name, data_dir)
    records.prepare(builder, f"tfds:{name}", fetch.cache_dir(data_dir) / "tfds")
    if split.split("[")[0].split("+")[0] not in builder.info.splits:
        raise DataError(
            f"tfds:{name} has no split {split!r}; it has {', '.join(builder.info.splits)}"
        )
    held = _kinds(builder)
    if pair := _texts(builder.info.supervised_keys, held):
        rows: Any = builder.as_data_source(split=split)
        made = functools.partial(records.pair_of, source=pair[0], target=pair[1])
        return MappedSource(_Numbered(rows, dict), made)
    readers = {key: _reader(f"tfds:{name}", key, kind) for key, kind in held.items()}
    encoded = {k: decode.SkipDecoding() for k, kind in held.items() if _is_picture(kind)}
    rows = builder.as_data_source(split=split, decoders=encoded)

    def read(row: Example) -> Example:
        return {key: reader(row[key]) for key, reader in readers.items()}

    return _Numbered(MappedSource(rows, read), dict)


def classes(name: str, data_dir: Any = None) -> Mapping[str, tuple[str, ...]]:
    """Returns the names of the classes, by the names of the values that are classes."""
    held = _kinds(_builder(name, data_dir))
    return {key: tuple(kind.names) for key, kind in held.items() if _is_class(kind)}


def _kinds(builder: Any) -> dict[str, Any]:
    """Returns the TFDS features of a dataset, by their names."""
    return dict(builder.info.features.items())


def _builder(name: str, data_dir: Any) -> Any:
    folder = fetch.cache_dir(data_dir) / "tfds"
    try:
        # Before the dataset is prepared its builder is made from code; afterwards it is read from
        # its folder.
        return tensorflow_datasets.builder(name, data_dir=folder, file_format="array_record")
    except Exception as error:
        reason = "the name is not one of TensorFlow Datasets or its files are not in"
        raise DataUnavailable(
            f"tfds:{name} cannot be opened: {reason} {folder} ({records.first_line(error)})"
        ) from error


def _texts(supervised: Any, held: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns the names of source and target of a dataset of texts."""
    if not supervised and not any(_is_class(kind) or _is_picture(kind) for kind in held.values()):
        supervised = ("text", "text")
    pair = tuple(map(str, (supervised or ())[:2]))
    texts = len(pair) == 2 and all(isinstance(held.get(key), features.Text) for key in pair)
    return (pair[0], pair[1]) if texts else None


def _reader(name: str, key: str, kind: Any) -> Callable[[Any], Any]:
    """Returns the function from a value of a dataset to that of an example."""
    if _is_picture(kind):
        return bytes
    if _is_class(kind):
        # A split without labels has -1 for each.
        return lambda number: kind.names[number] if number >= 0 else None
    if isinstance(kind, features.Text):
        return records.text_of
    if isinstance(kind, features.Tensor) and _letter(kind) in "biuf":
        return np.asarray
    raise DataError(
        f"{name} holds {key!r}, a {type(kind).__name__}; Image, ClassLabel, Text and Tensor are read"
    )


def _letter(kind: Any) -> str:
    """Returns NumPy's letter for the type of the numbers."""
    return np.dtype(kind.np_dtype).kind


def _is_class(kind: Any) -> bool:
    return isinstance(kind, features.ClassLabel)


def _is_picture(kind: Any) -> bool:
    """Returns whether values are encoded pictures; those of floats hide in the bits of another picture."""
    return isinstance(kind, features.Image) and _letter(kind) == "u"


class _Numbered(MappedSource):
    """Rows with their place as "id", for datasets that have none."""

    def __getitem__(self, index: int) -> Example:
        return {"id": str(index)} | self.items[index]

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        rows = items_of(self.items, indices)
        return [{"id": str(i)} | row for i, row in zip(indices, rows, strict=True)]
