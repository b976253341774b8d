"""Vocabularies as SentencePiece writes them: read here, so that nothing but ``tokenizers`` is needed.

A model file is one protocol buffer message; ``fields`` takes it apart, whatever its schema.

Source: sentencepiece_model.proto of https://github.com/google/sentencepiece.
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossattn.weights.formats.safetensors import CheckpointError

_UNIGRAM = 1
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)


@dataclass(frozen=True)
class Piece:
    """A token: its text, its log-probability and what kind of token it is."""

    text: str
    score: float
    kind: int

    @property
    def is_control(self) -> bool:
        """It stands for no text: beginning, end, padding."""
        return self.kind == _CONTROL

    @property
    def is_user_defined(self) -> bool:
        """Text that is never cut."""
        return self.kind == _USER_DEFINED


@dataclass(frozen=True)
class SentencePieces:
    """A unigram model.

    Attributes:
      pieces: by their ids.
      charsmap: the normalisation of characters, compiled; empty for none.
      bytes: characters without a piece are spelt in bytes.
    """

    pieces: tuple[Piece, ...]
    charsmap: bytes
    bytes: bool

    @property
    def unknown(self) -> int:
        """The id of what has no piece."""
        return next(i for i, piece in enumerate(self.pieces) if piece.kind == _UNKNOWN)


def read_pieces(path: Path) -> SentencePieces:
    """The model of a file.

    Raises:
      CheckpointError: the file is no SentencePiece model, or one of another kind than unigram.
    """
    try:
        parts: dict[int, list[bytes]] = {1: [], 2: [], 3: []}
        for number, value in fields(path.read_bytes()):
            if number in parts:
                if not isinstance(value, bytes):
                    raise ValueError(f"its part {number} is a number")
                parts[number].append(value)
        pieces = tuple(map(_piece, parts[1]))
        trainer, normaliser = (
            dict(field for part in parts[number] for field in fields(part)) for number in (2, 3)
        )
        kinds = [piece.kind for piece in pieces]
        charsmap = _charsmap(normaliser.get(2, b""))
    except (ValueError, LookupError, TypeError, struct.error) as error:
        raise CheckpointError(f"{path} is no SentencePiece model: {error}") from None
    if kinds.count(_UNKNOWN) != 1:
        raise CheckpointError(
            f"{path} is no SentencePiece model: it has {kinds.count(_UNKNOWN)} unknown tokens, not 1"
        )
    if trainer.get(3, _UNIGRAM) != _UNIGRAM:
        raise CheckpointError(
            f"{path} is a SentencePiece model of another kind than unigram; save its tokenizer as "
            "tokenizer.json with transformers first."
        )
    return SentencePieces(pieces, charsmap, bool(trainer.get(35, 0)))


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of the fields of a message: integers, or the bytes of all else.

    Raises:
      ValueError: it ends within a field, or is none.
    """
    at = 0
    while at < len(message):
        key, at = _integer(message, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _integer(message, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _integer(message, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"a field has wire type {wire}, which does not exist")
        if at + size > len(message):
            raise ValueError("it ends within a field")
        yield number, message[at : at + size]
        at += size


def _integer(message: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first, at most ten, and where it ends."""
    value = shift = 0
    while True:
        if at == len(message):
            raise ValueError("it ends within a number")
        if shift == 70:
            raise ValueError("a number has more than 64 bits")
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _piece(message: bytes) -> Piece:
    known = dict(fields(message))
    text, [score], kind = (
        known.get(1),
        struct.unpack("<f", known.get(2, bytes(4))),
        known.get(3, _NORMAL),
    )
    if not isinstance(text, bytes) or not isinstance(kind, int) or not math.isfinite(score):
        raise ValueError("a piece lacks its text, or its kind or score is none")
    return Piece(text.decode("utf-8"), score, kind)


def _charsmap(compiled: Any) -> bytes:
    """A compiled map of characters: the size of its trie, the trie, and the texts that it points to."""
    if not isinstance(compiled, bytes):
        raise ValueError("its map of characters is none")
    size = int.from_bytes(compiled[:4], "little")
    if compiled and not (0 < size <= len(compiled) - 4 and size % 4 == 0):
        raise ValueError("its map of characters is damaged")
    return compiled
