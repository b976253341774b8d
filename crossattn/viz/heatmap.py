"""One heatmap on one set of axes: colours, cell grid, tokens, links. Imports matplotlib."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.colors import Normalize
from matplotlib.patches import Rectangle

from crossattn.viz.figure import figure_of
from crossattn.viz.fonts import Label, headline

COLOURS = "Blues"  # near white to dark, lightness falls all the way: prints well in grey
LINK = "#d95f02"
INK, GREY, GRID = "#222222", "#666666", "#dddddd"
READABLE = 5.5  # points: the smallest token text; denser axes label every second or third cell


@dataclass(frozen=True)
class Scale:
    """The range of weights that the colours span; every panel of a figure shares one."""

    low: float
    high: float

    @classmethod
    def of(cls, *arrays: np.ndarray) -> "Scale":
        low = min(0.0, *(float(a.min()) for a in arrays))
        high = max(float(a.max()) for a in arrays)
        return cls(low, high if high > low else low + 1.0)

    def mappable(self) -> ScalarMappable:
        return ScalarMappable(Normalize(self.low, self.high), COLOURS)


def draw(
    ax: Axes,
    weights: np.ndarray,
    source: Sequence[Label],
    target: Sequence[Label],
    *,
    scale: Scale,
    links: np.ndarray,
    cell: float,
) -> None:
    """Draws weights [T, S] with source labels on top and target labels down the side.

    An empty list of labels leaves its axis bare. `cell` is the side of a cell in inches, which
    sets the size of the text.
    """
    rows, columns = weights.shape
    ax.set_facecolor("white")
    ax.imshow(
        weights,
        cmap=COLOURS,
        norm=Normalize(scale.low, scale.high),
        aspect="equal",
        interpolation="nearest",
        origin="upper",
    )
    for spine in ax.spines.values():
        spine.set(color=GRID, linewidth=0.6)
    if cell >= 0.08:
        ax.set_xticks(np.arange(1, columns) - 0.5, minor=True)
        ax.set_yticks(np.arange(1, rows) - 0.5, minor=True)
        ax.grid(which="minor", color=GRID, linewidth=0.5)
    ax.grid(which="major", visible=False)
    ax.tick_params(which="both", length=0, pad=3, left=False, right=False, top=False, bottom=False)
    ax.tick_params(labeltop=True, labelbottom=False, labelleft=True, labelright=False)
    _write_source(ax, source, cell)
    _write_target(ax, target, cell)
    _outline(ax, links, cell)


def cell_of(ax: Axes, shape: tuple[int, ...]) -> float:
    """Side in inches of a cell when [T, S] cells fill axes of the size that ax has now."""
    rows, columns = shape
    box = ax.get_window_extent()
    return min(box.width / columns, box.height / rows) / figure_of(ax).dpi


def name_axes(ax: Axes) -> None:
    """Says which side is which."""
    ax.xaxis.set_label_position("top")
    ax.set_xlabel("source", color=GREY, fontsize=9, labelpad=6)
    ax.set_ylabel("target", color=GREY, fontsize=9, labelpad=6)


def caption(ax: Axes, text: str | None, width: float = 8.0) -> None:
    """Writes a title above the tokens, wrapped near `width` inches."""
    if text:
        wrapped = textwrap.fill(text, max(30, int(width * 14)))
        name = headline(wrapped)
        ax.set_title(name.text, loc="left", color=INK, fontsize=10, pad=8, **name.style)


def caption_below(ax: Axes, text: str) -> None:
    """Writes which head this is under its panel, where no tokens are."""
    ax.xaxis.set_label_position("bottom")
    ax.set_xlabel(text, color=INK, fontsize=8, labelpad=4)


def colour_bar(axes: Axes, scale: Scale, *, height: float) -> None:
    """Draws the legend of the colours into axes that are `height` inches high."""
    bar = figure_of(axes).colorbar(scale.mappable(), cax=axes)
    _finish_bar(bar, scale, height)


def colour_bar_beside(ax: Axes, scale: Scale) -> None:
    """Draws the legend of the colours in space taken from the right of ax."""
    figure = figure_of(ax)
    bar = figure.colorbar(scale.mappable(), ax=ax, fraction=0.04, pad=0.03)
    _finish_bar(bar, scale, ax.get_window_extent().height / figure.dpi)


def _finish_bar(bar: Colorbar, scale: Scale, height: float) -> None:
    count = 3 if height >= 0.8 else 2
    ticks = np.linspace(scale.low, scale.high, count).tolist()
    bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
    bar.ax.tick_params(length=2, width=0.5, color=GREY, labelsize=8, labelcolor=INK)
    bar.outline.set(linewidth=0.5, edgecolor=GRID)
    if height >= 0.8:
        bar.set_label("attention weight", color=GREY, fontsize=9)


def _write_source(ax: Axes, source: Sequence[Label], cell: float) -> None:
    places = _places(source, cell)
    size = _text_size(cell)
    ax.set_xticks(places, labels=[source[i].text for i in places])
    ticks = ax.get_xticklabels()
    if not ticks:
        return
    for text, i in zip(ticks, places, strict=True):
        text.set(color=INK, fontsize=size, **source[i].style)
    dpi = figure_of(ax).dpi
    widest = max(text.get_window_extent().width for text in ticks) / dpi
    if widest < 0.92 * cell * (places[1] - places[0] if len(places) > 1 else 1):
        return
    angle = 45 if cell >= 0.22 and len(places) <= 30 else 90
    for text in ticks:
        text.set(rotation=angle, rotation_mode="anchor", ha="left")
        text.set_verticalalignment("center" if angle == 90 else "baseline")


def _write_target(ax: Axes, target: Sequence[Label], cell: float) -> None:
    places = _places(target, cell)
    ax.set_yticks(places, labels=[target[i].text for i in places])
    for text, i in zip(ax.get_yticklabels(), places, strict=True):
        text.set(color=INK, fontsize=_text_size(cell), **target[i].style)


def _text_size(cell: float) -> float:
    """Points of token text for cells of so many inches."""
    return float(np.clip(cell * 72 * 0.6, READABLE, 10))


def _places(labels: Sequence[Label], cell: float) -> list[int]:
    """Which cells get their label: all, or every k-th when the cells are too small for text."""
    step = max(1, int(np.ceil(READABLE * 1.15 / (cell * 72) - 1e-6)))
    return list(range(0, len(labels), step))


def _outline(ax: Axes, links: np.ndarray, cell: float) -> None:
    width = float(np.clip(cell * 6, 0.6, 1.8))
    inset = 0.06  # keeps neighbours' outlines apart
    for source, target in np.unique(links, axis=0):
        corner = (source - 0.5 + inset, target - 0.5 + inset)
        side = 1 - 2 * inset
        ax.add_patch(
            Rectangle(corner, side, side, fill=False, edgecolor=LINK, linewidth=width, gid="link")
        )
