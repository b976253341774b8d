"""Pictures of shapes, 16 by 16, with captions, made by code: "shapes", for what runs in seconds.

The one thing to know: a picture shows the shape and a caption names it, but a third of the pictures are
noise, and a third of the captions say nothing, never both: together they tell more than each alone.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from crossattn.data.errors import DataError
from crossattn.data.sources import SPLITS, Example, MappedSource

FORM = "shapes"
CLASSES = {"shape": ("square", "circle", "cross", "frame")}
_COLOURS = {
    "red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "black": (30, 30, 30),
}  # fmt: skip
_SIZE, _TRAIN, _HELD_OUT = 16, 960, 256


def open_split(rest: str, split: str, *, data_dir: Any = None) -> Sequence[Example]:
    """Examples {"id", "image", "caption", "shape"}: uint8 [16 16 3] on white, a text, the name of a class."""
    if rest:
        raise DataError(f"shapes has no parts; {rest!r} was given")
    first = SPLITS.index(split) * _TRAIN
    return MappedSource(range(first, first + (_TRAIN if split == "train" else _HELD_OUT)), _example)


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
    """Which pixels belong to a shape of some radius at some place, [16 16]."""
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
