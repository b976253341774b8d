"""A checksum of a tree of arrays that does not depend on how they are spread over devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def checksum(tree: Any) -> int:
    """32 bits that change when any bit of any array does; the arrays stay on their devices."""
    total = 0
    for x in jax.tree.leaves(tree):
        # One by one: programs that add up over several CPU devices deadlock when they overlap.
        total = (total * 0x01000193 + int(jax.device_get(_array_sum(x)))) % 2**32
    return total


@jax.jit
def _array_sum(x: jax.Array) -> jax.Array:
    """Sum of the words, each times an odd number of its own, modulo 2**32.

    A flipped bit k of one word changes the sum by 2**k times an odd number, which is never 0.
    Integer sums come out the same in any order, so shards and processes do not matter.
    """
    x = jax.device_put(x, jax.memory.Space.Device)  # what lies with the host is not computed with
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[x.dtype.itemsize]
    if x.dtype == jnp.bool_:
        words = x.astype(jnp.uint32)
    else:
        words = jax.lax.bitcast_convert_type(x, bits).astype(jnp.uint32)
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        place = place * np.uint32(size) + index
    odd = place * np.uint32(2 * 0x9E3779B1 % 2**32) + np.uint32(0x85EBCA6B)
    return jnp.sum(words * odd, dtype=jnp.uint32)
