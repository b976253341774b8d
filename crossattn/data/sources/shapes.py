"""Pictures of shapes, 16 by 16, with captions, made by code: "shapes", "shapes/en,de", for runs of seconds.

A picture shows the shape and a caption names it, but a third of the pictures are
noise, and a third of the captions say nothing, never both: together they tell more than each alone.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from crossattn.data.errors import DataError
from crossattn.data.sources import SPLITS, Example, MappedSource

FORM = "shapes or shapes/LANGUAGE,..."
CLASSES = {"shape": ("square", "circle", "cross", "frame")}
_GERMAN = {
    "red": "rot", "green": "grün", "blue": "blau", "black": "schwarz",
    "square": "es Quadrat", "circle": "er Kreis", "cross": "es Kreuz", "frame": "er Rahmen",
}  # fmt: skip
_COLOURS = {
    "red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "black": (30, 30, 30),
}  # fmt: skip
_SIZE, _TRAIN, _HELD_OUT = 16, 960, 256


def open_split(rest: str, split: str, *, data_dir: Any = None) -> Sequence[Example]:
    """Returns examples {"id", "image", "caption", "shape"}: uint8 [16 16 3] on white, a text, a class.

    With languages, en or de, every picture comes once with each, and "language" names it.
    """
    languages = rest.split(",") if rest else []
    if rest and (not set(languages) <= {"en", "de"} or len(set(languages)) < len(languages)):
        raise DataError(f"shapes has captions in en and de; {rest!r} was given")
    first = SPLITS.index(split) * _TRAIN
    count = _TRAIN if split == "train" else _HELD_OUT
    if not languages:
        return MappedSource(range(first, first + count), _example)
    numbers = range(first * len(languages), (first + count) * len(languages))
    return MappedSource(numbers, functools.partial(_in_language, languages=languages))


def _in_language(number: int, languages: Sequence[str]) -> Example:
    """Returns each picture in all languages, then the next."""
    index, own = divmod(number, len(languages))
    example, language = _example(index), languages[own]
    return example | {
        "id": f"{example['id']}/{language}",
        "caption": _german(example["caption"]) if language == "de" else example["caption"],
        "language": language,
    }


def _german(caption: str) -> str:
    _, colour, *shape = caption.split()
    if not shape:
        return f"etwas {_GERMAN[colour]}es"
    ending, _, name = _GERMAN[shape[0]].partition(" ")
    return f"ein {_GERMAN[colour]}{ending} {name}"


def _example(index: int) -> Example:
    rng = np.random.default_rng(index)
    shape = CLASSES["shape"][rng.integers(len(CLASSES["shape"]))]
    colour = list(_COLOURS)[rng.integers(len(_COLOURS))]
    image = np.full((_SIZE, _SIZE, 3), 255, np.uint8)
    image[_inside(shape, rng)] = _COLOURS[colour]
    hidden = rng.integers(3)
    if hidden == 0:
        image = rng.integers(0, 256, image.shape, np.uint8)
    caption = f"something {colour}" if hidden == 1 else f"a {colour} {shape}"
    return {"id": f"shape-{index}", "image": image, "caption": caption, "shape": shape}


def _inside(shape: str, rng: np.random.Generator) -> np.ndarray:
    """Returns a mask of the pixels of a shape of some radius at some place, [16 16]."""
    radius = rng.integers(3, 6)
    middle = rng.integers(radius, _SIZE - radius, 2)
    down, right = np.abs(np.mgrid[:_SIZE, :_SIZE] - middle[:, None, None])
    square = np.maximum(down, right) <= radius
    return {
        "square": square,
        "circle": down**2 + right**2 <= radius**2,
        "cross": square & (np.minimum(down, right) < 1),
        "frame": square & (np.maximum(down, right) >= radius),
    }[shape]
