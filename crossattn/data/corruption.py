"""Denoising objectives for an encoder-decoder: span corruption and prefix language models.

An objective states the length of its texts and takes its randomness from a generator. It is a frozen
dataclass, so that its ``repr`` tells runs apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Int

from crossattn.data.errors import DataError
from crossattn.data.tokenizers import EOS

Ids = Int[np.ndarray, " _"]
Pair = tuple[Ids, Ids]
"""(source, target), EOS at the end of both."""

_SHORTEST = 4  # tokens: from here on a stream cut evenly has no piece of less than two


@dataclass(frozen=True)
class SpanCorruption:
    """Random spans replaced by sentinels; the target is each sentinel with the tokens of its span.

    "Thank you <x> me to your party <y> week" -> "<x> for inviting <y> last", with the lengths chosen so
    that a whole text fills ``source_len``. Source: Raffel et al. 2020, sections 3.1.4 and 3.3.4.

    Attributes:
      source_len, target_len: the longest source and target, EOS included.
      vocab_size: of the tokenizer; sentinels are the ids after it, the first one last, as T5 has them.
      sentinels: how many there are.
      density: share of the tokens that is taken out.
      span: mean length of a span.

    Raises:
      DataError: lengths, or the number of sentinels, do not suffice.
    """

    source_len: int
    target_len: int
    vocab_size: int
    sentinels: int = 100
    density: float = 0.15
    span: float = 3.0

    texts_a_row = 1

    def __post_init__(self):
        if not (0 < self.density < 1 and self.span >= 1):
            raise DataError(
                f"density is {self.density} and span {self.span}; expected a share between 0 and 1, and"
                " 1 or more"
            )
        length = self.text_len
        _refuse_short(length, self.source_len, self.target_len)
        _, spans = self.taken(length)
        if spans > self.sentinels:
            raise DataError(
                f"a text of {length} tokens has {spans} spans, and there are {self.sentinels} sentinels;"
                " take more of them, or a shorter source_len"
            )
        if self.target_len < self._lengths(length)[1]:
            raise DataError(
                f"target_len is {self.target_len}; what is taken out of {length} tokens to make a source "
                f"of {self.source_len} takes {self._lengths(length)[1]}"
            )

    @cached_property
    def text_len(self) -> int:
        """Tokens of the longest text whose source fits."""
        length = self.source_len - 1
        while self._lengths(length + 1)[0] <= self.source_len:
            length += 1
        return length

    def taken(self, length: int) -> tuple[int, int]:
        """Returns (tokens, spans) that are taken out of a text of so many tokens, two or more."""
        tokens = min(max(round(length * self.density), 1), length - 1)
        return tokens, min(max(round(tokens / self.span), 1), length - tokens)

    def _lengths(self, length: int) -> tuple[int, int]:
        """Returns the tokens of source and target, EOS included."""
        tokens, spans = self.taken(length)
        return length - tokens + spans + 1, tokens + spans + 1

    def noise(self, length: int, rng: np.random.Generator) -> Bool[np.ndarray, " length"]:
        """Returns a mask of the tokens that are taken out.

        All such masks that begin with a kept token and end with none are equally likely.
        """
        tokens, spans = self.taken(length)
        kept, taken = _parts(length - tokens, spans, rng), _parts(tokens, spans, rng)
        return np.repeat(np.tile([False, True], spans), np.stack([kept, taken], 1).ravel())

    def pairs(self, texts: Sequence[Ids], rng: np.random.Generator) -> list[Pair]:
        """Returns source and target of each text."""
        pairs = []
        for text in texts:
            noise = self.noise(len(text), rng)
            pairs.append((self._marked(text, noise), self._marked(text, ~noise)))
        return pairs

    def sentinel(self, number: int) -> int:
        """Returns the id of a sentinel, counted from 0."""
        return self.vocab_size + self.sentinels - 1 - number

    def _marked(self, text: Ids, out: Bool[np.ndarray, " _"]) -> Ids:
        """Returns the text with a sentinel for each run of tokens taken out, and EOS."""
        first = out & ~np.concatenate([[False], out[:-1]])
        marked = np.where(first, self.sentinel(0) + 1 - np.cumsum(first), text)
        return np.append(marked[first | ~out], EOS).astype(text.dtype)

    def filled(self, source: Ids, target: Ids) -> Ids:
        """Returns the source with a target's tokens in the place of each sentinel, the inverse of ``pairs``.

        Sentinels that the target lacks are dropped; its tokens before the first sentinel, of a repeated
        sentinel, or after EOS are ignored.
        """
        target = target[: int(np.argmax(np.append(target, EOS) == EOS))]
        places = np.append(np.flatnonzero(target >= self.vocab_size), len(target))
        said: dict[int, Ids] = {}
        for start, end in zip(places[:-1], places[1:], strict=True):
            said.setdefault(int(target[start]), target[start + 1 : end])
        nothing = np.zeros(0, source.dtype)
        parts = [
            said.get(int(token), nothing) if token >= self.vocab_size else [token]
            for token in source[source != EOS]
        ]
        return np.concatenate([nothing, *parts]).astype(source.dtype)


@dataclass(frozen=True)
class PrefixLM:
    """The beginning of a text as the source, the rest as the target.

    A row holds two texts, the second cut so that its halves are as long as those of the first exchanged:
    whatever the uniform cut, source and target of the row are full.
    Source: Raffel et al. 2020, section 3.2.3.

    Attributes:
      source_len, target_len: of a row, the EOS of both texts included.

    Raises:
      DataError: they are too short.
    """

    source_len: int
    target_len: int

    texts_a_row = 2

    def __post_init__(self):
        _refuse_short(self.text_len, self.source_len, self.target_len)

    @property
    def text_len(self) -> int:
        """Tokens of the longest text that fits twice, whatever the cut."""
        return min(self.source_len, self.target_len) - 2

    def pairs(self, texts: Sequence[Ids], rng: np.random.Generator) -> list[Pair]:
        """Returns source and target of each text, of two texts at most."""
        cut = int(rng.integers(1, len(texts[0])))
        pairs = []
        for text in texts:
            pairs.append((np.append(text[:cut], EOS), np.append(text[cut:], EOS)))
            cut = min(len(text) - cut, len(texts[-1]) - 1)
        return pairs

    def filled(self, source: Ids, target: Ids) -> Ids:
        """Returns the source and a target after it, the inverse of ``pairs``."""
        target = target[: int(np.argmax(np.append(target, EOS) == EOS))]
        return np.concatenate([source[source != EOS], target]).astype(source.dtype)


Objective = SpanCorruption | PrefixLM


def _parts(total: int, count: int, rng: np.random.Generator) -> Int[np.ndarray, " count"]:
    """Returns ``total`` as a sum of so many numbers from 1, each such sum equally likely."""
    cuts = np.sort(rng.choice(total - 1, count - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))


def _refuse_short(length: int, source_len: int, target_len: int) -> None:
    if length < _SHORTEST:
        raise DataError(
            f"source_len {source_len} and target_len {target_len} leave room for texts of {length}"
            f" tokens; expected {_SHORTEST} or more"
        )
