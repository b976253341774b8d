"""Pictures of pages: regions coloured by class, and by the attention of one of them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from crossattn.viz.checks import checked_boxes, checked_image, checked_weights

if TYPE_CHECKING:
    import matplotlib.figure

_INCHES = 7.0  # height of a page


def page(
    image: ArrayLike,
    boxes: ArrayLike,
    classes: Sequence[str],
    *,
    expected: Sequence[str] | None = None,
    weights: ArrayLike | None = None,
    region: int = 0,
    title: str | None = None,
) -> "matplotlib.figure.Figure":
    """Draws the regions of a page over its picture and returns the figure.

    Args:
      image: [H, W] or [H, W, 1] grey or [H, W, 3], uint8, or floats from 0 to 1.
      boxes: [n, 4], left, top, right and bottom of each region in fractions of the page.
      classes: n names; one colour each.
      expected: n correct names; a region of another class is dashed and names both.
      weights: [n, n], attention of each region (a row); a second panel shows that of `region`.
      region: number of the outlined region, from 0.
      title: a line above the picture.

    Raises:
      ValueError: shapes or counts that do not fit, a box outside the page or of no area, NaN in the weights,
        or no such region.
    """
    picture, places = checked_image(image), checked_boxes(boxes)
    for name, names in (("classes", classes), ("expected", expected)):
        if names is not None and len(names) != len(places):
            raise ValueError(
                f"{name} has {len(names)} names but boxes has {len(places)}; expected one a region"
            )
    read = None
    if weights is not None:
        values, count = checked_weights(weights, "n, n"), len(places)
        if values.shape != (count, count):
            raise ValueError(f"weights has shape {list(values.shape)} but there are {count} boxes")
        if not 0 <= region < count:
            raise ValueError(f"region is {region}; expected 0 to {count - 1}")
        read = values[region]

    from crossattn.viz import heatmap
    from crossattn.viz.figure import INK, Picture, label

    drawn = Picture()
    height, width = picture.shape[:2]
    scaled = places * np.array([width, height, width, height])
    titles = [title or ""]
    if read is not None:
        titles.append(f"read by region {region}, {classes[region]}")
    drawn.set_size_inches(len(titles) * (_INCHES * width / height + 0.6), _INCHES + 0.6)
    panels = drawn.subplots(1, len(titles), squeeze=False)[0]
    for ax, written in zip(panels, map(label, titles), strict=True):
        ax.imshow(picture, cmap="gray", vmin=0, vmax=1, interpolation="bilinear")
        ax.set_axis_off()
        ax.set_title(written.text, loc="left", color=INK, fontsize=10, pad=8, **written.style)
    _draw_classes(panels[0], scaled, classes, classes if expected is None else expected)
    if read is not None:
        panels[0].set_zorder(1)  # the names beside its regions lie over the other panel's margin
        colours = heatmap.colours_of(read)
        for box, shade in zip(scaled, colours.to_rgba(read, alpha=0.65), strict=True):
            _outline(panels[1], box, edgecolor=heatmap.GRID, facecolor=shade)
        _outline(panels[1], scaled[region], edgecolor=heatmap.LINK, facecolor="none", lw=1.8)
        heatmap.finish_bar(drawn.colorbar(colours, ax=panels[1], fraction=0.04), _INCHES)
    return drawn


def _draw_classes(
    ax: Any, boxes: np.ndarray, classes: Sequence[str], expected: Sequence[str]
) -> None:
    import matplotlib
    from matplotlib.patches import Patch

    from crossattn.viz.figure import label

    names = sorted({*classes, *expected})
    palette = matplotlib.colormaps["tab10"]
    colours = {name: palette(i % palette.N) for i, name in enumerate(names)}
    for number, (box, name, right) in enumerate(zip(boxes, classes, expected, strict=True)):
        line = "-" if name == right else (0, (3, 2))
        _outline(ax, box, edgecolor=colours[name], facecolor=(*colours[name][:3], 0.12), ls=line)
        beside = label(f"{number}" if name == right else f"{number} {name}, not {right}")
        style = dict(color=colours[name], fontsize=6, va="center", **beside.style)
        ax.text(box[2] + 2, (box[1] + box[3]) / 2, beside.text, ha="left", **style)
    shown = [label(name) for name in names]
    keys = [Patch(color=colours[n], label=own.text) for n, own in zip(names, shown, strict=True)]
    place = dict(loc="upper center", bbox_to_anchor=(0.5, 0))
    legend = ax.legend(handles=keys, ncols=5, fontsize=7, **place)
    for text, own in zip(legend.get_texts(), shown, strict=True):
        text.set(**own.style)


def _outline(ax: Any, box: np.ndarray, **style: Any) -> None:
    from matplotlib.patches import Rectangle

    left, top, right, bottom = box - 0.5  # a pixel's middle is a whole number
    options = {"lw": 0.9, "gid": "region"} | style
    ax.add_patch(Rectangle((left, top), right - left, bottom - top, **options))
