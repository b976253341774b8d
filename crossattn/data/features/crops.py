"""Pictures of rectangles on a page, cut out of the picture of the page."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float

from crossattn.data.errors import DataError
from crossattn.data.features.base import Feature
from crossattn.data.features.boxes import Boxes
from crossattn.data.features.image import Image

_SLACK = 1e-3  # of a pixel, by which rounding may put a box over its edge


@dataclass(frozen=True)
class Crops(Feature):
    """Pictures of boxes on a page, stretched to one size, float32 [boxes, H, W, C].

    A value is {"page": picture, "boxes": [n 4], "size": (width, height)}: the picture as `Image` reads one,
    the boxes as `Boxes` does, in the unit of the size, which is that of the whole picture. Batches hold
    NAME [batch_size, length, H, W, C], NAME_segment_ids and NAME_positions.

    Attributes:
        height, width: of each result, in pixels.
        channels: 3, or 1 for grey.
        margin: of the page around a box that is cut out with it, in the unit of the size: bullets, borders
            and neighbours stand there. Beyond the edge of the page is white.
        max_length: the most boxes of an example.
    """

    height: int
    width: int
    channels: int = 1
    margin: float = 0.0
    max_length: int = 512

    def __post_init__(self):
        if not 0 <= self.margin < float("inf"):
            raise DataError(f"margin is {self.margin}; expected 0 or more")
        self._image  # noqa: B018, which refuses sizes and channels

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.height, self.width, self.channels)

    def length(self, value: Any) -> int:
        return self._boxes.length(value)

    def prepare(self, value: Any) -> Float[np.ndarray, "boxes H W C"]:
        """Returns the pictures of the boxes of a page.

        Raises:
            DataError: the page cannot be read, or `Boxes` refuses a box.
        """
        boxes = self._boxes.prepare(value)
        if not isinstance(value, Mapping) or "page" not in value:
            raise DataError("there is no picture of the page; expected {'page', 'boxes', 'size'}")
        page = self._image.opened(value["page"])
        edge = (
            np.tile(np.asarray(value["size"], np.float64) / self.margin, 2) if self.margin else None
        )
        found = np.zeros((len(boxes), *self.shape), np.float32)
        for i, box in enumerate(boxes.astype(np.float64)):
            if edge is not None:
                box = box + np.array([-1, -1, 1, 1]) / edge
            found[i] = self._image.prepare(_cut(page, box * np.tile(page.size, 2)))
        return found

    @cached_property
    def _image(self) -> Image:
        return Image(self.height, self.width, self.channels, resize="stretch")

    @cached_property
    def _boxes(self) -> Boxes:
        return Boxes(self.max_length)


def _cut(page: Any, edges: np.ndarray) -> Any:
    """Returns the pixels that a box touches, at least one; white beyond the page."""
    from PIL import Image as pillow

    left, top = np.floor(edges[:2] + _SLACK).astype(int)
    right, bottom = np.maximum(np.ceil(edges[2:] - _SLACK).astype(int), (left + 1, top + 1))
    crop = pillow.new(page.mode, (int(right - left), int(bottom - top)), "white")
    crop.paste(page, (int(-left), int(-top)))
    return crop
