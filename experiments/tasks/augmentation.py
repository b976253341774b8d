"""Augmentation in training: pictures are mirrored and shifted, frequencies of sounds stretched.

It is a part of the jitted step and depends on the step's key alone, so a resumed run sees and hears the same.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossattn.data.mel import mel_centres
from crossattn.rows import own_rows


def augmented(image: jax.Array, key: jax.Array, *, flip: bool = False, shift: int = 0) -> jax.Array:
    """Returns pictures of the same size, each changed at random.

    Args:
      image: [B H W C].
      key: of this step.
      flip: mirror half of the pictures, left to right.
      shift: the most pixels by which each is moved in either direction; edges are repeated.
    """
    flips, shifts = jax.random.split(key)
    if flip:
        chosen = own_rows(lambda n: jax.random.bernoulli(flips, shape=(n, 1, 1, 1)), len(image))
        image = jnp.where(chosen, image[:, :, ::-1], image)
    if shift:
        draw = lambda n: jax.random.randint(shifts, (n, 2), 0, 2 * shift + 1)  # noqa: E731
        starts = own_rows(draw, len(image))
        wide = jnp.pad(image, ((0, 0), (shift, shift), (shift, shift), (0, 0)), mode="edge")

        def cut(picture: jax.Array, start: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice(picture, (*start, 0), image.shape[1:])

        image = jax.vmap(cut)(wide, starts)
    return image


def augmented_as(
    data: Any, image: jax.Array, key: jax.Array | None, order: np.ndarray | None = None
) -> jax.Array:
    """Returns pictures [*B H W C] augmented as the section ``data`` asks; as they are without a key.

    Pictures whose pixels stand in another ``order`` [H*W] are changed on their grid, and permuted again.
    """
    chosen = dict(flip=data.get("flip", False), shift=data.get("shift", 0))
    if key is None or not any(chosen.values()):
        return image
    pictures = image.reshape(-1, *image.shape[-3:])
    if order is not None:
        pictures = _reordered(pictures, np.argsort(order))
    pictures = augmented(pictures, jax.random.fold_in(key, 1), **chosen)
    if order is not None:
        pictures = _reordered(pictures, order)
    return pictures.reshape(image.shape)


def _reordered(pictures: jax.Array, order: np.ndarray) -> jax.Array:
    rows, channels = len(pictures), pictures.shape[-1]
    return pictures.reshape(rows, -1, channels)[:, order].reshape(pictures.shape)


def warped(frames: jax.Array, key: jax.Array, warp: float) -> jax.Array:
    """Returns sounds as other voices would say them: all frequencies of a sound are stretched alike.

    Args:
      frames: log-mel spectrograms [B F M]; frames of zeros stay zeros.
      key: of this step.
      warp: the logarithm of a sound's stretch is uniform between -``warp`` and ``warp``.
    Source: Jaitly and Hinton 2013, "Vocal Tract Length Perturbation (VTLP) improves speech recognition".
    """
    hertz = jnp.asarray(mel_centres(frames.shape[-1]), jnp.float32)
    draw = lambda n: jax.random.uniform(key, (n, 1), minval=-warp, maxval=warp)  # noqa: E731
    from_hertz = hertz * jnp.exp(own_rows(draw, len(frames)))
    bands = jnp.interp(from_hertz, hertz, jnp.arange(len(hertz), dtype=jnp.float32))[:, None]
    low = jnp.minimum(bands.astype(jnp.int32), len(hertz) - 2)
    below, above = (jnp.take_along_axis(frames, low + i, axis=-1) for i in range(2))
    return below + (bands - low) * (above - below)
