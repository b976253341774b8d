"""The copy task: random words to be written again, or backwards; data for a first minute."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from crossattn.data.errors import DataError
from crossattn.data.sources import SPLITS, Example, Option

FORM = "copy"
OPTIONS = {
    "size": Option(int, "Training examples.", "[1, inf)"),
    "num_words": Option(int, "Kinds of words.", "[1, 4900]"),
    "min_length": Option(int, "The fewest words.", "[1, inf)"),
    "max_length": Option(int, "The most words.", "[1, inf)"),
    "reverse_order": Option(bool, "The target is the source backwards."),
    "seed": Option(int, "Of the words.", "[0, 4294967295]"),
}
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


def open_split(
    direction: str, split: str, *, data_dir: Any = None, **options: Any
) -> Sequence[Example]:
    """The examples of a split, see `CopyTask`."""
    if direction:
        raise DataError(f"the copy task has no direction; {direction!r} was given")
    return CopyTask(split, **options)


class CopyTask(Sequence):
    """Examples with spans and links, made on the spot; example `i` is always the same."""

    def __init__(
        self,
        split: str,
        *,
        size: int = 10_000,
        num_words: int = 64,
        min_length: int = 4,
        max_length: int = 12,
        reverse_order: bool = False,
        seed: int = 0,
    ):
        """`size` examples in train, a tenth in the others; lengths in words of `num_words` kinds.

        Raises:
            DataError: an option is out of range.
        """
        possible = len(_CONSONANTS) ** 2 * len(_VOWELS) ** 2
        if not 1 <= num_words <= possible:
            raise DataError(f"num_words is {num_words}; expected 1 to {possible}")
        if not 1 <= min_length <= max_length:
            raise DataError(f"lengths are {min_length} to {max_length}; expected 1 <= min <= max")
        self._size = size if split == "train" else max(size // 10, 1)
        self._words = [_word(index * 1009 % possible) for index in range(num_words)]
        self._lengths = (min_length, max_length)
        self._reverse_order = reverse_order
        self._seed = (seed, SPLITS.index(split))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict:
        if not -self._size <= index < self._size:
            raise IndexError(index)
        index %= self._size
        rng = np.random.default_rng([*self._seed, index])
        length = int(rng.integers(self._lengths[0], self._lengths[1] + 1))
        source = [self._words[i] for i in rng.integers(0, len(self._words), length)]
        target = source[::-1] if self._reverse_order else source
        positions = np.arange(length, dtype=np.int32)
        partners = positions[::-1] if self._reverse_order else positions
        return {
            "id": str(index),
            "source": " ".join(source),
            "target": " ".join(target),
            "source_spans": _spans(source),
            "target_spans": _spans(target),
            "links": np.stack([positions, partners], axis=1),
        }


def _word(index: int) -> str:
    letters = []
    for alphabet in (_CONSONANTS, _VOWELS, _CONSONANTS, _VOWELS):
        index, letter = divmod(index, len(alphabet))
        letters.append(alphabet[letter])
    return "".join(letters)


def _spans(words: list[str]) -> np.ndarray:
    ends = np.cumsum([len(word) + 1 for word in words]) - 1
    starts = ends - [len(word) for word in words]
    return np.stack([starts, ends], axis=1).astype(np.int32)
