"""Pictures in rows: with their captions, with the attention to their patches, or as they grow from noise."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Shaped

from crossattn.viz.checks import checked_image

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CAPTION = 24  # letters in a line of a caption
_LINE = 0.17  # inches
_COLUMNS = 5
_HEAT = "inferno"


def captions(
    images: Sequence[Float[np.ndarray, "..."]],
    texts: Sequence[str],
    title: str = "",
    *,
    columns: int = 6,
) -> "Figure":
    """Draws pictures in rows, their captions beneath, in any script.

    Args:
      images: each [H W], [H W 1] or [H W 3], uint8 or from 0 to 1, of any sizes.
      texts: a caption each; a line break stays one.
      title: a line above all.
      columns: largest number of pictures in a row.

    Raises:
      ValueError: there are no pictures, or not as many captions, or a picture has another shape.
    """
    if not len(images) or len(images) != len(texts):
        raise ValueError(
            f"got {len(images)} picture(s) and {len(texts)} caption(s); expected as many, one or more."
        )
    shown = [checked_image(image) for image in images]
    lines = [
        [line for own in text.split("\n") for line in textwrap.wrap(own, _CAPTION) or [""]]
        for text in texts
    ]
    columns = min(columns, len(images))
    rows = [lines[i : i + columns] for i in range(0, len(lines), columns)]
    heights = [1.85 + _LINE * max(map(len, row)) for row in rows]

    from crossattn.viz.figure import label

    figure, axes = _grid(len(images), columns, 1.95, heights, title)
    for ax, image, own in zip(axes, shown, lines, strict=True):
        ax.imshow(image, cmap="gray", vmin=0, vmax=1)
        ax.set(xticks=[], yticks=[], frame_on=False)
        beneath = label("\n".join(own))
        ax.set_xlabel(beneath.text, fontsize=8, **beneath.style)
    return figure


def patches(
    image: Float[np.ndarray, "..."],
    weights: Mapping[str, Float[np.ndarray, "..."]],
    title: str = "",
) -> "Figure":
    """Draws a picture, and again for each of the weights, with colours over its patches; five in a row.

    Args:
      image: [H W], [H W 1] or [H W 3], uint8 or from 0 to 1.
      weights: by the title of each panel, the attention to each patch of a grid [h w] over the whole picture.
        The colours of a panel go from 0 to its largest weight, which its title names.
      title: a line above all.

    Raises:
      ValueError: the picture or a weight has another shape, or weights are negative or not finite.
    """
    shown = checked_image(image)
    for name, heat in weights.items():
        if heat.ndim != 2 or 0 in heat.shape:
            raise ValueError(f"the weights {name!r} have shape {heat.shape}; expected [h w].")
        if not (np.isfinite(heat).all() and (heat >= 0).all()):
            raise ValueError(
                f"the weights {name!r} are negative or not finite; expected 0 or more."
            )

    from crossattn.viz.figure import label

    height, width = shown.shape[:2]
    count = 1 + len(weights)
    heights = [2.6 * height / width + 0.35] * -(-count // _COLUMNS)
    figure, axes = _grid(count, min(count, _COLUMNS), 2.6, heights, title)
    place: Any = dict(extent=(0, width, height, 0), interpolation="nearest")
    for ax, (name, heat) in zip(axes, [("", None), *weights.items()], strict=True):
        ax.imshow(shown, cmap="gray", vmin=0, vmax=1, **place)
        ax.set_axis_off()
        if heat is not None:
            top = float(heat.max()) or 1.0
            colours = dict(cmap=_HEAT, vmin=0, vmax=top, alpha=0.65)
            ax.imshow(heat, **colours, **place)
            above = label(f"{name}, up to {heat.max():.2f}")
            ax.set_title(above.text, fontsize=9, **above.style)
    return figure


def growth(
    images: Sequence[Shaped[np.ndarray, "..."]],
    names: Sequence[str],
    weights: Mapping[str, Float[np.ndarray, "..."]],
    title: str = "",
) -> "Figure":
    """Draws a picture as it comes out of noise, from left to right, and under it a row of maps for each word.

    Args:
      images: the picture after some steps, each [H W], [H W 1] or [H W 3], uint8 or from 0 to 1.
      names: of these steps, above the pictures.
      weights: by the word, the attention to it of the patches at each of the steps, [steps h w]. The colours
        of a row go from 0 to its largest weight, which its label names.
      title: a line above all.

    Raises:
      ValueError: there are no pictures or not as many names, or a weight is not of as many steps, negative or
        not finite.
    """
    if not len(images) or len(images) != len(names):
        raise ValueError(
            f"got {len(images)} picture(s) and {len(names)} name(s); expected as many, one or more."
        )
    shown = [checked_image(image) for image in images]
    for name, heat in weights.items():
        if heat.ndim != 3 or len(heat) != len(images) or 0 in heat.shape:
            raise ValueError(
                f"the weights {name!r} have shape {heat.shape}; expected [{len(images)} h w]."
            )
        if not (np.isfinite(heat).all() and (heat >= 0).all()):
            raise ValueError(
                f"the weights {name!r} are negative or not finite; expected 0 or more."
            )

    from crossattn.viz.figure import label

    rows = 1 + len(weights)
    height, width = shown[0].shape[:2]
    heights = [1.15 * height / width + 0.2] + [1.15 * height / width] * len(weights)
    figure, axes = _grid(rows * len(images), len(images), 1.15, heights, title)
    place: Any = dict(extent=(0, width, height, 0), interpolation="nearest")
    for ax in axes:
        ax.set(xticks=[], yticks=[], frame_on=False)
    for ax, image, name in zip(axes, shown, names, strict=False):
        ax.imshow(image, cmap="gray", vmin=0, vmax=1, **place)
        ax.set_title(name, fontsize=8)
    for row, (word, heat) in enumerate(weights.items(), start=1):
        own = axes[row * len(images) : (row + 1) * len(images)]
        top = float(heat.max()) or 1.0
        for ax, each in zip(own, heat, strict=True):
            ax.imshow(each, cmap=_HEAT, vmin=0, vmax=top, **place)
        beside = label(f"{word}\nto {heat.max():.2f}")
        text = dict(rotation=0, ha="right", va="center", fontsize=8)
        own[0].set_ylabel(beside.text, **text, **beside.style)
    return figure


def _grid(
    count: int, columns: int, width: float, heights: Sequence[float], title: str
) -> tuple["Figure", list[Any]]:
    """Makes a figure of ``count`` axes in rows, with widths and heights in inches."""
    from crossattn.viz.figure import Picture, label

    figure, above = Picture(), label(title)
    figure.set_size_inches(width * columns, sum(heights) + (0.35 if title else 0))
    if title:
        figure.suptitle(above.text, fontsize=11, **above.style)
    axes = figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights).ravel()
    for ax in axes[count:]:
        ax.remove()
    return figure, list(axes[:count])
