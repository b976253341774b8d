"""Dropout from an explicit key, its random numbers hashed from each element's index.

``jax.random.bits`` writes its numbers to memory, and on CPU that is most of what dropout costs. A hash of
the index, seeded by the key, is computed where it is used, forward and again backward, and is the same
however the array is sharded.
"""

import math

import jax
import jax.numpy as jnp

from crossattn.ops.promotion import as_written
from crossattn.rows import for_all_parts, part
from crossattn.types import Array, Bool, Float, Integer, Key

_INDICES = 1 << 32


@as_written
def keep_mask(key: Key[Array, ""], rate: float, shape: tuple[int, ...]) -> Bool[Array, "..."]:
    """Returns True with probability ``1 - rate`` (resolved to 2^-32), independently per element."""
    *lead, columns = shape or (1,)
    rows = of_whole(jnp.arange(math.prod(lead), dtype=jnp.uint32), math.prod(lead)).reshape(
        *lead, 1
    )
    return keep_block(key, rate, rows, jnp.arange(columns, dtype=jnp.uint32)).reshape(shape)


def keep_block(
    key: Key[Array, ""], rate: float, rows: Integer[Array, "..."], columns: Integer[Array, "..."]
) -> Bool[Array, "..."]:
    """Returns the part of a keep mask at these rows (all axes but the last, flattened) and columns.

    The two broadcast against each other. A kernel that works in blocks drops what one that sees the
    whole matrix drops.

    Source: the mixer "lowbias32" of Wellons 2018, "Prospecting for hash functions", first on the row,
    then on the column with the row's two words in it.
    """
    before, between = for_all_parts(lambda: jax.random.bits(key, (2,), jnp.uint32))
    rows, columns = rows.astype(jnp.uint32), columns.astype(jnp.uint32)
    first = _mixed(rows, before, between)
    second = _mixed(rows, between, before)
    return _mixed(columns, first, second) >= jnp.uint32(_threshold(rate))


def of_whole(rows: Integer[Array, "..."], count: int) -> Integer[Array, "..."]:
    """Returns the indices of a program's rows, ``count`` of them, among those of the whole batch."""
    index, parts = part()
    return rows if parts == 1 else rows + index.astype(rows.dtype) * jnp.asarray(count, rows.dtype)


@as_written
def dropout(x: Float[Array, "..."], rate: float, key: Key[Array, ""] | None) -> Float[Array, "..."]:
    """Zeroes elements with probability ``rate`` and rescales the rest; no key means no dropout.

    Source: Srivastava et al. 2014 (inverted form).
    """
    if key is None or rate == 0.0:
        return x
    keep = keep_mask(key, rate, x.shape)
    return jnp.where(keep, x * jnp.asarray(kept_scale(rate), x.dtype), 0)


def kept_scale(rate: float) -> float:
    """Returns the factor on a kept element that preserves the mean."""
    return _INDICES / (_INDICES - _threshold(rate))


def _threshold(rate: float) -> int:
    return min(round(rate * _INDICES), _INDICES - 1)


def _mixed(x: Array, before: Array, between: Array) -> Array:
    """Returns 32 bits that depend on all bits of the three."""
    x = x ^ before
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15) ^ between) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
