"""Vocabularies as SentencePiece writes them: read here, so that nothing but ``tokenizers`` is needed.

A model file is one protocol buffer message; ``fields`` takes it apart, whatever its schema.

Source: sentencepiece_model.proto of https://github.com/google/sentencepiece.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossattn.weights.safetensors import CheckpointError

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
        model = list(fields(path.read_bytes()))
        pieces = tuple(_piece(value) for number, value in model if number == 1)
        trainer = dict(field for number, value in model if number == 2 for field in fields(value))
        normaliser = dict(
            field for number, value in model if number == 3 for field in fields(value)
        )
        kinds = [piece.kind for piece in pieces]
    except (ValueError, IndexError, TypeError, struct.error, UnicodeDecodeError) as error:
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
    return SentencePieces(pieces, normaliser.get(2, b""), bool(trainer.get(35, 0)))


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
    """A number of seven bits a byte, the lowest first, and where it ends."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _piece(message: bytes) -> Piece:
    known = dict(fields(message))
    [score] = struct.unpack("<f", known.get(2, b"\0\0\0\0"))
    return Piece(known[1].decode("utf-8"), score, known.get(3, _NORMAL))
