"""Absolute positions: the fixed sinusoids added to embeddings."""

import functools
import math

import jax.numpy as jnp
import numpy as np

from crossattn.ops.promotion import as_written
from crossattn.types import AnyArray, Array, Float, Int


@as_written
def sinusoidal(
    positions: Int[AnyArray, "*B T"], dim: int, max_wavelength: float = 10000.0
) -> Float[Array, "*B T D"]:
    """Returns sines (first half of the features) and cosines (second half) of the positions.

    Feature i has wavelength ``2 pi max_wavelength ** (i / (dim / 2))``. The halves stand side by side
    instead of interleaved, which is the same up to a permutation of features. Of an odd number of features
    one more is a sine, as in the models of Marian.

    Source: Vaswani et al. 2017, section 3.5.
    """
    frequencies = inverse_wavelengths(dim / 2, max_wavelength)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles[..., : dim // 2])], axis=-1)


@functools.lru_cache(maxsize=8)
def sinusoid_table(count: int, dim: int) -> Float[np.ndarray, "count dim"]:
    """Returns float64 sinusoids of the first positions, on the host, as checkpoints store them."""
    half = (dim + 1) // 2
    angles = np.arange(count)[:, None] / np.power(10000, 2 * np.arange(half) / dim)
    table = np.concatenate([np.sin(angles), np.cos(angles[:, : dim // 2])], axis=1)
    table.flags.writeable = False
    return table


def inverse_wavelengths(
    count: int | float, max_wavelength: float | Float[AnyArray, ""]
) -> Float[AnyArray, " n"]:
    """Returns angular frequencies ``max_wavelength ** (-i / count)``, i < count."""
    return max_wavelength ** (-jnp.arange(math.ceil(count), dtype=jnp.float32) / count)
