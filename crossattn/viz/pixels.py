"""Pictures as PNG without Pillow: the format is a deflated array with a filter a line.

Source: W3C, "Portable Network Graphics", sections 9 and 11.
"""

import base64
import struct
import zlib

import numpy as np

_LONGEST = 640  # pixels of the longer side


def data_uri(picture: np.ndarray, *, square: bool = True) -> str:
    """Returns a picture [H W] or [H W 3], from 0 to 1, as the address of a PNG in itself.

    A side of more than 640 pixels is brought below by the means of neighbours; the other side with it, if
    pixels are to stay ``square``.
    """
    steps = [-(-side // _LONGEST) for side in picture.shape[:2]]
    for axis, step in enumerate([max(steps)] * 2 if square else steps):
        picture = _shrunk(picture, step, axis)
    levels = np.rint(picture * 255).astype(np.uint8)
    return f"data:image/png;base64,{base64.b64encode(png(levels)).decode('ascii')}"


def png(levels: np.ndarray) -> bytes:
    """Returns a PNG of uint8 levels [H W] or [H W 3]."""
    height, width = levels.shape[:2]
    kind = 2 if levels.ndim == 3 else 0  # of colours, or grey
    rows = levels.reshape(height, width, -1).astype(np.int16)
    before = np.pad(rows, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    differences = ((rows - before) % 256).astype(np.uint8).reshape(height, -1)
    lines = np.pad(differences, ((0, 0), (1, 0)), constant_values=1)  # the filter Sub
    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    body = zlib.compress(lines.tobytes(), 9)
    parts = _chunk(b"IHDR", header), _chunk(b"IDAT", body), _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _shrunk(picture: np.ndarray, step: int, axis: int) -> np.ndarray:
    starts = np.arange(0, picture.shape[axis], step)
    sizes = np.diff(np.append(starts, picture.shape[axis]))
    shape = [-1 if each == axis else 1 for each in range(picture.ndim)]
    return np.add.reduceat(picture, starts, axis=axis) / sizes.reshape(shape)
