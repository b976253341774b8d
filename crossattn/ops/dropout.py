"""Dropout from an explicit key, its random numbers hashed from each element's index.

``jax.random.bits`` writes its numbers to memory, and on CPU that is most of what dropout costs. A hash of
the index, seeded by the key, is computed where it is used, forward and again backward, and is the same
however the array is sharded.
"""

import math

import jax
import jax.numpy as jnp

from crossattn.types import Array, Bool, Float, Key

_INDICES = 1 << 32


def keep_mask(key: Key[Array, ""], rate: float, shape: tuple[int, ...]) -> Bool[Array, "..."]:
    """True with probability ``1 - rate`` (resolved to 2^-32), independently per element."""
    return _bits(key, shape) >= jnp.uint32(_threshold(rate))


def dropout(x: Float[Array, "..."], rate: float, key: Key[Array, ""] | None) -> Float[Array, "..."]:
    """Zero elements with probability ``rate`` and rescale the rest; no key means no dropout.

    Source: Srivastava et al. 2014 (inverted form).
    """
    if key is None or rate == 0.0:
        return x
    keep = keep_mask(key, rate, x.shape)
    return jnp.where(keep, x * jnp.asarray(kept_scale(rate), x.dtype), 0)


def kept_scale(rate: float) -> float:
    """What a kept element is multiplied by, so that the mean stays."""
    return _INDICES / (_INDICES - _threshold(rate))


def _threshold(rate: float) -> int:
    return min(round(rate * _INDICES), _INDICES - 1)


def _bits(key: Key[Array, ""], shape: tuple[int, ...]) -> Array:
    """32 random bits for each element.

    Source: the mixer "lowbias32" of Wellons 2018, "Prospecting for hash functions", with a word of the
    key before each of its multiplications.
    """
    size = math.prod(shape)
    if size > _INDICES:
        return jax.random.bits(key, shape, jnp.uint32)
    before, between = jax.random.bits(key, (2,), jnp.uint32)
    x = jax.lax.iota(jnp.uint32, size).reshape(shape) ^ before
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15) ^ between) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
