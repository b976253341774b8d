"""Files and texts that launchers are given on the command line or on standard input."""

import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from crossattn.data.errors import DataError
from crossattn.data.features import Image
from crossattn.train import processes
from experiments import launch

_SHOWN = 256  # pixels of a picture's longer side that are drawn


def each_file(
    paths: Sequence[str], drawing: Path | None, use: Callable[[str, Path | None], None]
) -> int:
    """Calls ``use(path, its picture)`` for each file, and returns the exit code.

    A wrong one of several files does not stop the others.

    Args:
      paths: the files.
      drawing: the picture; each of several files has its own, with the file's name, or its number if two
        names are equal.
      use: processes a file.
    """
    if len(paths) == 1:
        use(paths[0], drawing)
        return 0
    names = [Path(path).stem for path in paths]
    if len(set(names)) < len(names):
        names = [str(number) for number in range(1, len(names) + 1)]
    failed = False
    for path, name in zip(paths, names, strict=True):
        try:
            use(path, None if drawing is None else drawing.with_stem(f"{drawing.stem}-{name}"))
        except (DataError, launch.Refused) as error:
            launch.complain(error)
            failed = True
    return int(failed)


def shown(feature: Image, path: str | bytes) -> np.ndarray:
    """Returns the part of a picture that a model reads, in more pixels, values from 0 to 1.

    The picture is a path, or the bytes of a file.
    """
    scale = max(1, _SHOWN // max(feature.height, feature.width))
    size = feature.height * scale, feature.width * scale
    large = Image(*size, feature.channels, feature.resize, (0.0,), (1.0,))
    return np.clip(large.prepare(path), 0, 1)


def pixels(png: bytes) -> np.ndarray:
    """Returns the grey pixels of a page, uint8 [H W]."""
    from PIL import Image as Pillow

    with Pillow.open(io.BytesIO(png), formats=("PNG",)) as picture:
        return np.asarray(picture.convert("L"))


def standard_input() -> list[str]:
    """Returns, in every process, the lines of standard input, which only the main process has."""
    found: Any = None
    if processes.is_main():
        try:
            found = _lines()
        except launch.Refused as error:
            found = str(error)
    found = processes.gather(found)[0]
    if isinstance(found, str):
        raise launch.Refused(found)
    return found


def _lines() -> list[str]:
    """Reads the lines of standard input, which must be UTF-8."""
    lines = []
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            lines.append(line.decode("utf-8").strip())
        except UnicodeDecodeError as error:
            raise launch.Refused(
                f"line {number} of standard input is not UTF-8 (byte {error.start + 1}); convert it "
                "first, for example with iconv."
            ) from None
    if not lines:
        raise launch.Refused("got no text; give some as arguments or on standard input.")
    return lines
