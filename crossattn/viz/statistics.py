"""Numbers of every head, a panel for each kind of number: what attention does in all layers at a glance."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CELL = 0.42  # inches


def statistics(
    numbers: Mapping[str, Mapping[str, Float[np.ndarray, "L N"]]], title: str = ""
) -> "Figure":
    """Draws a cell for each head with its number, a row for each layer, and a panel for each kind of number.

    Args:
      numbers: for each attention, "decoder.cross", by the name of the number: of ``analysis.heads.of_heads``.
      title: a line above all.

    Raises:
      ValueError: there are no numbers.
    """
    kinds = list(dict.fromkeys(kind for own in numbers.values() for kind in own))
    if not kinds:
        raise ValueError("there are no numbers to draw; expected those of one attention at least.")
    layers = {site: len(next(iter(own.values()))) for site, own in numbers.items()}
    most = max(x.shape[1] for own in numbers.values() for x in own.values())
    rows = sum(layers.values())

    from crossattn.viz.figure import Picture

    figure = Picture()
    figure.set_size_inches(len(kinds) * (most * _CELL + 0.3) + 1.6, rows * _CELL * 0.75 + 1.0)
    axes = figure.subplots(1, len(kinds), squeeze=False)[0]
    names = [f"{site} {i}" for site, count in layers.items() for i in range(count)]
    for kind, ax in zip(kinds, axes, strict=True):
        cells = np.full((rows, most), np.nan)
        top = 0
        for site, own in numbers.items():
            if kind in own:
                x = np.asarray(own[kind])
                cells[top : top + len(x), : x.shape[1]] = x
            top += layers[site]
        high = np.nanmax(cells) if kind == "entropy" else 1.0
        ax.imshow(cells, vmin=0, vmax=max(high, 1e-6), cmap="Blues", aspect="auto")
        for (row, head), x in np.ndenumerate(cells):
            if np.isfinite(x):
                dark = x > 0.6 * high
                ax.text(
                    head,
                    row,
                    f"{x:.2f}",
                    ha="center",
                    va="center",
                    size=6,
                    color="w" if dark else "k",
                )
        ax.set(title=kind, xticks=range(most), yticks=range(rows), xlabel="head")
        ax.set_yticklabels(names if ax is axes[0] else [""] * rows)
        ax.tick_params(length=0, labelsize=7)
        for top in np.cumsum(list(layers.values()))[:-1]:
            ax.axhline(top - 0.5, color="k", linewidth=0.8)
    if title:
        figure.suptitle(title)
    return figure
