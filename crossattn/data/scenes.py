"""Scenes of one or two shapes: drawn in pixels, said in words, and read back from pixels.

    draw(things)              a picture [16 16 3] of things, each a shape, colour, size and place
    caption(things, ...)      "a small red circle left of a large blue square"
    read(picture)             the things of a picture, also of one that a model has drawn
    shows(picture, caption)   whether what is read is what the caption says; it may leave out sizes and places

Reading knows nothing of who drew: a pixel takes the nearest colour, pixels that touch are a thing, and a
thing has the shape whose drawing covers it best.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool

from crossattn.data.errors import DataError

SIDE = 16
"""Pixels of a picture's side."""
SHAPES = ("square", "circle", "cross", "frame", "triangle")
COLOURS = {
    "red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "black": (30, 30, 30),
    "yellow": (245, 200, 30), "purple": (160, 50, 180),
}  # fmt: skip
SIZES = {"small": 2, "large": 3}
"""Pixels from the middle to an edge."""
_BETWEEN = {"left of": 1, "above": 0}  # the axis along which the first of two comes first
_SMALLEST = 4  # pixels of a thing; fewer are specks
_COVERED = 0.75  # intersection over union with a shape, at least


@dataclass(frozen=True)
class Thing:
    """A shape in a picture.

    Attributes:
        shape, colour, size: names; "" is what is not said or cannot be told.
        middle: row and column; () is not said.
    """

    shape: str
    colour: str
    size: str = ""
    middle: tuple[int, ...] = ()

    @property
    def words(self) -> str:
        """The thing as captions say it, without its place."""
        size = f"{self.size} " if self.size else ""
        return f"a {size}{self.colour} {self.shape or 'shape of no name'}"

    @property
    def corner(self) -> str:
        """The quarter of the picture in which its middle stands."""
        down, right = (place >= SIDE / 2 for place in self.middle)
        return f"{'bottom' if down else 'top'} {'right' if right else 'left'}"


def inside(shape: str, radius: int, middle: Sequence[int], side: int = SIDE) -> Bool[Any, "H W"]:
    """Returns the mask of the pixels of a shape.

    Args:
        shape: its name.
        radius: pixels from its middle to its edge.
        middle: row and column.
        side: of the picture, in pixels.
    """
    rows, columns = np.mgrid[:side, :side] - np.asarray(middle)[:, None, None]
    down, right = np.abs(rows), np.abs(columns)
    square = np.maximum(down, right) <= radius
    return {
        "square": square,
        "circle": down**2 + right**2 <= radius**2,
        "cross": square & (np.minimum(down, right) < 1),
        "frame": square & (np.maximum(down, right) >= radius),
        "triangle": square & (right <= (rows + radius) // 2),
    }[shape]


def draw(things: Sequence[Thing]) -> np.ndarray:
    """Draws things on white, uint8 [16 16 3]."""
    picture = np.full((SIDE, SIDE, 3), 255, np.uint8)
    for thing in things:
        picture[inside(thing.shape, SIZES[thing.size], thing.middle)] = COLOURS[thing.colour]
    return picture


def caption(things: Sequence[Thing], sizes: Sequence[bool], how: str = "") -> str:
    """Says things in words.

    Args:
        things: one or two.
        sizes: whether each one's size is said.
        how: "left of" or "above" of two; of one, its corner, or "" where that is not said.
    """
    said = [
        Thing(thing.shape, thing.colour, thing.size if size else "").words
        for thing, size in zip(things, sizes, strict=True)
    ]
    if len(things) == 1:
        return f"{said[0]} at the {how}" if how else said[0]
    return f"{said[0]} {how} {said[1]}"


def read(picture: np.ndarray) -> list[Thing]:
    """Reads the things of a picture uint8 [16 16 3]; one that is no shape has the shape "" and no size."""
    from scipy import ndimage  # JAX brings it

    palette = np.array([(255, 255, 255), *COLOURS.values()], np.float64)
    distance = np.square(picture[..., None, :].astype(np.float64) - palette).sum(-1)
    nearest, found = distance.argmin(-1), []
    for number, colour in enumerate(COLOURS, start=1):
        labelled: Any = ndimage.label(nearest == number)
        labels, count = labelled
        for label in range(1, count + 1):
            mask = labels == label
            if mask.sum() >= _SMALLEST:
                found.append(_named(mask, colour))
    return found


def _named(mask: np.ndarray, colour: str) -> Thing:
    """Returns the thing whose drawing covers a mask best."""
    rows, columns = np.nonzero(mask)
    middle = (rows.min() + rows.max()) / 2, (columns.min() + columns.max()) / 2
    best, name = 0.0, ("", "")
    down, right = ({int(np.floor(x)), int(np.ceil(x))} for x in middle)
    for row, column, shape, size in itertools.product(down, right, SHAPES, SIZES):
        own = _template(shape, size, (row, column))
        covered = (own & mask).sum() / (own | mask).sum()
        if covered > best:
            best, name, middle = covered, (shape, size), (row, column)
    shape, size = name if best >= _COVERED else ("", "")
    return Thing(shape, colour, size, tuple(int(round(x)) for x in middle))


@functools.cache
def _template(shape: str, size: str, middle: tuple[int, int]) -> np.ndarray:
    return inside(shape, SIZES[size], middle)


def shows(picture: np.ndarray, text: str) -> bool:
    """Returns whether a picture has all that a caption says, and nothing else.

    Raises:
        DataError: the text is no caption of such a scene.
    """
    wanted, how = _parsed(text)
    found = read(picture)
    if len(found) != len(wanted):
        return False
    return any(
        all(map(_is, wanted, order)) and _stand(order, how)
        for order in itertools.permutations(found)
    )


def _is(wanted: Thing, found: Thing) -> bool:
    same = (wanted.shape, wanted.colour) == (found.shape, found.colour)
    return same and wanted.size in ("", found.size)


def _stand(things: Sequence[Thing], how: str) -> bool:
    """Returns whether things stand as a caption says: in a corner, one before the other, or anywhere."""
    if how not in _BETWEEN:
        return how in ("", things[0].corner)
    axis = _BETWEEN[how]
    first, second = (np.array(thing.middle) for thing in things)
    edges = SIZES[things[0].size] + SIZES[things[1].size]
    return bool(second[axis] - first[axis] > edges)


def _parsed(text: str) -> tuple[list[Thing], str]:
    """Returns the things that a caption says, and how they stand."""
    how, parts = "", [text]
    for word in _BETWEEN:
        if f" {word} " in text:
            how, parts = word, text.split(f" {word} ")
    if " at the " in text:
        parts = [text.partition(" at the ")[0]]
        how = text.partition(" at the ")[2]
    try:
        things = [_thing(part) for part in parts]
    except ValueError:
        raise DataError(
            f"{text!r} is no caption of a scene; expected one such as 'a small red circle left of a blue "
            "square' or 'a black cross at the top left'"
        ) from None
    return things, how


def _thing(text: str) -> Thing:
    *size, colour, shape = text.removeprefix("a ").split()
    if colour not in COLOURS or shape not in SHAPES or len(size) > 1 or not {*size} <= {*SIZES}:
        raise ValueError(text)
    return Thing(shape, colour, "".join(size))
