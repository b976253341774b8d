"""Prompts of a telephone exchange, "asterisk" in English, "asterisk/es", "fr", "it" and "ru": a speaker each.

From Debian packages (CC BY-SA 3.0).

Split by the words of the prompt, so that a prompt recorded twice is in one split: 20 % test, 10 % validation.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any

from crossattn.data.errors import DataError
from crossattn.data.mel import RATE
from crossattn.data.sources import Example, Option, hashed_split
from crossattn.data.speech import ASTERISK_LANGUAGES, open_speech

FORM = "asterisk or asterisk/LANGUAGE"
OPTIONS = {
    "min_words": Option(int, "The fewest words of a prompt.", "[1, inf)"),
    "spelled": Option(
        bool,
        "English: digits are words, dashes blanks; prompts with other signs are left out.",
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
    """Returns examples {"id", "audio", "text"}: float32 at 16 kHz, the text as its publisher wrote it.

    With ``spelled``, texts are of small letters, blanks and ",.?'".
    """
    if rest and rest not in ASTERISK_LANGUAGES:
        expected = ", ".join(ASTERISK_LANGUAGES)
        raise DataError(f"asterisk has no prompts in {rest!r}; expected one of {expected}")
    language = rest or "en"
    if spelled and language != "en":
        raise DataError(
            f"data.options.spelled is for English prompts, not for {language!r}; leave it out"
        )
    chosen = [
        example
        for example in _prompts(data_dir, language)
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
    text = re.sub(r" (?=[,.?])", "", text)
    return text if re.fullmatch(r"[a-z][a-z ,.?']*", text) else None


def split_of(text: str) -> str:
    """Returns the split of a prompt, from its letters and digits alone, of any alphabet."""
    words = "".join(filter(str.isalnum, text.lower()))
    return hashed_split(words, test=20, validation=10)


@functools.lru_cache(maxsize=1)
def _prompts(data_dir: Any, language: str) -> Sequence[Example]:
    return open_speech(f"asterisk/{language}", data_dir=data_dir)
