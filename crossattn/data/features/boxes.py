"""Rectangles on a page."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from crossattn.data.errors import DataError
from crossattn.data.features.base import Feature

_SLACK = 1e-3  # of a page, by which rounding may put a box over its edge


@dataclass(frozen=True)
class Boxes(Feature):
    """Boxes on a page as fractions of its width and height, float32 [boxes, 4].

    A value is {"boxes": [n 4], "size": (width, height)}: left, top, right and bottom of each, from the upper
    left corner, in the unit of the size, such as pixels or points. Batches hold NAME [rows, length, 4],
    NAME_segment_ids and NAME_positions.

    Attributes:
        max_length: the most boxes of an example.
    """

    max_length: int = 512

    shape = (4,)

    def length(self, value: Any) -> int:
        return len(_parts(value)[0])

    def prepare(self, value: Any) -> Float[np.ndarray, "boxes 4"]:
        """Returns the boxes of a page.

        Raises:
            DataError: a box lies outside the page or has no area; the message has its number.
        """
        boxes, size = _parts(value)
        boxes = boxes[: self.max_length]
        scaled = boxes / np.tile(size, 2)
        outside = np.logical_not((scaled >= -_SLACK) & (scaled <= 1 + _SLACK)).any(1)
        if outside.any():
            raise DataError(
                f"{_first(boxes, outside)} is outside the page, {size[0]:g} x {size[1]:g}"
            )
        scaled = scaled.clip(0, 1)
        flat = (scaled[:, :2] >= scaled[:, 2:]).any(1)
        if flat.any():
            raise DataError(
                f"{_first(boxes, flat)} has no area; expected left, top, right, bottom, with left < right "
                "and top < bottom"
            )
        return scaled.astype(np.float32)


def _parts(value: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the boxes and the size of a page."""
    if not isinstance(value, Mapping) or not value.keys() >= {"boxes", "size"}:
        raise DataError(f"{type(value).__name__} came; expected {{'boxes': [n 4], 'size': (w, h)}}")
    try:
        boxes = np.asarray(value["boxes"], np.float64)
        size = np.asarray(value["size"], np.float64)
    except (TypeError, ValueError):
        raise DataError("boxes or the size of the page are no numbers, or not 4 a box") from None
    boxes = boxes.reshape(0, 4) if boxes.size == 0 else boxes
    if boxes.ndim != 2 or boxes.shape[1] != 4:
        raise DataError(f"boxes have shape {list(boxes.shape)}; expected [n 4]")
    if size.shape != (2,) or not (size > 0).all() or not np.isfinite(size).all():
        raise DataError(
            f"the page is of size {size.tolist()}; expected a width and a height above 0"
        )
    return boxes, size


def _first(boxes: np.ndarray, wrong: Any) -> str:
    """Names the first wrong box."""
    number = int(np.flatnonzero(wrong)[0])
    return f"box {number}, {', '.join(f'{edge:g}' for edge in boxes[number])},"
