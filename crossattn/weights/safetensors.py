"""A folder of safetensors files as one table of tensors: one file, or several with an index.

Tensors are read one at a time. Nothing here knows what a tensor is for; nothing is ever unpickled.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message says which file or tensor, and what to do."""


@dataclass(frozen=True)
class Shard:
    """One file: its name, what it says about itself, and the shape of each tensor in it."""

    file: str
    metadata: Mapping[str, str] | None
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class TensorFiles:
    """The tensors of a checkpoint.

    Attributes:
      folder: where the files are.
      shards: the files.
      index: the text of the index, where there are several files.
    """

    folder: Path
    shards: tuple[Shard, ...]
    index: str | None = None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape."""
        return {name: shape for shard in self.shards for name, shape in shard.shapes.items()}

    def read(self, names: set[str]) -> Iterator[tuple[str, np.ndarray]]:
        """These tensors, one at a time, in the order of the files."""
        for shard in self.shards:
            with _open(self.folder / shard.file) as file:
                for name in shard.shapes:
                    if name in names:
                        yield name, file.get_tensor(name)


def open_folder(folder: Path) -> TensorFiles:
    """The safetensors files of a folder, by their headers alone.

    Raises:
      CheckpointError: there are none, or one is cut short, missing, or not such a file.
    """
    if (folder / WEIGHTS).is_file():
        return TensorFiles(folder, (_shard(folder, WEIGHTS),))
    if (folder / INDEX).is_file():
        text = (folder / INDEX).read_text(encoding="utf-8")
        wanted = _weight_map(folder / INDEX, text)
        shards = tuple(_shard(folder, name) for name in sorted(set(wanted.values())))
        found = {name: shard.file for shard in shards for name in shard.shapes}
        if wanted != found:
            name = min(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
            raise CheckpointError(
                f"{folder / INDEX} and its files disagree about {name}; fetch them again."
            )
        return TensorFiles(folder, shards, text)
    raise CheckpointError(f"{folder} has no {WEIGHTS} and no {INDEX}.")


def write(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None):
    """One file, whole or not at all; the same tensors and metadata give the same bytes."""
    from safetensors.numpy import save_file

    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    # The serialiser takes addresses: what it gets must be contiguous.
    solid = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
    save_file(solid, partial, metadata=None if metadata is None else dict(metadata))
    os.replace(partial, path)


def _open(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ImportError(
            "reading checkpoints needs safetensors: pip install 'crossattn[weights]'"
        ) from None
    try:
        return safe_open(path, framework="numpy")
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is named in the index but missing; fetch it again."
        ) from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is cut short or no safetensors file ({error}); fetch it again."
        ) from None


def _shard(folder: Path, name: str) -> Shard:
    with _open(folder / name) as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
        return Shard(name, file.metadata(), shapes)


def _weight_map(path: Path, text: str) -> dict[str, str]:
    try:
        wanted = dict(json.loads(text)["weight_map"])
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path} is no index: it has no weight_map.") from None
    for name in wanted.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{path} names a file outside its folder: {name!r}.")
    return wanted
