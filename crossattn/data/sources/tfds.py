"""Any TFDS dataset whose supervised pair is two texts, or which has a text under "text"."""

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow_datasets
import tensorflow_datasets.translate

from crossattn.data import fetch, records
from crossattn.data.errors import DataError, DataUnavailable
from crossattn.data.sources import Example, MappedSource, items_of

FORM = "tfds:NAME/CONFIG"
SPLITS = ()


def open_split(name: str, split: str, *, data_dir: Any = None) -> Sequence[Example]:
    """The examples of a split, or of a slice of one."""
    folder = fetch.cache_dir(data_dir) / "tfds"
    try:
        # Before the dataset is prepared its builder is made from code; afterwards it is read from
        # its folder.
        builder = tensorflow_datasets.builder(name, data_dir=folder, file_format="array_record")
    except Exception as error:
        reason = "the name is not one of TensorFlow Datasets or its files are not in"
        raise DataUnavailable(
            f"tfds:{name} cannot be opened: {reason} {folder} ({records.first_line(error)})"
        ) from error
    records.prepare(builder, f"tfds:{name}", folder)
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
    pair = functools.partial(records.pair_of, source=source, target=target)
    return MappedSource(_Numbered(rows, dict), pair)


class _Numbered(MappedSource):
    """Rows with their place as "id", for datasets that have none."""

    def __getitem__(self, index: int) -> Example:
        return {"id": str(index)} | self.items[index]

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        rows = items_of(self.items, indices)
        return [{"id": str(i)} | row for i, row in zip(indices, rows, strict=True)]
