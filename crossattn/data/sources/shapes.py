"""Pictures of shapes, 16 by 16, with captions, made by code: "shapes", "shapes/en,de", "shapes/scenes".

A picture of "shapes" shows the shape and a caption names it, but a third of the pictures are
noise, and a third of the captions say nothing, never both: together they tell more than each alone. With
`data.options.voice` half of the sounds, which are tones, say the shape.

"shapes/scenes" has one or two shapes with sizes and places, which ``crossattn.data.scenes`` draws, says and
reads back. Ten of the thirty pairs of a shape and a colour are held out: a scene of validation or test has
one of five that training never shows, though it shows the shape in four other colours and the colour on
others.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from crossattn.data import scenes
from crossattn.data.errors import DataError
from crossattn.data.sources import SPLITS, Example, MappedSource, Option
from crossattn.data.sources.tones import sound_of

FORM = "shapes, shapes/LANGUAGE,... or shapes/scenes"
CLASSES = {"shape": ("square", "circle", "cross", "frame")}
_GERMAN = {
    "red": "rot", "green": "grün", "blue": "blau", "black": "schwarz",
    "square": "es Quadrat", "circle": "er Kreis", "cross": "es Kreuz", "frame": "er Rahmen",
}  # fmt: skip
OPTIONS = {
    "size": Option(int, "Training scenes.", "[1, inf)"),
    "voice": Option(bool, "Whether there are tones, half of which, at random, say the shape."),
}
_COLOURS = ("red", "green", "blue", "black")
_SIZE, _TRAIN, _HELD_OUT = scenes.SIDE, 960, 256
_SCENES = 20_000  # of train, unless another size is asked for
_OTHERS = 500  # scenes of each other split
_HELD_OUT_PAIRS = {"test": 0, "validation": 3}


def open_split(
    rest: str, split: str, *, data_dir: Any = None, size: int | None = None, voice: bool = False
) -> Sequence[Example]:
    """Returns examples {"id", "image", "caption", "shape"}: uint8 [16 16 3] on white, a text, a class.

    With a voice there is also "sound", float32 at 16 kHz, a quarter of a second at most.

    With languages, en or de, every picture comes once with each, and "language" names it. Those of scenes
    have no "shape".
    """
    if voice and rest:
        raise DataError("data.options.voice is for shapes alone; leave it out.")
    if rest == "scenes":
        count = (size or _SCENES) if split == "train" else _OTHERS
        return MappedSource(range(count), functools.partial(_scene, split=split))
    if size is not None:
        raise DataError("data.options.size is for shapes/scenes alone; leave it out.")
    languages = rest.split(",") if rest else []
    if rest and (not set(languages) <= {"en", "de"} or len(set(languages)) < len(languages)):
        raise DataError(
            f"shapes has captions in en and de; {rest!r} was given; there are scenes too"
        )
    first = SPLITS.index(split) * _TRAIN
    count = _TRAIN if split == "train" else _HELD_OUT
    if not languages:
        return MappedSource(range(first, first + count), _spoken if voice else _example)
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
    colour = _COLOURS[rng.integers(len(_COLOURS))]
    image = np.full((_SIZE, _SIZE, 3), 255, np.uint8)
    radius = int(rng.integers(3, 6))
    middle = rng.integers(radius, _SIZE - radius, 2).tolist()
    image[scenes.inside(shape, radius, middle, _SIZE)] = scenes.COLOURS[colour]
    hidden = rng.integers(3)
    if hidden == 0:
        image = rng.integers(0, 256, image.shape, np.uint8)
    caption = f"something {colour}" if hidden == 1 else f"a {colour} {shape}"
    return {"id": f"shape-{index}", "image": image, "caption": caption, "shape": shape}


def _spoken(index: int) -> Example:
    example = _example(index)
    said = example["shape"] if np.random.default_rng([index, 1]).integers(2) else "aaaaa"
    return example | {"sound": sound_of(said)}


def held_out(shape: str, colour: str) -> str:
    """Returns the split that a pair of a shape and a colour belongs to; those of train are in all."""
    apart = list(scenes.COLOURS).index(colour) - scenes.SHAPES.index(shape)
    found = [split for split, own in _HELD_OUT_PAIRS.items() if apart % len(scenes.COLOURS) == own]
    return found[0] if found else "train"


def _scene(index: int, split: str) -> Example:
    """Returns a scene that has a pair of a shape and a colour of the split's own."""
    rng = np.random.default_rng([SPLITS.index(split), index])
    two, across = rng.integers(2, size=2)
    pairs = [_pair(rng, own) for own in (split, "train")[: 1 + two]]
    if rng.integers(2):
        pairs.reverse()
    # Each of two has a half of the picture, with a row or a column between them.
    if not two:
        halves = [rng.integers(2, size=2).tolist()]
    else:
        halves = [(-1, 0), (-1, 1)] if across else [(0, -1), (1, -1)]
    things = []
    for (shape, colour), sides in zip(pairs, halves, strict=True):
        size = str(rng.choice([*scenes.SIZES]))
        middle = tuple(_place(rng, scenes.SIZES[size], side) for side in sides)
        things.append(scenes.Thing(shape, colour, size, middle))
    how = ("left of" if across else "above") if two else things[0].corner
    if not two and rng.integers(2):
        how = ""
    told = (rng.random(len(things)) < 2 / 3).tolist()
    text = scenes.caption(things, told, how)
    return {"id": f"scene-{split}-{index}", "image": scenes.draw(things), "caption": text}


def _pair(rng: np.random.Generator, split: str) -> tuple[str, str]:
    pairs = _pairs(split)
    return pairs[rng.integers(len(pairs))]


@functools.cache
def _pairs(split: str) -> list[tuple[str, str]]:
    return [(s, c) for s in scenes.SHAPES for c in scenes.COLOURS if held_out(s, c) == split]


def _place(rng: np.random.Generator, radius: int, side: int) -> int:
    """Returns a row or column of a middle: in the first half (0), in the second (1), or anywhere (-1)."""
    first = _SIZE // 2 + radius if side == 1 else radius
    last = _SIZE // 2 - 2 - radius if side == 0 else _SIZE - 1 - radius
    return int(rng.integers(first, last + 1))
