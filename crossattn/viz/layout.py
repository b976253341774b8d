"""Where panels stand: cells keep one size in inches, the figure grows around what is written.

Text is measured, not guessed, so long tokens of any script neither overlap nor get cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from matplotlib.axes import Axes
from matplotlib.text import Text

from crossattn.viz.figure import Picture
from crossattn.viz.fonts import headline
from crossattn.viz.heatmap import INK, Scale, colour_bar

GAP = 0.22  # inches between panels
EDGE = 0.12  # inches around everything
BAR = 0.11  # inches across the colour bar
TITLE = 12  # points


@dataclass(frozen=True)
class Box:
    """A panel's size and what is written around it, in inches."""

    left: float
    width: float
    right: float
    top: float
    height: float
    bottom: float


def cell_inches(
    rows: int, columns: int, *, across: int = 1, down: int = 1, largest: float = 0.32
) -> float:
    """Side of a cell so that `across` x `down` panels of rows x columns fit a page's picture."""
    return min(largest, 12 / (across * columns), 14 / (down * rows), 11 / max(rows, columns))


def arrange(
    figure: Picture,
    rows: Sequence[Sequence[Axes]],
    cell: float,
    scale: Scale,
    title: str | None,
) -> None:
    """Places rows of panels, one colour bar on the right and a title, and sizes the figure."""
    boxes = [[_measure_panel(figure, ax, cell) for ax in row] for row in rows]
    columns = [[row[i] for row in boxes if i < len(row)] for i in range(len(boxes[0]))]
    heading, head_width, head_height = _write_title(figure, title)
    lefts, right = _stack([(b.left, b.width, b.right) for b in map(_largest, columns)], EDGE)
    tops, bottom = _stack(
        [(b.top, b.height, b.bottom) for b in map(_largest, boxes)], EDGE + head_height
    )
    # One row: as high as its panels. More: no longer than it takes to read it.
    tallest = max(box.height for box in boxes[0])
    bar_height = max(0.4, tallest if len(rows) == 1 else min(3.0, bottom - tops[0]))
    bar_left = GAP * 0.7 + max(
        left + _largest(column).width for left, column in zip(lefts, columns, strict=True)
    )
    bar = figure.add_subplot()
    colour_bar(bar, scale, height=bar_height)
    beside = _measure(figure, bar, BAR, bar_height)

    width = EDGE + max(right, bar_left + BAR + beside.right, EDGE + head_width)
    height = EDGE + max(bottom, tops[0] + bar_height + beside.bottom)
    figure.set_size_inches(width, height)
    for row, top, measured in zip(rows, tops, boxes, strict=True):
        for ax, left, box in zip(row, lefts, measured, strict=False):
            _place(figure, ax, left, height - top - box.height, box.width, box.height)
    _place(figure, bar, bar_left, height - tops[0] - bar_height, BAR, bar_height)
    heading.set_position((EDGE / width, 1 - EDGE / height))


def _largest(boxes: Sequence[Box]) -> Box:
    """The box that each of a row's or a column's boxes fits in."""
    return Box(*(max(getattr(box, field.name) for box in boxes) for field in fields(Box)))


def _stack(sizes: Sequence[tuple[float, float, float]], start: float) -> tuple[list[float], float]:
    """Puts (before, inside, after) sizes in line; returns where each inside starts, the end."""
    starts, place = [], start
    for before, inside, after in sizes:
        starts.append(place + before)
        place += before + inside + after + GAP
    return starts, place - GAP


def _measure_panel(figure: Picture, ax: Axes, cell: float) -> Box:
    """Measures a panel at the size its cells give it."""
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    return _measure(figure, ax, abs(right - left) * cell, abs(top - bottom) * cell)


def _measure(figure: Picture, ax: Axes, width: float, height: float) -> Box:
    _place(figure, ax, 1.0, 1.0, width, height)
    inner = ax.get_window_extent()
    whole = ax.get_tightbbox(figure.renderer) or inner
    left, bottom = (inner.x0 - whole.x0) / figure.dpi, (inner.y0 - whole.y0) / figure.dpi
    right, top = (whole.x1 - inner.x1) / figure.dpi, (whole.y1 - inner.y1) / figure.dpi
    return Box(max(0.0, left), width, max(0.0, right), max(0.0, top), height, max(0.0, bottom))


def _place(
    figure: Picture, ax: Axes, left: float, bottom: float, width: float, height: float
) -> None:
    """Puts axes at a place given in inches from the lower left corner of the figure."""
    across, up = figure.get_size_inches()
    ax.set_position((left / across, bottom / up, width / across, height / up))


def _write_title(figure: Picture, title: str | None) -> tuple[Text, float, float]:
    """Writes the title; returns it, its width and the height it takes, in inches."""
    name = headline(title or "")
    text = figure.text(
        0, 1, name.text, ha="left", va="top", color=INK, fontsize=TITLE, **name.style
    )
    if not title:
        return text, 0.0, 0.0
    extent = text.get_window_extent(figure.renderer)
    return text, extent.width / figure.dpi, extent.height / figure.dpi + 0.1
