"""All heads of a layer, or of every layer, side by side on one colour scale."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import ArrayLike

from crossattn.viz.checks import checked_count, checked_links, checked_tokens, checked_weights

if TYPE_CHECKING:
    import matplotlib.figure


def heads(
    weights: ArrayLike,
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
    *,
    links: Iterable[Any] | None = None,
    title: str | None = None,
    columns: int | None = None,
) -> "matplotlib.figure.Figure":
    """Draws weights [N, T, S] or [L, N, T, S] as a grid of heatmaps, one a head.

    Layers run downward and heads across; a single layer wraps. Heads and layers are numbered
    from 0, as in the array. Tokens stand on the outer axes only.

    Args:
      weights: [N, T, S] or [L, N, T, S], any finite numbers in any dtype.
      source_tokens: S strings; target_tokens: T strings.
      links: gold (source, target) pairs, outlined in every head.
      title: a line above the picture.
      columns: heads in a row, for [N, T, S] only.

    Raises:
      ValueError: wrong rank, NaN or infinity, token counts or links that do not fit weights.
    """
    values = checked_weights(weights, "N, T, S", or_axes="L, N, T, S")
    checked_tokens(values, source_tokens, target_tokens)
    pairs = checked_links(links, values.shape[-2:])
    by_layer = values.ndim == 4
    if by_layer and columns is not None:
        raise ValueError("columns is for weights [N, T, S]; [L, N, T, S] has one row a layer")
    count = values.shape[-3]
    asked = checked_count(columns, "columns", default=_columns(count))
    across = count if by_layer else min(asked, count)

    from crossattn.viz import figure, fonts, heatmap, layout

    picture = figure.Picture()
    scale = heatmap.Scale.of(values)
    panels = values.reshape(-1, *values.shape[-2:])
    down = -(-len(panels) // across)
    cell = layout.cell_inches(*panels.shape[1:], across=across, down=down, largest=0.2)
    source, target = fonts.labels(source_tokens), fonts.labels(target_tokens)
    rows = []
    for i, panel in enumerate(panels):
        if i % across == 0:
            rows.append([])
        ax = picture.add_subplot()
        outer = source if i < across else [], target if i % across == 0 else []
        heatmap.draw(ax, panel, *outer, scale=scale, links=pairs, cell=cell)
        name = _name(i, count, by_layer, short=panel.shape[1] * cell < 1)
        heatmap.caption_below(ax, name)
        rows[-1].append(ax)
    layout.arrange(picture, rows, cell, scale, title)
    return picture


def _columns(count: int) -> int:
    """Heads in a row: all up to four, otherwise whichever of 4 and 3 leaves no hole."""
    if count <= 4:
        return count
    return 3 if count % 4 and count % 3 == 0 else 4


def _name(i: int, count: int, by_layer: bool, *, short: bool) -> str:
    layer, head = divmod(i, count)
    if not by_layer:
        return f"head {head}"
    return f"L{layer} H{head}" if short else f"layer {layer} head {head}"
