"""Top-k of many logits and draws from them, faster than by sorting.

XLA's sort, ``top_k`` and Gumbel noise over a vocabulary cost a CPU more than a small model's whole step.
"""

import jax
import jax.numpy as jnp

from crossattn.types import Array, Float, Int

_BLOCK = 64


def top_k(x: Float[Array, "*B V"], k: int) -> tuple[Float[Array, "*B C"], Int[Array, "*B C"]]:
    """Computes ``lax.top_k``, ties included: the k largest lie in the k blocks of largest maxima."""
    V = x.shape[-1]
    if V < 4 * _BLOCK or k * _BLOCK > V // 2:
        values, indices = jax.lax.top_k(x, min(k, V))
        return values, indices
    blocks = _blocks(x, -jnp.inf)
    _, best = jax.lax.top_k(blocks.max(-1), k)
    best = jnp.sort(best, axis=-1)  # the first of equal values is to win
    candidates = jnp.take_along_axis(blocks, best[..., None], axis=-2)
    values, indices = jax.lax.top_k(candidates.reshape(*x.shape[:-1], -1), k)
    block = jnp.take_along_axis(best, indices // _BLOCK, axis=-1)
    return values, block * _BLOCK + indices % _BLOCK


def draw(logits: Float[Array, "*B V"], uniform: Float[Array, "*B"]) -> Int[Array, "*B"]:
    """Draws a token from ``softmax(logits)`` by a number uniform in [0, 1): first its block, then itself.

    One random number a row instead of V, which would take most of the time.
    """
    peak = logits.max(-1, keepdims=True)
    mass = _blocks(jnp.exp(logits - peak), 0.0)
    block, rest = _invert(mass.sum(-1), uniform)
    within = jnp.take_along_axis(mass, block[..., None, None], axis=-2)[..., 0, :]
    index, _ = _invert(within, rest)
    return jnp.minimum(block * mass.shape[-1] + index, logits.shape[-1] - 1).astype(jnp.int32)


def _invert(
    mass: Float[Array, "*B n"], uniform: Float[Array, "*B"]
) -> tuple[Int[Array, "*B"], Float[Array, "*B"]]:
    """Returns the bin at which a share ``uniform`` of the mass ends, and how far into it, in [0, 1)."""
    below = jnp.cumsum(mass, axis=-1)
    wanted = uniform[..., None] * below[..., -1:]
    # Rounding of the partial sums must not choose a bin without mass.
    bins, n = jnp.arange(mass.shape[-1]), mass.shape[-1]
    first = jnp.min(jnp.where((below > wanted) & (mass > 0), bins, n), axis=-1)
    last = jnp.max(jnp.where(mass > 0, bins, 0), axis=-1)
    chosen = jnp.minimum(first, last)
    own = jnp.take_along_axis(mass, chosen[..., None], axis=-1)
    end = jnp.take_along_axis(below, chosen[..., None], axis=-1)
    return chosen, jnp.clip((wanted - (end - own)) / own, 0.0, 1.0)[..., 0]


def _blocks(x: Float[Array, "*B V"], fill: float) -> Float[Array, "*B n b"]:
    V = x.shape[-1]
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -V % _BLOCK)]
    x = jnp.pad(x, padding, constant_values=fill)
    return x.reshape(*x.shape[:-1], -1, _BLOCK)
