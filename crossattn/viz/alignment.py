"""Heatmaps of cross-attention: of one sentence, of several, or of all heads.

The source runs along the top, the target down the side, so a monotone translation is a diagonal.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import ArrayLike

from crossattn.viz.checks import checked_columns, checked_links, checked_tokens, checked_weights

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
      links: gold (source, target) pairs of token numbers from 0, drawn as outlined cells.
      title: a line above the picture.
      ax: axes of your own figure to draw into, which keep their size and place.

    Raises:
      ValueError: wrong rank, NaN or infinity, token counts or links that do not fit weights.
    """
    from crossattn.viz import heatmap

    panel = _panel(weights, source_tokens, target_tokens, links)
    if ax is None:
        return heatmap.draw_rows([[panel]], title, named=True)
    return heatmap.draw_into(ax, panel, title)


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
    lists = dict(
        weights=weights,
        source_tokens=source_tokens,
        target_tokens=target_tokens,
        links=[None] * len(weights) if links is None else links,
        titles=[""] * len(weights) if titles is None else titles,
    )
    if len(set(map(len, lists.values()))) > 1:
        said = ", ".join(f"{len(own)} {name}" for name, own in lists.items())
        raise ValueError(f"a gallery needs one entry a sentence in every list, got {said}")
    if not len(weights):
        raise ValueError("a gallery needs at least one sentence, got none")

    from crossattn.viz import heatmap

    lines = enumerate(zip(*lists.values(), strict=True))
    panels = [_panel(*sentence, which=f"[{i}]") for i, sentence in lines]
    longest = max(max(panel.weights.shape) for panel in panels)
    across = checked_columns(columns, 2 if longest <= 30 else 1)
    rows = [panels[i : i + across] for i in range(0, len(panels), across)]
    return heatmap.draw_rows(rows, title)


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

    Layers run downward and heads across, numbered from 0; a single layer wraps. Only the outer axes have
    tokens.

    Args:
      weights: [N, T, S] or [L, N, T, S], any finite numbers in any dtype.
      source_tokens: S strings; target_tokens: T strings.
      links: gold (source, target) pairs, outlined in every head.
      title: a line above the picture.
      columns: heads in a row, for [N, T, S] only.

    Raises:
      ValueError: wrong rank, NaN or infinity, token counts or links that do not fit weights.
    """
    values = checked_weights(weights, "N, T, S", "L, N, T, S")
    checked_tokens(values.shape, source_tokens, target_tokens)
    pairs = checked_links(links, values.shape)
    by_layer = values.ndim == 4
    if by_layer and columns is not None:
        raise ValueError("columns is for weights [N, T, S]; [L, N, T, S] has one row a layer")
    count = values.shape[-3]
    # At most 4 in a row; 3 if that alone leaves no hole.
    usual = 3 if count % 4 and count % 3 == 0 else min(count, 4)
    across = count if by_layer else min(count, checked_columns(columns, usual))

    from crossattn.viz import heatmap

    rows: list[list[Any]] = []
    for i, own in enumerate(values.reshape(-1, *values.shape[-2:])):
        if i % across == 0:
            rows.append([])
        source = source_tokens if i < across else ()
        target = target_tokens if i % across == 0 else ()
        name = f"L{i // count} H{i % count}" if by_layer else f"head {i}"
        rows[-1].append(heatmap.Panel(own, source, target, pairs, below=name))
    return heatmap.draw_rows(rows, title, largest=0.2, tallest=14.0)


def _panel(weights, source, target, links, title: str | None = None, which: str = "") -> Any:
    from crossattn.viz import heatmap

    values = checked_weights(weights, "T, S", name=f"weights{which}")
    checked_tokens(values.shape, source, target, which)
    pairs = checked_links(links, values.shape, f"links{which}")
    return heatmap.Panel(values, source, target, pairs, title)
