"""Rotary positions: rotate queries and keys so that their product depends on distance only."""

import jax.numpy as jnp

from crossattn.ops.positions.sinusoids import inverse_wavelengths
from crossattn.ops.promotion import as_written
from crossattn.types import AnyArray, Array, Float, Int


@as_written
def rotate(
    x: Float[AnyArray, "*B T N H"], positions: Int[AnyArray, "*#B T"], base: float = 10000.0
) -> Float[Array, "*B T N H"]:
    """Rotate feature pairs (i, i + H/2) of each head by ``position * base ** (-2 i / H)``.

    Raises:
      ValueError: the head size is odd.
    Source: Su et al. 2021, "RoFormer", equation 34.
    """
    half = x.shape[-1] // 2
    if x.shape[-1] % 2:
        raise ValueError(f"rotate: head size is {x.shape[-1]}; expected an even number.")
    angles = positions[..., None, None].astype(jnp.float32) * inverse_wavelengths(half, base)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = x[..., :half], x[..., half:]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
