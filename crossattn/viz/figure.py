"""Figure of all pictures, without pyplot and without a display."""

import io

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "crossattn.viz draws with matplotlib, which is not installed: pip install matplotlib",
        name="matplotlib",
    ) from error

INK, GREY, GRID = "#222222", "#666666", "#dddddd"


class Picture(Figure):
    """Figure that belongs to no pyplot: freed with its last reference, drawn without a screen."""

    def __init__(self) -> None:
        super().__init__(figsize=(10, 10), dpi=110, facecolor="white", layout="constrained")
        FigureCanvasAgg(self)  # measures text; saving picks a canvas of its own

    def _repr_png_(self) -> bytes:
        """Returns the picture that IPython shows, with or without its inline backend."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", facecolor="white", bbox_inches="tight", pad_inches=0.08)
        return buffer.getvalue()
