"""Tensors and vocabularies in files that PyTorch wrote, without PyTorch.

Such a file is a pickle, and a pickle is a program. Here it can name nothing but the three things that a dict
of float32 tensors is made of; any other name ends the reading.
"""

import functools
import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from crossattn.data import archives
from crossattn.weights.formats.safetensors import CheckpointError


class _Plain(pickle._Unpickler):  # pyright: ignore[reportAttributeAccessIssue]
    """A pickle of dicts, lists, numbers and text, and of what is named here.

    The one in Python: in C, a number in the pickle decides how much memory its table of objects takes.
    """

    known: dict[tuple[str, str], Any] = {}
    dispatch = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()  # pyright: ignore[reportAttributeAccessIssue]
        if code != pickle.BYTEARRAY8[0]  # made in a size that the pickle says
    }

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        known = self.known.get((module_name, global_name))
        if known is None:
            raise CheckpointError(
                f"the file asks for {module_name}.{global_name}; expected plain values and tensors."
            )
        return known


class _Tensors(_Plain):
    """A pickle of tensors, whose numbers are elsewhere."""

    def __init__(self, file: io.BytesIO, numbers: Callable[[str], bytes]):
        super().__init__(file)
        self._numbers = numbers

    known = {
        ("collections", "OrderedDict"): OrderedDict,
        ("torch", "FloatStorage"): np.float32,
        ("torch._utils", "_rebuild_tensor_v2"): lambda *args: _tensor(*args),
    }

    def persistent_load(self, pid: Any, /) -> np.ndarray:
        _, dtype, key, *_ = pid
        return np.frombuffer(self._numbers(key), dtype)


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Name -> array of a file that holds a dict of float32 tensors.

    Raises:
      CheckpointError: it is no such file, or holds something else.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            root = archive.namelist()[0].partition("/")[0]

        @functools.cache
        def member(name: str) -> bytes:
            pieces = archives.zip_member(path, f"{root}/{name}", archives.IN_MEMORY)
            return b"".join(pieces)

        program = io.BytesIO(member("data.pkl"))
        tensors = _Tensors(program, lambda key: member(f"data/{key}")).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle may do all that a program can do wrong
        raise CheckpointError(f"{path} is no readable PyTorch file: {_said(error)}") from None
    if not isinstance(tensors, dict) or not all(
        isinstance(x, np.ndarray) for x in tensors.values()
    ):
        raise CheckpointError(f"{path} does not hold a dict of tensors.")
    return dict(tensors)


def read_plain(path: Path) -> Any:
    """What a pickle of dicts, lists, numbers and text holds.

    Raises:
      CheckpointError: it is damaged, or asks for more than that.
    """
    try:
        return _Plain(io.BytesIO(path.read_bytes())).load()
    except CheckpointError:
        raise
    except Exception as error:  # as above
        raise CheckpointError(f"{path} is no readable pickle: {_said(error)}") from None


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


def _tensor(numbers: np.ndarray, start: int, shape: tuple, strides: tuple, *_: Any) -> np.ndarray:
    inner = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    count = math.prod(shape)
    if (
        list(strides) != inner
        or min(shape, default=0) < 0
        or not 0 <= start <= len(numbers) - count
    ):
        raise CheckpointError(
            f"a tensor of shape {list(shape)} has strides {list(strides)} and starts at {start} of "
            f"{len(numbers)} numbers; expected it whole and in order."
        )
    return numbers[start : start + count].reshape(shape)
