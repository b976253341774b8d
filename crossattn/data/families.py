"""Families of near-duplicates, which a source keeps in one split: by names in common, and by pictures."""

import io
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float

from crossattn.data.errors import needs

SIDE = 24
"""Pixels of a side of the pictures that are compared."""


def families(keys: Sequence[Sequence[str]], pairs: Iterable[tuple[int, int]] = ()) -> list[str]:
    """Returns the family of each item; items with a key in common, or in a pair, are in one.

    Args:
        keys: of each item, one or more; a family is named by the least of its keys.
        pairs: numbers of items that are alike.
    """
    parent = {key: key for own in keys for key in own}

    def root(key: str) -> str:
        while parent[key] != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    joined = [(own[0], key) for own in keys for key in own]
    for one, other in [*joined, *((keys[i][0], keys[j][0]) for i, j in pairs)]:
        least, most = sorted((root(one), root(other)))
        parent[most] = least
    return [root(own[0]) for own in keys]


def small_picture(image: bytes) -> Float[np.ndarray, "24 24 4"]:
    """Returns the picture of a file: its colours times its opacity, and its opacity, from 0 to 1."""
    with needs("images are read with Pillow", "images"):
        from PIL import Image
    opened = Image.open(io.BytesIO(image)).convert("RGBA")
    pixels = np.asarray(opened.resize((SIDE, SIDE), Image.Resampling.BOX), np.float32) / 255
    return np.concatenate([pixels[..., :3] * pixels[..., 3:], pixels[..., 3:]], -1)
