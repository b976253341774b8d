"""Files of figures, which appear whole or not at all."""

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossattn.files import whole

if TYPE_CHECKING:
    import matplotlib.figure

FORMATS = (".png", ".svg", ".pdf")


def save(fig: "matplotlib.figure.Figure", path: str | os.PathLike[str]) -> Path:
    """Writes the figure as .png, .svg or .pdf, making the folder if needed; returns the path.

    Raises:
      ValueError: the suffix is none of the three.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise ValueError(f"{path.name!r} must end in {', '.join(FORMATS)}: that picks the format")
    drawn = io.BytesIO()
    colour = fig.get_facecolor()  # not the style's, which may be dark
    options: Any = dict(dpi=200, facecolor=colour, bbox_inches="tight", pad_inches=0.08)
    fig.savefig(drawn, format=suffix[1:], **options)
    return write_whole(path, drawn.getvalue())


def write_whole(path: Path, content: bytes) -> Path:
    """Writes a file, making the folder if needed; a crash or a full disk keeps the file before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as unfinished:
        unfinished.write_bytes(content)
    return path
