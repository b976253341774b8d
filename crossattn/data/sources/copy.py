"""The copy task: random words and their copy, or their reverse; data for a first minute."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from crossattn.data.errors import DataError
from crossattn.data.sources import SPLITS, Example, MappedSource, Option

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
    rest: str,
    split: str,
    *,
    data_dir: Any = None,
    size: int = 10_000,
    num_words: int = 64,
    min_length: int = 4,
    max_length: int = 12,
    reverse_order: bool = False,
    seed: int = 0,
) -> Sequence[Example]:
    """Returns examples with spans and links, `size` in train and a tenth in the others.

    Lengths are in words of `num_words` kinds; example `i` is always the same.

    Raises:
        DataError: an option is out of range.
    """
    possible = len(_CONSONANTS) ** 2 * len(_VOWELS) ** 2
    if not 1 <= num_words <= possible:
        raise DataError(f"num_words is {num_words}; expected 1 to {possible}")
    if not 1 <= min_length <= max_length:
        raise DataError(f"lengths are {min_length} to {max_length}; expected 1 <= min <= max")
    words = [_word(index * 1009 % possible) for index in range(num_words)]

    def example(index: int) -> Example:
        rng = np.random.default_rng([seed, SPLITS.index(split), index])
        length = int(rng.integers(min_length, max_length + 1))
        source = [words[i] for i in rng.integers(0, num_words, length)]
        places = np.arange(length, dtype=np.int32)
        order = places[::-1] if reverse_order else places
        target = [source[i] for i in order]
        return {
            "id": str(index),
            "source": " ".join(source),
            "target": " ".join(target),
            "source_spans": _spans(source),
            "target_spans": _spans(target),
            "links": np.stack([places, order], axis=1),
        }

    return MappedSource(range(size if split == "train" else max(size // 10, 1)), example)


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
