"""Weights out of CTranslate2's ``model.bin``, without CTranslate2: only names, shapes and numbers are read.

The file is little-endian: a version, the name of a model class, and then every tensor with its name, its
shape, its type and its bytes. Query, key and value projections are fused there; here they are taken apart.
"""

import math
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from crossattn.weights.formats.safetensors import CheckpointError

Tensors = dict[str, np.ndarray]

_VERSION = 6
_RANK = 8  # axes that a tensor may have
_TYPES = {0: "<f4", 1: "<i1", 2: "<i2", 3: "<i4", 4: "<f2"}


def read(path: str | os.PathLike) -> Tensors:
    """Every tensor of a model file, by its name there; scalars too.

    Raises:
      CheckpointError: the file is no such model, of another version, cut short, or has an unknown type.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise CheckpointError(f"{path} is empty; expected a CTranslate2 model.")
            cursor = _Cursor(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), path)
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


def whisper(tensors: Tensors) -> Tensors:
    """The tensors of a Whisper under the names that ``transformers`` gives them, in float32.

    Raises:
      CheckpointError: a tensor is missing or left over: the model is no Whisper, or is quantised.
    """
    left = {name: x for name, x in tensors.items() if x.ndim and name != _TIED}
    try:
        renamed = dict(_whisper(left))
    except KeyError as error:
        raise CheckpointError(f"the model lacks {error.args[0]}; expected a Whisper.") from None
    if left:
        raise CheckpointError(
            f"the model has {', '.join(sorted(left)[:4])} besides the tensors of a Whisper; expected "
            "one in float16 or float32."
        )
    return {name: np.ascontiguousarray(x, np.float32) for name, x in renamed.items()}


_TIED = "decoder/projection/weight"  # the embedding's other name


def _whisper(left: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    """Takes each tensor out of ``left`` as it is renamed."""
    for part in ("conv1", "conv2"):
        for leaf in ("weight", "bias"):
            yield f"model.encoder.{part}.{leaf}", left.pop(f"encoder/{part}/{leaf}")
    yield "model.decoder.embed_tokens.weight", left.pop("decoder/embeddings/weight")
    for side in ("encoder", "decoder"):
        positions = left.pop(f"{side}/position_encodings/encodings")
        yield f"model.{side}.embed_positions.weight", positions
        yield from _norm(left, f"{side}/layer_norm", f"model.{side}.layer_norm")
        layer = 0
        while f"{side}/layer_{layer}/ffn/linear_0/weight" in left:
            yield from _layer(left, f"{side}/layer_{layer}", f"model.{side}.layers.{layer}")
            layer += 1


def _layer(left: Tensors, theirs: str, ours: str) -> Iterator[tuple[str, np.ndarray]]:
    own, cross = f"{theirs}/self_attention", f"{theirs}/attention"
    yield from _norm(left, f"{own}/layer_norm", f"{ours}.self_attn_layer_norm")
    yield from _linear(left, f"{own}/linear_0", f"{ours}.self_attn", "q_proj", "k_proj", "v_proj")
    yield from _linear(left, f"{own}/linear_1", f"{ours}.self_attn", "out_proj")
    if f"{cross}/linear_0/weight" in left:
        yield from _norm(left, f"{cross}/layer_norm", f"{ours}.encoder_attn_layer_norm")
        yield from _linear(left, f"{cross}/linear_0", f"{ours}.encoder_attn", "q_proj")
        yield from _linear(left, f"{cross}/linear_1", f"{ours}.encoder_attn", "k_proj", "v_proj")
        yield from _linear(left, f"{cross}/linear_2", f"{ours}.encoder_attn", "out_proj")
    yield from _norm(left, f"{theirs}/ffn/layer_norm", f"{ours}.final_layer_norm")
    yield from _linear(left, f"{theirs}/ffn/linear_0", ours, "fc1")
    yield from _linear(left, f"{theirs}/ffn/linear_1", ours, "fc2")


def _norm(left: Tensors, theirs: str, ours: str) -> Iterator[tuple[str, np.ndarray]]:
    yield f"{ours}.weight", left.pop(f"{theirs}/gamma")
    yield f"{ours}.bias", left.pop(f"{theirs}/beta")


def _linear(left: Tensors, theirs: str, ours: str, *parts: str) -> Iterator[tuple[str, np.ndarray]]:
    """A linear layer, or several of one size fused along their outputs; keys have no bias."""
    for leaf in ("weight", "bias"):
        fused = left.pop(f"{theirs}/{leaf}")
        if len(fused) % len(parts):
            raise CheckpointError(
                f"{theirs}/{leaf} has {len(fused)} rows, which are not {len(parts)} times as many."
            )
        pieces = np.split(fused, len(parts))
        for part, piece in zip(parts, pieces, strict=True):
            if (part, leaf) == ("k_proj", "bias"):
                if piece.any():
                    raise CheckpointError(f"{theirs} has a bias on its keys; a Whisper has none.")
            else:
                yield f"{ours}.{part}.{leaf}", piece


class _Cursor:
    """A place in the file; every step checks that the file goes that far."""

    def __init__(self, raw: mmap.mmap, path: Path):
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
