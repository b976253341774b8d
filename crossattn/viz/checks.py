"""Checks of arrays, tokens and links before they are drawn, the way letters run, and the warning of fonts."""

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


class GlyphWarning(UserWarning):
    """Warning that no font on this machine has some characters, which are drawn as their U+ codes."""


def checked_weights(weights: ArrayLike, *axes: str, name: str = "weights") -> np.ndarray:
    """Returns weights as float64, of the rank of one of the ``axes`` ("T, S"), all finite."""
    array = np.asarray(weights)
    shape = f"{name} has shape {list(array.shape)}"
    if array.ndim not in [len(own.split(",")) for own in axes]:
        wanted = " or ".join(f"[{own}]" for own in axes)
        raise ValueError(
            f"{shape} but {wanted} is expected; take one sentence of the batch, and one head or the mean of "
            "the heads as needed"
        )
    if array.size == 0:
        raise ValueError(f"{shape}: there is nothing to draw")
    if np.issubdtype(array.dtype, np.complexfloating):
        raise ValueError(f"{name} is complex ({array.dtype}) but real numbers are expected")
    array = array.astype(np.float64)  # bfloat16 has no NaN test of its own
    bad = np.argwhere(~np.isfinite(array))
    if len(bad):
        raise ValueError(
            f"{name} has {len(bad)} NaN or infinite values, the first at {bad[0].tolist()}; "
            "draw the weights after the softmax, where every number is finite"
        )
    return array


def checked_tokens(
    shape: tuple[int, ...], source: Sequence[str], target: Sequence[str], which: str = ""
) -> None:
    """Checks that there is a string for each column (source) and row (target) of weights."""
    rows, columns = shape[-2:]
    for name, tokens, count, axis in (
        ("source_tokens", source, columns, "columns (S)"),
        ("target_tokens", target, rows, "rows (T)"),
    ):
        if len(tokens) != count:
            swapped = (len(target), len(source)) == (columns, rows)
            advice = "are the two swapped?" if swapped else "cut both to the same length"
            raise ValueError(
                f"{name}{which} has {len(tokens)} entries but weights{which} has {count} {axis}; {advice}"
            )
        if wrong := [token for token in tokens if not isinstance(token, str)]:
            raise ValueError(
                f"{name}{which} has {wrong[0]!r} but strings are expected; decode ids first"
            )


def checked_links(
    links: Iterable[Any] | None, shape: tuple[int, ...], name: str = "links"
) -> np.ndarray:
    """Returns links as an int array [k, 2] of (source, target) places inside weights."""
    listed = [] if links is None else list(links)
    if not listed:
        return np.zeros((0, 2), int)
    try:
        pairs = np.asarray([tuple(link) for link in listed])
    except (TypeError, ValueError):
        pairs = np.zeros(0)
    if pairs.shape[1:] != (2,) or not np.issubdtype(pairs.dtype, np.integer):
        raise ValueError(f"{name} must be (source, target) pairs of integers, got {listed[0]!r}")
    rows, columns = shape[-2:]
    outside = ((pairs < 0) | (pairs >= [columns, rows])).any(axis=1)
    if outside.any():
        source, target = pairs[outside][0].tolist()
        raise ValueError(
            f"{name} has ({source}, {target}) but there are {columns} source and {rows} target "
            "tokens, counted from 0; links are (source, target)"
        )
    return pairs


def checked_columns(columns: int | None, default: int) -> int:
    """Returns the number of panels in a row."""
    columns = default if columns is None else columns
    if columns < 1:
        raise ValueError(f"columns must be at least 1, got {columns}")
    return columns


def checked_image(image: ArrayLike) -> np.ndarray:
    """Returns a picture [H W] or [H W 3] with values from 0 to 1."""
    picture = np.asarray(image)
    if not picture.size or (picture.ndim != 2 and picture.shape[2:] not in ((1,), (3,))):
        raise ValueError(
            f"image has shape {list(picture.shape)}; expected [H, W], [H, W, 1] or [H, W, 3]"
        )
    picture = picture / 255 if picture.dtype == np.uint8 else picture.astype(np.float64)
    if not (picture.min() >= 0 and picture.max() <= 1):
        raise ValueError("image has values outside 0 to 1; expected uint8, or floats from 0 to 1")
    return picture[..., 0] if picture.shape[2:] == (1,) else picture


def checked_boxes(boxes: ArrayLike) -> np.ndarray:
    """Returns boxes [n, 4] as float64: left, top, right and bottom in fractions of the page."""
    places = np.asarray(boxes, np.float64)
    if places.ndim != 2 or places.shape[1] != 4 or not len(places):
        raise ValueError(f"boxes has shape {list(places.shape)}; expected [n, 4], at least one")
    wrong = ~((places >= 0) & (places <= 1)).all(1) | ~(places[:, :2] < places[:, 2:]).all(1)
    if wrong.any():
        number = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"box {number} is {places[number].tolist()}; expected left < right and top < bottom, in "
            "fractions of the page"
        )
    return places


def right_to_left(tokens: Sequence[str]) -> bool:
    """Whether the first letter with a direction runs to the left."""
    strong = (unicodedata.bidirectional(char) for token in tokens for char in token)
    return next((way for way in strong if way in ("L", "R", "AL")), "L") != "L"
