"""Which source token each target token read: one heatmap, or several in one figure.

The source runs along the top, the target down the side, so a monotone translation is a
diagonal. Tokens may be in any script; see `fonts.py` for what happens without a font.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import ArrayLike

from crossattn.viz.checks import (
    checked_count,
    checked_links,
    checked_panel_lists,
    checked_tokens,
    checked_weights,
)

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure


def alignment(
    weights: ArrayLike,
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
    *,
    links: Iterable[Any] | None = None,
    title: str | None = None,
    ax: "matplotlib.axes.Axes | None" = None,
) -> "matplotlib.figure.Figure":
    """Draws weights [T, S] as a heatmap with the tokens on both axes and returns the figure.

    Args:
      weights: [T, S], any finite numbers in any dtype; rows need not sum to 1.
      source_tokens: S strings, drawn along the top.
      target_tokens: T strings, drawn from top to bottom.
      links: gold (source, target) pairs of 0-based places on the two axes, drawn as outlined
        cells; words or sub-words, whichever the tokens are.
      title: a line above the picture.
      ax: draw into these axes of your own figure, whose size and place are then left alone.

    Raises:
      ValueError: wrong rank, NaN or infinity, token counts or links that do not fit weights.
    """
    values = checked_weights(weights, "T, S")
    checked_tokens(values, source_tokens, target_tokens)
    pairs = checked_links(links, values.shape)

    from crossattn.viz import figure, fonts, heatmap, layout

    source, target = fonts.labels(source_tokens), fonts.labels(target_tokens)
    scale = heatmap.Scale.of(values)
    if ax is not None:
        cell = heatmap.cell_of(ax, values.shape)
        heatmap.draw(ax, values, source, target, scale=scale, links=pairs, cell=cell)
        heatmap.caption(ax, title)
        heatmap.colour_bar_beside(ax, scale)
        return figure.figure_of(ax)
    picture = figure.Picture()
    panel = picture.add_subplot()
    cell = layout.cell_inches(*values.shape)
    heatmap.draw(panel, values, source, target, scale=scale, links=pairs, cell=cell)
    heatmap.name_axes(panel)
    layout.arrange(picture, [[panel]], cell, scale, title)
    return picture


def gallery(
    weights: Sequence[ArrayLike],
    source_tokens: Sequence[Sequence[str]],
    target_tokens: Sequence[Sequence[str]],
    *,
    links: Sequence[Iterable[Any] | None] | None = None,
    titles: Sequence[str] | None = None,
    title: str | None = None,
    columns: int | None = None,
) -> "matplotlib.figure.Figure":
    """Draws several alignments in one figure, on one colour scale.

    Args:
      weights: one [T, S] array a sentence; T and S may differ between sentences.
      source_tokens, target_tokens: one list of strings a sentence.
      links: one collection of gold (source, target) pairs a sentence, or None for none.
      titles: one line a sentence.
      title: a line above everything.
      columns: panels in a row; by default two, or one when the sentences are long.

    Raises:
      ValueError: lists of different lengths, and whatever `alignment` refuses.
    """
    links = [None] * len(weights) if links is None else links
    titles = [""] * len(weights) if titles is None else titles
    panels = checked_panel_lists(
        weights=weights,
        source_tokens=source_tokens,
        target_tokens=target_tokens,
        links=links,
        titles=titles,
    )
    values = [checked_weights(w, "T, S", f"weights[{i}]") for i, w in enumerate(weights)]
    for i, panel in enumerate(panels):
        checked_tokens(values[i], panel[1], panel[2], f"[{i}]")
    pairs = [checked_links(links[i], v.shape, f"links[{i}]") for i, v in enumerate(values)]
    longest = max(max(v.shape) for v in values)
    across = checked_count(columns, "columns", default=2 if longest <= 30 else 1)

    from crossattn.viz import figure, fonts, heatmap, layout

    scale = heatmap.Scale.of(*values)
    across = min(across, len(panels))
    cell = layout.cell_inches(longest, longest, across=across)
    picture = figure.Picture()
    axes = []
    for i, (_, source, target, _, name) in enumerate(panels):
        ax = picture.add_subplot()
        texts = fonts.labels(source), fonts.labels(target)
        heatmap.draw(ax, values[i], *texts, scale=scale, links=pairs[i], cell=cell)
        heatmap.caption(ax, name, width=values[i].shape[1] * cell)
        axes.append(ax)
    rows = [axes[i : i + across] for i in range(0, len(axes), across)]
    layout.arrange(picture, rows, cell, scale, title)
    return picture
