"""Position biases: numbers added to the scaled logits, one for each (query, key) pair and head."""

import math

import jax.numpy as jnp

from crossattn.types import AnyArray, Float, Int


def relative_buckets(
    q_positions: Int[AnyArray, "*B T"],
    k_positions: Int[AnyArray, "*B S"],
    num_buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = True,
) -> Int[AnyArray, "*B T S"]:
    """The bucket of each distance ``k_pos - q_pos``: exact when near, logarithmic when far.

    Bidirectional halves the buckets between keys before and keys after; otherwise keys after the
    query share bucket 0. Distances from ``max_distance`` on share the last bucket.

    Source: Raffel et al. 2020, "T5", section 2.1.
    """
    distance = k_positions[..., None, :] - q_positions[..., :, None]
    first = jnp.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        first = jnp.where(distance > 0, num_buckets, 0)
        distance = jnp.abs(distance)
    else:
        distance = jnp.maximum(-distance, 0)
    exact = num_buckets // 2
    ratio = jnp.maximum(distance, 1).astype(jnp.float32) / exact
    far = exact + (jnp.log(ratio) / math.log(max_distance / exact) * (num_buckets - exact)).astype(
        distance.dtype
    )
    return first + jnp.where(distance < exact, distance, jnp.minimum(far, num_buckets - 1))


def relative_bias(
    table: Float[AnyArray, "buckets N"], buckets: Int[AnyArray, "*B T S"]
) -> Float[AnyArray, "*B N T S"]:
    """Look each bucket up in a learnt table, one column a head."""
    return jnp.moveaxis(table[buckets], -1, -3)


def alibi_slopes(num_heads: int) -> Float[AnyArray, " N"]:
    """Geometric slopes 2**(-8/n), 2**(-16/n), ...; odd ones of the next power of two fill up.

    Source: Press et al. 2022, "ALiBi", section 3 and its reference implementation.
    """
    whole = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    slopes += [2 ** (-4 * (2 * i + 1) / whole) for i in range(num_heads - whole)]
    return jnp.asarray(slopes, jnp.float32)


def alibi(
    q_positions: Int[AnyArray, "*B T"], k_positions: Int[AnyArray, "*B S"], num_heads: int
) -> Float[AnyArray, "*B N T S"]:
    """``-slope * |q_pos - k_pos|``; symmetric, so it serves causal and full attention."""
    distance = jnp.abs(q_positions[..., :, None] - k_positions[..., None, :])
    return -alibi_slopes(num_heads)[:, None, None] * distance[..., None, :, :]
