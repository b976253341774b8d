"""The English prompts of a telephone exchange by one speaker, from Debian packages (CC BY-SA 3.0).

Split by the words of the prompt, so that a prompt recorded twice is in one split: 20 % test, 10 % validation.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any

from crossattn.data.mel import RATE
from crossattn.data.sources import Example, Option, hashed_split
from crossattn.data.speech import open_speech

FORM = "asterisk"
OPTIONS = {
    "min_words": Option(int, "The fewest words of a prompt.", "[1, inf)"),
    "spelled": Option(
        bool,
        "Digits are words and dashes blanks; prompts with signs that nobody says are left out.",
    ),
    "max_seconds": Option(float, "The longest prompt.", "(0, inf)"),
}

_DIGITS = "zero one two three four five six seven eight nine".split()
_MARKS = str.maketrans("-!;:", " .,,")


def open_split(
    rest: str,
    split: str,
    *,
    data_dir: Any = None,
    min_words: int = 1,
    spelled: bool = False,
    max_seconds: float = 30.0,
) -> Sequence[Example]:
    """Returns examples {"id", "audio", "text"}: float32 at 16 kHz, the text as its publisher wrote it."""
    chosen = [
        example
        for example in _prompts(data_dir)
        if split_of(example["text"]) == split
        and "(" not in example["text"]  # which describes silence
        and len(example["text"].split()) >= min_words
        and len(example["audio"]) <= max_seconds * RATE
    ]
    if not spelled:
        return chosen
    return [{**example, "text": text} for example in chosen if (text := _spelled(example["text"]))]


def _spelled(text: str) -> str | None:
    """Returns a text in the letters that are said, and marks; None where it has other signs."""
    text = re.sub(r"\d", lambda digit: f" {_DIGITS[int(digit[0])]} ", text.lower())
    text = " ".join(text.translate(_MARKS).replace("...", " ").split())
    return text if re.fullmatch(r"[a-z ,.?']+", text) else None


def split_of(text: str) -> str:
    """Returns the split of a prompt, from its letters and digits alone."""
    words = "".join(re.findall(r"[a-z0-9]+", text.lower()))
    return hashed_split(words, test=20, validation=10)


@functools.lru_cache(maxsize=1)
def _prompts(data_dir: Any) -> Sequence[Example]:
    return open_speech("asterisk", data_dir=data_dir)
