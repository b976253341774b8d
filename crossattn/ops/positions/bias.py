"""Position biases: numbers added to the scaled logits, one for each (query, key) pair and head."""

import functools
import math

import jax.numpy as jnp
import numpy as np

from crossattn.ops.integers import as_int32
from crossattn.ops.promotion import as_written
from crossattn.types import AnyArray, Array, Float, Int


@as_written
def relative_buckets(
    q_positions: Int[AnyArray, "*B T"],
    k_positions: Int[AnyArray, "*B S"],
    num_buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = True,
) -> Int[Array, "*B T S"]:
    """Returns the bucket of each distance ``k_pos - q_pos``: exact when near, logarithmic when far.

    Bidirectional halves the buckets between keys before and keys after; otherwise keys after the
    query share bucket 0. Distances from ``max_distance`` on share the last bucket.

    Raises:
      ValueError: as ``check_buckets`` does.
    Source: Raffel et al. 2020, "T5", section 2.1.
    """
    exact = check_buckets(num_buckets, max_distance, bidirectional)
    distance = _distance(q_positions, k_positions)
    own, first = num_buckets, jnp.zeros_like(distance)
    if bidirectional:
        own = num_buckets // 2
        first = jnp.where(distance > 0, own, 0).astype(distance.dtype)
        distance = jnp.abs(distance)
    else:
        distance = jnp.maximum(-distance, 0)
    starts = np.reshape(_starts(exact, own, max_distance), (1,) * distance.ndim + (-1,))
    passed = jnp.sum(
        distance[..., None] >= jnp.asarray(starts, distance.dtype), axis=-1, dtype=distance.dtype
    )
    return first + jnp.where(distance < exact, distance, exact + passed)


def check_buckets(num_buckets: int, max_distance: int, bidirectional: bool) -> int:
    """Returns the number of distances, from 0 on, that have a bucket of their own.

    Raises:
      ValueError: there is no bucket for them, or ``max_distance`` is among them.
    """
    exact = num_buckets // (4 if bidirectional else 2)
    if exact < 1 or max_distance <= exact:
        raise ValueError(
            f"relative_buckets is {num_buckets} and relative_distance {max_distance}; expected at least "
            f"{4 if bidirectional else 2}, and a distance above the {exact} that have buckets of their own."
        )
    return exact


@functools.lru_cache
def _starts(exact: int, buckets: int, max_distance: int) -> tuple[int, ...]:
    """Returns the distances at which the buckets after the exact ones begin.

    A boundary between buckets falls on a whole distance where a power of it is one of ``max_distance``,
    and there rounding decides. Trained models were rounded in float32, so that is done here, once, with
    numpy: what a compiler makes of a logarithm, and with which operations it fuses it, is its own affair.
    """
    count, most = buckets - 1 - exact, np.iinfo(np.int32).max
    steps = np.arange(1, count + 1)

    def taken(distance: np.ndarray) -> np.ndarray:
        ratio = distance.astype(np.float32) / np.float32(exact)
        # A float64 logarithm rounds to the right float32 one on every machine.
        share = np.log(ratio.astype(np.float64)).astype(np.float32)
        share = share / np.float32(math.log(max_distance / exact))
        return np.trunc(share * np.float32(buckets - exact))

    low, high = np.full(count, exact), np.full(count, most)
    while np.any(low < high):
        middle = (low + high) // 2
        reached = taken(middle) >= steps
        low, high = np.where(reached, low, middle + 1), np.where(reached, middle, high)
    return tuple(int(start) for start in low if start < most)


@as_written
def relative_bias(
    table: Float[AnyArray, "buckets N"], buckets: Int[AnyArray, "*B T S"]
) -> Float[Array, "*B N T S"]:
    """Looks each bucket up in a learnt table, one column a head; NaN for one that the table lacks."""
    bias = jnp.asarray(table).at[buckets].get(mode="fill", fill_value=jnp.nan)
    return jnp.moveaxis(bias, -1, -3)


def alibi_slopes(num_heads: int) -> Float[Array, " N"]:
    """Returns geometric slopes 2**(-8/n), 2**(-16/n), ...; odd ones of the next power of two fill up.

    Source: Press et al. 2022, "ALiBi", section 3 and its reference implementation.
    """
    whole = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    slopes += [2 ** (-4 * (2 * i + 1) / whole) for i in range(num_heads - whole)]
    return jnp.asarray(slopes, jnp.float32)


@as_written
def alibi(
    q_positions: Int[AnyArray, "*B T"], k_positions: Int[AnyArray, "*B S"], num_heads: int
) -> Float[Array, "*B N T S"]:
    """Returns ``-slope * |q_pos - k_pos|``; symmetric, so it serves causal and full attention."""
    distance = jnp.abs(_distance(q_positions, k_positions))
    return -alibi_slopes(num_heads)[:, None, None] * distance[..., None, :, :]


def _distance(
    q_positions: Int[AnyArray, "*B T"], k_positions: Int[AnyArray, "*B S"]
) -> Int[Array, "*B T S"]:
    q, k = as_int32("q_positions", q_positions), as_int32("k_positions", k_positions)
    return jnp.asarray(k)[..., None, :] - q[..., :, None]
