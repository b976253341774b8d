"""A figure to a file: the suffix says the format, the file appears whole or not at all."""

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

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
    path.parent.mkdir(parents=True, exist_ok=True)
    # Drawn beside the target and renamed: a crash or a full disk keeps the picture before.
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=suffix)
    os.close(handle)
    try:
        fig.savefig(
            draft,
            format=suffix[1:],
            dpi=200,
            facecolor=fig.get_facecolor(),  # not the style's, which may be dark
            bbox_inches="tight",
            pad_inches=0.08,
        )
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(draft, 0o666 & ~umask)  # mkstemp makes private files
        os.replace(draft, path)
    finally:
        Path(draft).unlink(missing_ok=True)
    return path
