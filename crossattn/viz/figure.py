"""The figure the pictures are drawn on: no pyplot, no display, shown by notebooks as it is.

Imports matplotlib, so the public functions import it only when they draw.
"""

import io

try:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "crossattn.viz draws with matplotlib, which is not installed: pip install matplotlib",
        name="matplotlib",
    ) from error


class Picture(Figure):
    """A Figure that belongs to no pyplot: freed with its last reference, drawn without a screen."""

    def __init__(self) -> None:
        super().__init__(figsize=(10, 10), dpi=110, facecolor="white")
        self._agg = FigureCanvasAgg(self)  # for measuring; saving picks its own canvas

    @property
    def renderer(self) -> RendererAgg:
        """What text is measured with, at the figure's present size."""
        return self._agg.get_renderer()

    def _repr_png_(self) -> bytes:
        """What IPython shows for the last line of a cell, with or without its inline backend."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", facecolor="white", bbox_inches="tight", pad_inches=0.08)
        return buffer.getvalue()


def figure_of(ax: Axes) -> Figure:
    """Returns the whole figure that ax is part of, through sub-figures.

    Raises:
      ValueError: ax was removed from its figure.
    """
    figure = ax.get_figure(root=True)
    if figure is None:
        raise ValueError("ax belongs to no figure (was it removed?); make one with fig.subplots()")
    return figure
