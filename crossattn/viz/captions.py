"""A page of pictures, each with what was written of it beneath.

Imports matplotlib only when it draws.
"""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIDE = 1.7  # inches of a picture
_LETTERS = 24  # in a line of a caption
_LINE = 0.17  # inches


def captions(
    images: Sequence[Float[np.ndarray, "..."]],
    texts: Sequence[str],
    title: str = "",
    *,
    columns: int = 6,
) -> "Figure":
    """Pictures in rows, their captions beneath, in any script.

    Args:
      images: each [H W C], values from 0 to 1, of 1 or 3 channels, of any sizes.
      texts: a caption each; a line break stays one.
      title: what stands above all.
      columns: the most pictures in a row.

    Raises:
      ValueError: there are none, or not as many captions as pictures, or a picture has another shape.
    """
    if not len(images) or len(images) != len(texts):
        raise ValueError(
            f"got {len(images)} picture(s) and {len(texts)} caption(s); expected as many, one or more."
        )
    for image in images:
        if image.ndim != 3 or image.shape[-1] not in (1, 3) or 0 in image.shape:
            raise ValueError(f"a picture has shape {image.shape}; expected [H W 1] or [H W 3].")
    from crossattn.viz.figure import Picture
    from crossattn.viz.fonts import headline

    below = ["\n".join(_lines(text)) for text in texts]
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    figure = Picture()
    lines = [
        max(text.count("\n") + 1 for text in below[row * columns : (row + 1) * columns])
        for row in range(rows)
    ]
    heights = [_SIDE + 0.15 + _LINE * count for count in lines]
    figure.set_size_inches(_SIDE * 1.15 * columns, sum(heights) + (0.35 if title else 0))
    figure.set_layout_engine("constrained")
    axes = figure.subplots(rows, columns, squeeze=False, height_ratios=heights).ravel()
    for ax in axes[len(images) :]:
        ax.remove()
    for ax, image, text in zip(axes, images, below, strict=False):
        ax.imshow(image[..., 0] if image.shape[-1] == 1 else image, cmap="gray", vmin=0, vmax=1)
        ax.set(xticks=[], yticks=[], frame_on=False)
        label = headline(text)
        ax.set_xlabel(label.text, fontsize=8, **label.style)
    if title:
        above = headline(title)
        figure.suptitle(above.text, fontsize=11, **above.style)
    return figure


def _lines(text: str) -> list[str]:
    return [line for own in text.split("\n") for line in textwrap.wrap(own, _LETTERS) or [""]]
