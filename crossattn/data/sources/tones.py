"""Words as tones, made by code: each letter is a pitch of its own; speech without a download."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from crossattn.data.mel import RATE
from crossattn.data.sources import SPLITS, Example, MappedSource

FORM = "tones"
NUM_EXAMPLES = {"train": 96, "validation": 12, "test": 12}
_WORDS = ("ace", "bad", "cab", "dab", "fade", "bed", "deaf", "egg", "fee", "gag")
_MEANINGS = ("one", "poor", "car", "touch", "go", "rest", "still", "seed", "price", "joke")
_SECONDS = 0.04  # of a letter


def open_split(rest: str, split: str, *, data_dir: Any = None) -> Sequence[Example]:
    """Returns examples {"id", "audio", "text", "times", "translation"}: up to three words, float32 at 16 kHz.

    The times are the seconds at which each letter begins, and the last ends. The translation has other words,
    the last one first.
    """

    def example(index: int) -> Example:
        rng = np.random.default_rng([SPLITS.index(split), index])
        words = rng.choice(len(_WORDS), rng.integers(1, 4)).tolist()
        text = " ".join(_WORDS[word] for word in words)
        translation = " ".join(_MEANINGS[word] for word in reversed(words))
        times = _SECONDS * np.arange(len(text) + 1, dtype=np.float32)
        found = {"id": f"{split}-{index}", "audio": sound_of(text), "text": text, "times": times}
        return found | {"translation": translation}

    return MappedSource(range(NUM_EXAMPLES[split]), example)


def sound_of(text: str) -> np.ndarray:
    """Returns a pitch for each letter, from 300 Hz up, and silence for a blank."""
    times = np.arange(int(_SECONDS * RATE)) / RATE
    pitches = [0.0 if letter == " " else 300.0 + 100.0 * (ord(letter) - 97) for letter in text]
    return np.concatenate([0.5 * np.sin(2 * np.pi * p * times) for p in pitches]).astype(np.float32)
