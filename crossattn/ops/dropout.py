"""Dropout from an explicit key, with half the random bits of ``jax.random.bernoulli``.

A 32-bit draw decides two elements. On CPU the generator is what dropout costs, so this halves it.
"""

import jax
import jax.numpy as jnp

from crossattn.types import Array, Bool, Float, Key


def keep_mask(key: Key[Array, ""], rate: float, shape: tuple[int, ...]) -> Bool[Array, "..."]:
    """True with probability ``1 - rate`` (resolved to 1/65536), independently per element."""
    size = 1
    for n in shape:
        size *= n
    draws = jax.random.bits(key, ((size + 1) // 2,), jnp.uint32)
    # Low halves first, then high halves: contiguous, so XLA writes each with one plain loop.
    halves = jnp.concatenate([draws & 0xFFFF, draws >> 16])[:size]
    return (halves >= _threshold(rate)).reshape(shape)


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
    return 65536 / (65536 - _threshold(rate))


def _threshold(rate: float) -> int:
    return min(round(rate * 65536), 65535)
