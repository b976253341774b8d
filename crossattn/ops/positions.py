"""Absolute positions: the fixed sinusoids added to embeddings."""

import jax.numpy as jnp

from crossattn.types import AnyArray, Float, Int


def sinusoidal(
    positions: Int[AnyArray, "*B T"], dim: int, max_wavelength: float = 10000.0
) -> Float[AnyArray, "*B T D"]:
    """Sines (first half of the features) and cosines (second half) of the positions.

    Feature i has wavelength ``2 pi max_wavelength ** (i / (dim / 2))``. The halves stand side by side
    instead of interleaved, which is the same up to a permutation of features.

    Raises:
      ValueError: ``dim`` is odd.
    Source: Vaswani et al. 2017, section 3.5.
    """
    if dim % 2:
        raise ValueError(f"sinusoidal: dim is {dim}; expected an even number.")
    frequencies = inverse_wavelengths(dim // 2, max_wavelength)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def inverse_wavelengths(count: int, max_wavelength: float) -> Float[AnyArray, " count"]:
    """Angular frequencies ``max_wavelength ** (-i / count)``, shared by sinusoids and rotations."""
    return max_wavelength ** (-jnp.arange(count, dtype=jnp.float32) / count)
