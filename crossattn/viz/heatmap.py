"""Heatmaps of attention: panels in rows on one colour scale, with cells of one size."""

import itertools
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

# Before matplotlib, whose absence it explains.
from crossattn.viz.figure import GREY, GRID, INK, Label, Picture, label, labels

# isort: split
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

COLOURS = "Blues"  # near white to dark, lightness falls all the way: prints well in grey
LINK = "#d95f02"
_READABLE = 5.5  # points: the smallest token text; denser axes label every second or third cell
_BAR = 0.11  # inches across the colour bar


@dataclass(frozen=True)
class Panel:
    """Heatmap of weights [T, S], with tokens (none: a bare axis), links [k, 2], a title and a line below."""

    weights: np.ndarray
    source: Sequence[str]
    target: Sequence[str]
    links: np.ndarray
    title: str | None = None
    below: str = ""


def colours_of(*weights: np.ndarray) -> ScalarMappable:
    """Returns the colours of all weights of a figure: from 0, or the least below it, to the largest."""
    low = min(0.0, *(float(w.min()) for w in weights))
    high = max(float(w.max()) for w in weights)
    return ScalarMappable(Normalize(low, high if high > low else low + 1.0), COLOURS)


def draw_rows(
    rows: Sequence[Sequence[Panel]],
    title: str | None,
    *,
    largest: float = 0.32,
    tallest: float = math.inf,
    named: bool = False,
) -> Picture:
    """Draws rows of panels with one colour bar, in a figure that grows around its labels.

    Args:
      rows: of panels.
      title: a line above everything.
      largest: largest side of a cell, in inches.
      tallest: largest height of all cells of a column, in inches.
      named: whether to name the two sides.
    """
    shapes = [[panel.weights.shape for panel in row] for row in rows]
    columns = itertools.zip_longest(*shapes, fillvalue=(0, 0))
    widths = [max(shape[1] for shape in column) for column in columns]
    heights = [max(shape[0] for shape in row) for row in shapes]
    longest = max(*widths, *heights)
    cell = min(largest, 12 / sum(widths), tallest / sum(heights), 11 / longest)
    picture = Picture()
    written = label(title or "")
    style: Any = dict(x=0.01, ha="left", color=INK, fontsize=12, **written.style)
    heading = picture.suptitle(written.text, **style)
    # Room to the right of the panels for a title that is wider.
    spare = max(0.0, heading.get_window_extent().width / picture.dpi / cell - sum(widths))
    ratios = [*widths, _BAR / cell, spare + 1e-3]
    grid = picture.add_gridspec(len(rows), len(ratios), width_ratios=ratios, height_ratios=heights)
    colours = colours_of(*(panel.weights for row in rows for panel in row))
    for i, row in enumerate(rows):
        for j, panel in enumerate(row):
            ax = picture.add_subplot(grid[i, j], anchor="NW")
            draw(ax, panel, colours, cell)
            if named:
                ax.xaxis.set_label_position("top")
                ax.set_xlabel("source", color=GREY, fontsize=9, labelpad=6)
                ax.set_ylabel("target", color=GREY, fontsize=9, labelpad=6)
    # The bar stands beside the rows of the upper 1.5 inches.
    tall = 1 + int(np.searchsorted(np.cumsum(heights) * cell, 1.5))
    bar = picture.add_subplot(grid[:tall, len(widths)])
    finish_bar(picture.colorbar(colours, cax=bar), sum(heights[:tall]) * cell)
    _fit(picture, np.array([sum(ratios), sum(heights)]), cell, np.array([widths[0], heights[0]]))
    return picture


def _fit(picture: Picture, cells: np.ndarray, cell: float, first: np.ndarray) -> None:
    """Sizes the figure so that its (across, down) cells are of `cell` inches, and fixes its layout.

    `first` are the cells of the place of the first panel, which may have fewer.
    """
    engine: Any = picture.get_layout_engine()
    engine.set(w_pad=0.06, h_pad=0.06, wspace=0, hspace=0)
    *panels, _bar = picture.axes
    size = cells * cell + 8  # enough for the labels
    for aspect in ("auto", "equal"):  # labels are measured where a panel fills its place
        for ax in panels:
            ax.set_aspect(aspect)
        picture.set_size_inches(*size)
        engine.execute(picture)
        # Labels keep their size, so that the whole difference is of the cells.
        grown = cell - size * panels[0].get_position(original=True).size / first
        size = size + cells * grown
    picture.set_layout_engine("none")


