"""Positions, ids and lengths, which are int32 wherever this package counts with them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossattn.types import AnyArray, Array, Int

LOWEST, HIGHEST = -(2**31), 2**31 - 1


def as_int32(name: str, x: Any) -> Any:
    """Returns integers as an int32 array; plain numbers, symbols of lengths and None as they are.

    Narrow and unsigned ones would wrap in the first sum or difference.

    Raises:
      ValueError: it is a list or a tuple; it holds other numbers than integers; or one that int32 does not
        hold, where that is known before the program runs.
    """
    if x is None:
        return None
    if isinstance(x, (list, tuple)):
        raise ValueError(f"{name} is a {type(x).__name__}; expected an array, jnp.asarray({x!r}).")
    dtype = jnp.result_type(x)
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"{name} has dtype {dtype}; expected integers.")
    is_array = hasattr(x, "dtype")
    wide = is_array and jnp.iinfo(x.dtype).max > HIGHEST and not isinstance(x, jax.core.Tracer)
    if wide or isinstance(x, int):
        known = np.asarray(x)
        if known.size and not LOWEST <= known.min() <= known.max() <= HIGHEST:
            raise ValueError(
                f"{name} goes from {known.min()} to {known.max()}; expected integers that int32 holds."
            )
    return x.astype(jnp.int32) if is_array else x


def moved(positions: Int[AnyArray, "..."], by: int) -> Int[Array, "..."]:
    """Returns ``positions + by``, clipped to int32."""
    if by == 0:
        return jnp.asarray(positions)
    return jnp.clip(positions, LOWEST - min(by, 0), HIGHEST - max(by, 0)) + by
