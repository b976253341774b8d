"""Reads CTranslate2's ``model.bin`` without CTranslate2.

The file is little-endian: a version, the name of a model class, and then every tensor with its name, its
shape, its type and its bytes.
"""

import math
import os
import re
import struct
from pathlib import Path

import numpy as np

from crossattn.weights.formats.safetensors import CheckpointError

Tensors = dict[str, np.ndarray]

_VERSION = 6
_RANK = 8  # the most axes of a tensor
_TYPES = {0: "<f4", 1: "<i1", 2: "<i2", 3: "<i4", 4: "<f2"}


def read(path: str | os.PathLike) -> Tensors:
    """Reads every tensor of a model file, scalars too, by name.

    Raises:
      CheckpointError: the file is no such model, of another version, cut short, or has an unknown type.
    """
    path = Path(path)
    try:
        cursor = _Cursor(path.read_bytes(), path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    (version,) = cursor.numbers("I")
    if version != _VERSION:
        raise CheckpointError(
            f"{path} begins with version {version}; expected a CTranslate2 model of version {_VERSION}."
        )
    cursor.text()  # the model class
    _revision, count = cursor.numbers("II")
    tensors: Tensors = {}
    for _ in range(count):
        name, tensor = cursor.tensor()
        if name in tensors:
            raise CheckpointError(f"{path} has two tensors {name}.")
        tensors[name] = tensor
    (aliases,) = cursor.numbers("I")
    for _ in range(aliases):
        name, target = cursor.text(), cursor.text()
        if target not in tensors:
            raise CheckpointError(f"{path}: {name} stands for {target}, which is not in the file.")
        tensors[name] = tensors[target]
    return tensors


_MODULES = {
    "conv1": ["conv1"],
    "conv2": ["conv2"],
    "embeddings": ["embed_tokens"],
    "position_encodings": ["embed_positions"],
    "layer_norm": ["layer_norm"],
}
_LAYER = {
    "self_attention/layer_norm": ["self_attn_layer_norm"],
    "self_attention/linear_0": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "self_attention/linear_1": ["self_attn.out_proj"],
    "ffn/layer_norm": ["final_layer_norm"],
    "ffn/linear_0": ["fc1"],
    "ffn/linear_1": ["fc2"],
}
_CROSS = {
    "attention/layer_norm": ["encoder_attn_layer_norm"],
    "attention/linear_0": ["encoder_attn.q_proj"],
    "attention/linear_1": ["encoder_attn.k_proj", "encoder_attn.v_proj"],
    "attention/linear_2": ["encoder_attn.out_proj"],
}
_LEAVES = dict(gamma="weight", beta="bias", encodings="weight", weight="weight", bias="bias")
_TIED = "decoder/projection/weight"  # the embedding's other name


def whisper(tensors: Tensors) -> Tensors:
    """Returns the tensors of a Whisper in float32, by their names in ``transformers``.

    CTranslate2 fuses projections along their outputs, and gives keys biases of 0.

    Raises:
      CheckpointError: a tensor is no Whisper's, or is quantised. ``load`` names missing ones.
    """
    renamed: Tensors = {}
    for name, tensor in tensors.items():
        if not tensor.ndim or name == _TIED:
            continue
        side, layer, module, leaf = _parts(name)
        known = _MODULES if layer is None else _LAYER | _CROSS
        if module not in known or leaf not in _LEAVES:
            raise CheckpointError(
                f"the model has {name} besides the tensors of a Whisper; expected one in float16 or float32."
            )
        owner = f"model.{side}." + ("" if layer is None else f"layers.{layer}.")
        parts, leaf = known[module], _LEAVES[leaf]
        if len(tensor) % len(parts):
            raise CheckpointError(
                f"{name} has {len(tensor)} rows; expected {len(parts)} equal parts."
            )
        for part, piece in zip(parts, np.split(tensor, len(parts)), strict=True):
            if not (leaf == "bias" and part.endswith("k_proj")):
                renamed[f"{owner}{part}.{leaf}"] = np.ascontiguousarray(piece, np.float32)
            elif piece.any():
                raise CheckpointError(f"{name} has a bias on its keys; a Whisper has none.")
    return renamed


def _parts(name: str) -> tuple[str, str | None, str, str]:
    """Splits ``decoder/layer_1/ffn/linear_0/weight`` into half, layer, module and leaf."""
    found = re.fullmatch(r"(encoder|decoder)/(?:layer_(\d+)/)?(.+)/(\w+)", name)
    return found.groups() if found else ("", None, "", "")  # pyright: ignore[reportReturnType]


class _Cursor:
    """A position in the file; every step checks that the file is long enough."""

    def __init__(self, raw: bytes, path: Path):
        self._raw, self._path, self._at = raw, path, 0

    def _take(self, size: int) -> int:
        start, self._at = self._at, self._at + size
        if self._at > len(self._raw):
            raise CheckpointError(
                f"{self._path} is cut short, or is no CTranslate2 model: byte {self._at} is wanted "
                f"and {len(self._raw)} are there."
            )
        return start

    def numbers(self, kinds: str) -> tuple[int, ...]:
        layout = struct.Struct("<" + kinds)
        return layout.unpack_from(self._raw, self._take(layout.size))

    def text(self) -> str:
        (size,) = self.numbers("H")
        start = self._take(size)
        return self._raw[start : start + size].rstrip(b"\0").decode("utf-8", "replace")

    def tensor(self) -> tuple[str, np.ndarray]:
        name = self.text()
        (rank,) = self.numbers("B")
        shape = self.numbers(f"{rank}I")
        kind, size = self.numbers("BI")
        if kind not in _TYPES:
            raise CheckpointError(f"{self._path}: {name} has the unknown type {kind}.")
        dtype = np.dtype(_TYPES[kind])
        count = math.prod(shape)
        if size != count * dtype.itemsize or rank > _RANK:
            raise CheckpointError(f"{self._path}: {name} of shape {list(shape)} has {size} bytes.")
        values = np.frombuffer(self._raw, dtype, count, self._take(size))
        return name, values.reshape(shape)
