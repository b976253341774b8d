"""Reads and writes a checkpoint's safetensors: one file, or several with an index."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from crossattn.files import whole

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FRESH = b'{"__metadata__":{"format":"pt"}}'
"""The header of a file that holds nothing yet."""

_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message says which file or tensor, and what to do."""


@dataclass(frozen=True)
class Shard:
    """One file: its name, its header, and each tensor's shape and type ("BF16")."""

    file: str
    header: bytes
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]


@dataclass(frozen=True)
class TensorFiles:
    """The tensors of a checkpoint.

    Attributes:
      folder: of the files.
      shards: the files.
      index: the text of the index of several files.
    """

    folder: Path
    shards: tuple[Shard, ...]
    index: bytes | None = None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, by name."""
        return {name: shape for shard in self.shards for name, shape in shard.shapes.items()}

    @property
    def dtypes(self) -> dict[str, str]:
        """The type of every tensor, by name."""
        return {name: dtype for shard in self.shards for name, dtype in shard.dtypes.items()}

    @property
    def metadata(self) -> dict[str, str]:
        """What the headers say besides their tensors."""
        headers = (json.loads(shard.header) for shard in self.shards)
        return {key: x for own in headers for key, x in own.get("__metadata__", {}).items()}

    def read(self, names: set[str]) -> Iterator[tuple[str, np.ndarray]]:
        """Yields these tensors one at a time, in the order of the files."""
        for shard in self.shards:
            with _open(self.folder / shard.file) as file:
                for name in shard.shapes:
                    if name in names:
                        yield name, file.get_tensor(name)


def open_folder(folder: Path) -> TensorFiles:
    """Opens the safetensors files of a folder, and reads their headers alone.

    Raises:
      CheckpointError: there are none, or one is cut short, missing, or not such a file.
    """
    if (folder / WEIGHTS).is_file():
        return TensorFiles(folder, (_shard(folder, WEIGHTS),))
    if (folder / INDEX).is_file():
        text, wanted = _weight_map(folder / INDEX)
        shards = tuple(_shard(folder, name) for name in sorted(set(wanted.values())))
        where = {name: shard.file for shard in shards for name in shard.shapes}
        if wanted != where:
            name = min(n for n in wanted.keys() | where.keys() if wanted.get(n) != where.get(n))
            raise CheckpointError(
                f"{folder / INDEX} and its files disagree about {name}; fetch them again."
            )
        return TensorFiles(folder, shards, text)
    raise CheckpointError(f"{folder} has no {WEIGHTS} and no {INDEX}.")


def open_file(path: Path) -> TensorFiles:
    """Opens one safetensors file, and reads its header alone.

    Raises:
      CheckpointError: there is none, or it is cut short or not such a file.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}.")
    return TensorFiles(path.parent, (_shard(path.parent, path.name),))


def write(path: Path, tensors: Mapping[str, np.ndarray], header: bytes = FRESH):
    """Writes a file, whole or not at all: the header's metadata, and its tensors in its order, then others.

    The header stays the same to the bit, but for types and shapes that differ.
    """
    entries = json.loads(header)
    names = sorted(entries.keys() & tensors.keys(), key=lambda name: entries[name]["data_offsets"])
    names += sorted(tensors.keys() - entries.keys(), key=lambda x: (-tensors[x].itemsize, x))
    end, changed = 0, False
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise CheckpointError(f"{name} is {tensor.dtype}, which no safetensors file holds.")
        actual: dict[str, Any] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape)}
        actual["data_offsets"] = [end, end := end + tensor.nbytes]
        changed |= actual != entries.get(name)
        entries[name] = actual
    if changed:
        header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        header += b" " * (-len(header) % 8)
    with whole(path) as unfinished, unfinished.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in names:
            file.write(np.asarray(tensors[name], order="C").reshape(-1).view(np.uint8).data)


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
    with _open(folder / name):  # which checks it
        pass
    with open(folder / name, "rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
    entries = json.loads(header)
    entries.pop("__metadata__", None)
    for key, entry in entries.items():
        # Their scales lie elsewhere in each family, and numpy promotes them to nothing.
        if entry["dtype"].startswith(("F4", "F6_", "F8")):
            raise CheckpointError(
                f"{folder / name} has {key} in {entry['dtype']}; expected F64, F32, F16 or BF16; save it in "
                "one of these where it was quantised."
            )
    shapes = {key: tuple(entry["shape"]) for key, entry in entries.items()}
    return Shard(name, header, shapes, {key: entry["dtype"] for key, entry in entries.items()})


def _weight_map(path: Path) -> tuple[bytes, dict[str, str]]:
    """Reads an index: its text, and tensor -> file."""
    try:
        text = path.read_bytes()
        wanted = dict(json.loads(text)["weight_map"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError(f"{path} is no index: it has no weight_map.") from None
    for name in wanted.values():
        if not isinstance(name, str) or Path(name).name != name or not name.isprintable():
            raise CheckpointError(
                f"{path} names a file outside its folder, or one that can have no such name: {name!r}."
            )
    return text, wanted
