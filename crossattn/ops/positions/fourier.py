"""Fourier features of places on a grid: where a pixel, a frame or a voxel stands, as sines and cosines.

An axis goes from -1 to 1 whatever its length, so a picture of another size is the
same picture at another resolution.
"""

import functools
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from crossattn.types import Array, Float


def fourier(
    shape: Sequence[int], bands: int, resolution: Sequence[int] | None = None
) -> Float[Array, "*shape F"]:
    """Returns features of every place of a grid: its place on each axis, all sines, then all cosines.

    An axis has ``bands`` frequencies in equal steps from 1 to half its resolution: with frequency f at place
    x, ``sin(pi f x)`` and ``cos(pi f x)``. F is ``fourier_dim``.

    Args:
      shape: places on each axis.
      bands: frequencies of each axis.
      resolution: places on each axis at which the highest frequency is that of Nyquist; None is ``shape``.

    Raises:
      ValueError: there is no axis, no place or no band, or ``resolution`` has other axes than ``shape``.
    Source: Jaegle et al. 2021, "Perceiver", section 3.2 and appendix D.
    """
    resolution = shape if resolution is None else resolution
    if not shape or min(shape) < 1 or bands < 1 or len(resolution) != len(shape):
        raise ValueError(
            f"fourier: shape is {tuple(shape)}, bands {bands} and resolution {tuple(resolution)}; expected "
            "one place or more on every axis, one band or more, and as many axes in both."
        )
    # Only the tables of the axes are constants of a program; the grid, which is large, is made in it.
    tables = [_axis(count, bands, most) for count, most in zip(shape, resolution, strict=True)]
    places, sines, cosines = (
        [_spread(table[kind], axis, shape) for axis, table in enumerate(tables)]
        for kind in range(3)
    )
    return jnp.concatenate([*places, *sines, *cosines], axis=-1)


def fourier_dim(axes: int, bands: int) -> int:
    """Returns the number of features that ``fourier`` gives for so many axes, F."""
    return axes * (2 * bands + 1)


@functools.lru_cache(maxsize=32)
def _axis(count: int, bands: int, resolution: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns places [count 1], sines and cosines [count bands] of one axis, computed in float64."""
    places = np.linspace(-1.0, 1.0, count)[:, None]
    angles = math.pi * places * np.linspace(1.0, resolution / 2, bands)
    tables = places, np.sin(angles), np.cos(angles)
    return tuple(table.astype(np.float32) for table in tables)  # pyright: ignore[reportReturnType]


def _spread(table: np.ndarray, axis: int, shape: Sequence[int]) -> Array:
    """Broadcasts along the other axes: [shape[axis] F] -> [*shape F]."""
    lead = [1] * len(shape)
    lead[axis] = shape[axis]
    own = jnp.asarray(table).reshape(*lead, table.shape[-1])
    return jnp.broadcast_to(own, (*shape, table.shape[-1]))
