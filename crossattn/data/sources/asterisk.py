"""The English prompts of a telephone exchange by one speaker, from Debian packages (CC BY-SA 3.0).

Split by the words of the prompt, so that one that was recorded twice is on one side only: 20 % test, 10 %
validation.
"""

import functools
import hashlib
import re
from collections.abc import Sequence
from typing import Any

from crossattn.data.errors import DataError
from crossattn.data.mel import RATE
from crossattn.data.sources import Example, Option
from crossattn.data.speech import open_speech

FORM = "asterisk"
OPTIONS = {
    "min_words": Option(int, "The fewest words of a prompt.", "[1, inf)"),
    "max_seconds": Option(float, "The longest prompt.", "(0, inf)"),
}


def open_split(
    rest: str, split: str, *, data_dir: Any = None, min_words: int = 1, max_seconds: float = 30.0
) -> Sequence[Example]:
    """Examples {"id", "audio", "text"}: float32 at 16 kHz, and what is said, as its publisher wrote it."""
    if rest:
        raise DataError(f"asterisk has no parts; {rest!r} was given")
    return [
        example
        for example in _prompts(data_dir)
        if split_of(example["text"]) == split
        and "(" not in example["text"]  # which describes silence
        and len(example["text"].split()) >= min_words
        and len(example["audio"]) <= max_seconds * RATE
    ]


def split_of(text: str) -> str:
    """The split of a prompt, from its letters and digits alone."""
    words = "".join(re.findall(r"[a-z0-9]+", text.lower())).encode()
    bucket = int(hashlib.md5(words, usedforsecurity=False).hexdigest(), 16) % 100
    return "test" if bucket < 20 else "validation" if bucket < 30 else "train"


@functools.lru_cache(maxsize=1)
def _prompts(data_dir: Any) -> Sequence[Example]:
    return open_speech("asterisk", data_dir=data_dir)
