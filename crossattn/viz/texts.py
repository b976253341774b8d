"""Pictures of texts: each word on a ground as dark as the attention to it."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from crossattn.viz.checks import checked_weights, right_to_left

if TYPE_CHECKING:
    import matplotlib.figure

# In points.
_WIDTH, _LINE, _LETTER, _BLANK, _MARGIN = 520.0, 14.0, 8.0, 2.5, 6.0
_DARK = 0.5  # mean of red, green and blue below which a ground has white letters


def texts(
    words: Sequence[Sequence[str]],
    weights: Sequence[ArrayLike],
    *,
    titles: Sequence[str] | None = None,
    outlined: Sequence[Collection[int]] | None = None,
) -> "matplotlib.figure.Figure":
    """Draws texts one below the other in lines of words, and returns the figure.

    It is for texts that are too long for the axis of an ``alignment``.

    Args:
      words: of each text; one that is longer than 24 letters is cut.
      weights: of each text the attention to its words, [S], on one scale of colours for all.
      titles: what stands above each text, such as the question that reads it.
      outlined: of each text the numbers of the words with a line around them, from 0.

    Raises:
      ValueError: there is no text, counts or shapes do not fit, or weights are negative, NaN or infinite.
    """
    above = [""] * len(words) if titles is None else titles
    marked = [()] * len(words) if outlined is None else outlined
    for name, given in (("weights", weights), ("titles", above), ("outlined", marked)):
        if not len(words) or len(given) != len(words):
            raise ValueError(
                f"{name} has {len(given)} entries and words {len(words)} texts; expected one for each text"
            )
    read = [checked_weights(own, "S") for own in weights]
    for own, values, places in zip(words, read, marked, strict=True):
        if len(own) != len(values) or not set(places) <= set(range(len(own))):
            raise ValueError(
                f"a text has {len(own)} words, {len(values)} weights and outlined {sorted(places)}; expected "
                "a weight for each word, and numbers of words from 0"
            )
    if min(values.min() for values in read) < 0:
        raise ValueError("weights are negative; expected 0 or more")

    from crossattn.viz import heatmap
    from crossattn.viz.figure import Picture, label, labels

    figure, colours = Picture(), heatmap.colours_of(*read)
    figure.set_layout_engine("none")
    drawn = _Lines(figure)
    for own, values, places, over in zip(words, read, marked, above, strict=True):
        if over:
            drawn.write([label(word) for word in over.split()], right_to_left([over]), bold=True)
        drawn.write(labels(own), right_to_left(own), colours.to_rgba(values), places)
        drawn.count += 0.5
    height = (drawn.count + 2.5) * _LINE
    figure.set_size_inches((_WIDTH + 2 * _MARGIN) / 72, height / 72)
    limits: Any = dict(xlim=(-_MARGIN, _WIDTH + _MARGIN), ylim=(height, 0))
    drawn.place(figure.add_axes((0, 0, 1, 1), **limits))
    bar = figure.add_axes((0.68, 1.2 * _LINE / height, 0.28, 0.5 * _LINE / height))
    heatmap.finish_bar(figure.colorbar(colours, cax=bar, orientation="horizontal"), 0.9)
    return figure


class _Lines:
    """Words in lines, from the top of a figure, placed once its height is known."""

    def __init__(self, figure: Any) -> None:
        self._figure, self._renderer = figure, figure.canvas.get_renderer()
        self._words: list[tuple[Any, float, float, float, Any, bool]] = []
        self.count = 0.5

    def write(
        self,
        words: Sequence[Any],
        backwards: bool,
        grounds: Any = None,
        outlined: Collection[int] = (),
        bold: bool = False,
    ) -> None:
        """Adds labels in new lines, which run ``backwards`` from the right."""
        x, weight = 0.0, "bold" if bold else "normal"
        for number, own in enumerate(words):
            style = dict(fontsize=_LETTER, fontweight=weight, va="center_baseline", **own.style)
            text = self._figure.text(0, 0, own.text, **style)
            inches = text.get_window_extent(self._renderer).width / self._figure.dpi
            width = 72 * inches + 2 * _BLANK
            if x and x + width > _WIDTH:
                x, self.count = 0.0, self.count + 1
            left = _WIDTH - x - width if backwards else x
            ground = None if grounds is None else grounds[number]
            self._words.append((text, left, self.count, width, ground, number in outlined))
            x += width
        self.count += 1

    def place(self, ax: Any) -> None:
        """Moves the words, and their grounds, into axes of points with y down."""
        from matplotlib.patches import Rectangle

        from crossattn.viz.figure import INK
        from crossattn.viz.heatmap import LINK

        ax.set_axis_off()
        for text, left, line, width, ground, outlined in self._words:
            middle = (left + _BLANK, (line + 0.5) * _LINE)
            text.set(transform=ax.transData, position=middle, color=INK)
            if ground is not None:
                text.set_color("white" if np.mean(ground[:3]) < _DARK else INK)
                edge: Any = dict(edgecolor=LINK, lw=1.4) if outlined else dict(lw=0)
                box: Any = (left, line * _LINE), width, _LINE
                ax.add_patch(Rectangle(*box, facecolor=ground, zorder=1 + outlined, **edge))
