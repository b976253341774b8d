"""Images in a text: their placeholder tokens and positions.

The position of an image is that of its first token in its row's text, so that it stays the same when a
search goes back.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from crossattn.nn.states import check_rows
from crossattn.types import AnyArray, Array, Int


def image_positions(
    tokens: Int[AnyArray, "B T"] | Sequence[Sequence[int]],
    image_id: int,
    images: Sequence[int] | None = None,
    size: int = 1,
) -> Int[np.ndarray, "B I"]:
    """Finds the first position of each image in texts: an image has ``size`` adjacent tokens ``image_id``.

    Rows with fewer images than others are padded with -1.

    Args:
      tokens: [B T], or rows of unlike lengths; of prompts, not traced by ``jax.jit``.
      image_id: the placeholder token of an image, or of one of its patches.
      images: the number of images of each row; None checks no number.
      size: tokens of an image.

    Raises:
      ValueError: a row has an image without its tokens, or tokens without an image.
    """
    texts = tokens if isinstance(tokens, list | tuple) else np.asarray(tokens)
    rows = [np.flatnonzero(np.asarray(row) == image_id) for row in texts]
    counts = [len(row) // size for row in rows] if images is None else images
    each = "one token for each image" if size == 1 else f"{size} tokens for each image"
    for number, (row, count) in enumerate(zip(rows, counts, strict=True)):
        if len(row) != count * size:
            raise ValueError(
                f"row {number} has {len(row)} image tokens (id {image_id}) and {count} images; expected "
                f"{each}, at its place in the text."
            )
        if np.any(row.reshape(-1, size) != row[::size, None] + np.arange(size)):
            raise ValueError(
                f"row {number} has image tokens (id {image_id}) at {row.tolist()}; expected {each}, side by "
                "side."
            )
    width = max(1, *(len(row) // size for row in rows))
    return np.stack(
        [np.pad(row[::size], (0, width - len(row) // size), constant_values=-1) for row in rows]
    ).astype(np.int32)


def with_places(images: Any, image_positions: Any, batch: int) -> tuple[Array, Array] | None:
    """Returns images [B I ...] and their positions [B I] as arrays; None without images.

    Raises:
      ValueError: one is given without the other, their numbers differ, or they have not ``batch`` rows.
    """
    if (images is None) != (image_positions is None):
        given, lacking = "images", "image_positions"
        if images is None:
            given, lacking = lacking, given
        raise ValueError(f"got {given} without {lacking}; expected both of them, or neither.")
    if images is None:
        return None
    images, image_positions = jnp.asarray(images), jnp.asarray(image_positions)
    check_rows("images", images, batch)
    if images.shape[:2] != image_positions.shape:
        raise ValueError(
            f"image_positions has shape {image_positions.shape} and images {images.shape}; expected a "
            f"position for each image, {images.shape[:2]}."
        )
    return images, image_positions
