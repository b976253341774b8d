"""Transcripts, and the conversion of a window's tokens into segments."""

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

FRAME, TIME = 0.01, 0.02
"""Seconds of a spectrogram frame; seconds of a time token's step, which is also that of an encoder vector."""

_OPENING = "\"'“¿([{-"
_CLOSING = "\"'.。,，!！?？:：”)]}、"


@dataclass(frozen=True)
class Word:
    """A word with its leading space, its start and end in seconds, and the mean probability of its tokens."""

    text: str
    start: float
    end: float
    probability: float


@dataclass(frozen=True)
class Segment:
    """A phrase of a transcript.

    Attributes:
      start, end: seconds from the beginning of the recording.
      text: the decoded tokens, with their leading space.
      tokens: token ids of the text.
      temperature: temperature at which its window was decoded.
      log_p: mean log-probability of its window's tokens.
      no_speech: probability that nobody speaks in its window.
      words: words with times; empty unless ``Transcriber.heads`` are given.
    """

    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    temperature: float
    log_p: float
    no_speech: float
    words: tuple[Word, ...] = ()


@dataclass(frozen=True)
class Transcript:
    """A recording's language and segments."""

    language: str
    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        """Text of all segments."""
        return "".join(segment.text for segment in self.segments).strip()

    @property
    def words(self) -> tuple[Word, ...]:
        """Words of all segments."""
        return tuple(word for segment in self.segments for word in segment.words)


class Piece(NamedTuple):
    """Tokens from one time token to another, both included; times in seconds of the window."""

    tokens: tuple[int, ...]
    start: float
    end: float


def split(tokens: Sequence[int], first_time: int, frames: int) -> tuple[list[Piece], int]:
    """Returns the pieces of a window, and the number of frames until the next window.

    Two time tokens in a row end one piece and begin another. Tokens after the last pair are half a phrase,
    which the next window decodes whole. A single time token at the end means that no phrase follows.

    Args:
      tokens: generated tokens without the end.
      first_time: the token of 0.00 s.
      frames: number of frames of sound in the window.
    """
    is_time = [token >= first_time for token in tokens]
    cuts = [i for i in range(1, len(tokens)) if is_time[i - 1] and is_time[i]]
    if not cuts:
        times = [token for token in tokens if token > first_time]
        end = (times[-1] - first_time) * TIME if times else frames * FRAME
        return [Piece(tuple(tokens), 0.0, end)], frames
    complete = is_time[-1] and not is_time[-2]
    edges = [0, *cuts, *([len(tokens)] if complete else [])]
    pieces = [
        Piece(tuple(own), *((own[i] - first_time) * TIME for i in (0, -1)))
        for own in (tokens[a:b] for a, b in itertools.pairwise(edges))
    ]
    return pieces, frames if complete else round(pieces[-1].end / FRAME)


def compression(text: str) -> float:
    """Returns the ratio of the text's size to its compressed size; repetition makes it large."""
    raw = text.encode("utf-8")
    return len(raw) / len(zlib.compress(raw))


def join_punctuation(words: Sequence[Word]) -> tuple[Word, ...]:
    """Joins punctuation marks to the words that they open or close."""
    joined: list[Word] = []
    for word in words:
        before = joined[-1] if joined else None
        if before and word.text.strip() and word.text in _CLOSING:
            joined[-1] = replace(before, text=before.text + word.text)
        elif before and before.text.startswith(" ") and before.text.strip() in _OPENING:
            joined[-1] = replace(word, text=before.text + word.text)
        else:
            joined.append(word)
    return tuple(joined)
