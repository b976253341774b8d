"""Training pictures as they might also have been: mirrored, and shifted by a few pixels.

It is a part of the jitted step and follows from its key, so a run that is killed and
started again sees the same pictures.
"""

import jax
import jax.numpy as jnp

from crossattn.rows import own_rows


def augmented(image: jax.Array, key: jax.Array, *, flip: bool = False, shift: int = 0) -> jax.Array:
    """Pictures [B H W C] of the same size, each changed by chance.

    Args:
      image: [B H W C].
      key: of this step.
      flip: half of them are mirrored, left to right.
      shift: the most pixels by which each is moved down or up, left or right; edges are repeated.
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
