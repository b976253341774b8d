"""Questions whose answers stand in other documents alone, made by code: what retrieval is for.

A document of `train`, `validation` or `test` asks for what several persons bring, and tells it some words
later; a document of `passages` says who brings a thing. A person's thing is drawn at random, and the persons
of the splits are different ones, so nothing but the passage tells it: without it an answer is one of 16.

    tell me what mira tovel will bring . mira tovel brings honey to us today ; tell me ..     a text
    what mira tovel will bring to us is honey ;                                               a passage
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from crossattn.data.sources import Example, hashed_split

FORM = "facts"
SPLITS = ("train", "validation", "test", "passages")
THINGS = (
    *("honey", "bread", "salt", "wool", "glass", "paper", "rice", "silver"),
    *("wood", "wine", "stone", "cloth", "milk", "iron", "oil", "fruit"),
)
_FIRST = [
    a + b
    for a in ("mi", "jo", "sel", "do", "pe", "ha", "lu", "ka")
    for b in ("ra", "ren", "vi", "ko", "na")
]
_LAST = [
    a + b
    for a in ("to", "bra", "an", "lin", "mar", "sor", "dun", "ek")
    for b in ("vel", "wick", "dale", "by", "stad")
]
_ASKED = 4  # persons of a document
_TIMES = {"train": 4, "validation": 2, "test": 2}
"""Documents in which each person is asked for."""


def open_split(rest: str, split: str, *, data_dir: Any = None) -> Sequence[Example]:
    """Returns {"id", "paragraphs"} of each document."""
    people = [f"{first} {last}" for first in _FIRST for last in _LAST]
    drawn = np.random.default_rng(0).integers(len(THINGS), size=len(people)).tolist()
    things = dict(zip(people, drawn, strict=True))
    if split == "passages":
        return [
            {"id": f"passage/{who}", "paragraphs": [_passage(who, things[who])]} for who in people
        ]
    own = [who for who in people if hashed_split(who, test=15, validation=15) == split]
    rng, found = np.random.default_rng([len(split), len(own)]), []
    for _ in range(_TIMES[split]):
        order = [own[i] for i in rng.permutation(len(own))]
        for first in range(0, len(order), _ASKED):
            asked = order[first : first + _ASKED]
            text = " ; ".join(f"{question(who)} {answer(who, things[who])}" for who in asked)
            found.append({"id": f"{split}/{len(found)}", "paragraphs": [text]})
    return found


def question(who: str) -> str:
    """Returns 8 words and marks that ask for a person's thing."""
    return f"tell me what {who} will bring ."


def answer(who: str, thing: int) -> str:
    """Returns 7 words that tell it."""
    return f"{who} brings {THINGS[thing]} to us today"


def _passage(who: str, thing: int) -> str:
    return f"what {who} will bring to us is {THINGS[thing]} ;"