def draw(ax: Axes, panel: Panel, colours: ScalarMappable, cell: float) -> None:
    """Draws a panel on axes; the side of a cell in inches sets the size of the text."""
    rows, columns = panel.weights.shape
    ax.set_facecolor("white")
    shared: Any = colours.norm
    ax.imshow(panel.weights, cmap=COLOURS, norm=shared, aspect="equal", interpolation="nearest")
    for spine in ax.spines.values():
        spine.set(color=GRID, linewidth=0.6)
    if cell >= 0.08:
        ax.set_xticks(np.arange(1, columns) - 0.5, minor=True)
        ax.set_yticks(np.arange(1, rows) - 0.5, minor=True)
        ax.grid(which="minor", color=GRID, linewidth=0.5)
    ax.grid(which="major", visible=False)
    ax.tick_params(which="both", length=0, pad=3, left=False, right=False, top=False, bottom=False)
    ax.tick_params(labeltop=True, labelbottom=False, labelleft=True, labelright=False)
    _turn_source(ax, *_write(ax.xaxis, labels(panel.source), cell), cell)
    _write(ax.yaxis, labels(panel.target), cell)
    _outline(ax, panel.links, cell)
    if panel.title:
        wrapped = label(textwrap.fill(panel.title, max(24, int(columns * cell * 14))))
        style: Any = dict(color=INK, fontsize=10, pad=8, **wrapped.style)
        ax.set_title(wrapped.text, loc="left", **style)
    if panel.below:
        ax.xaxis.set_label_position("bottom")
        ax.set_xlabel(panel.below, color=INK, fontsize=8, labelpad=4)


def draw_into(ax: Axes, panel: Panel, title: str | None) -> Figure:
    """Draws a panel on axes of another figure, whose size stays; the colour bar takes some of their place."""
    figure = ax.get_figure(root=True)
    if figure is None:
        raise ValueError("ax belongs to no figure (was it removed?); make one with fig.subplots()")
    rows, columns = panel.weights.shape
    box, colours = ax.get_window_extent(), colours_of(panel.weights)
    cell = min(box.width / columns, box.height / rows) / figure.dpi
    draw(ax, replace(panel, title=title), colours, cell)
    finish_bar(figure.colorbar(colours, ax=ax, fraction=0.04, pad=0.03), box.height / figure.dpi)
    return figure


def finish_bar(bar: Colorbar, height: float) -> None:
    """Labels a colour bar of a height in inches."""
    count = 3 if height >= 0.8 else 2
    ticks = np.linspace(bar.vmin, bar.vmax, count).tolist()
    bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
    bar.ax.tick_params(length=2, width=0.5, color=GREY, labelsize=8, labelcolor=INK)
    bar.outline.set(linewidth=0.5, edgecolor=GRID)
    if height >= 1.2:
        bar.set_label("attention weight", color=GREY, fontsize=9)


def _write(axis: Axis, tokens: Sequence[Label], cell: float) -> tuple[list[int], list[Text]]:
    """Writes tokens on an axis: all, or every k-th if the cells are too small for text."""
    step = max(1, math.ceil(_READABLE * 1.15 / (cell * 72) - 1e-6))
    places = list(range(0, len(tokens), step))
    axis.set_ticks(places, labels=[tokens[i].text for i in places])
    ticks, size = axis.get_ticklabels(), float(np.clip(cell * 72 * 0.6, _READABLE, 10))
    for text, i in zip(ticks, places, strict=True):
        text.set(color=INK, fontsize=size, **tokens[i].style)
    return places, ticks


def _turn_source(ax: Axes, places: list[int], ticks: list[Text], cell: float) -> None:
    """Turns the tokens along the top if the widest is wider than its cells."""
    room = 0.92 * cell * 72 * (places[1] if len(places) > 1 else 1)
    widest = max((text.get_window_extent().width for text in ticks), default=0)
    if widest * 72 / ax.get_figure(root=True).dpi < room:
        return
    steep = cell < 0.22 or len(places) > 30
    for text in ticks:
        text.set(rotation=90 if steep else 45, rotation_mode="anchor", ha="left")
        text.set_verticalalignment("center" if steep else "baseline")


def _outline(ax: Axes, links: np.ndarray, cell: float) -> None:
    width = float(np.clip(cell * 6, 0.6, 1.8))
    inset = 0.06  # keeps neighbours' outlines apart
    style: Any = dict(fill=False, edgecolor=LINK, linewidth=width, gid="link")
    for source, target in np.unique(links, axis=0):
        corner = (source - 0.5 + inset, target - 0.5 + inset)
        ax.add_patch(Rectangle(corner, 1 - 2 * inset, 1 - 2 * inset, **style))
