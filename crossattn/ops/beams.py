"""Beams that grow one cache together and read each other's slots, so that none is copied or reordered.

The J beams of a row write J slots for each position, beam after beam: slot ``position * J + beam``. All
its beams read that one memory, once; the mask says which slots are the past of which beam.
"""

import math

import jax.numpy as jnp

from crossattn.ops import masks
from crossattn.ops.masks import Mask
from crossattn.ops.memory import Memory
from crossattn.types import Array, Bool, Float, Shaped


def grow(
    cache: Memory, keys: Shaped[Array, "*B X K H"], values: Shaped[Array, "*B X K Hv"]
) -> Memory:
    """The cache with new slots appended, one a position.

    With a batch axis that the cache lacks, [*B J X K H], they are J a position.

    Raises:
      ValueError: as ``Memory.append`` does.
    """
    shared = cache.keys.ndim - 3
    extra = keys.shape[shared:-3]
    if not extra or cache.length is None:
        return cache.append(keys, values)
    J, X = math.prod(extra), keys.shape[-3]

    def in_order(x: Array) -> Array:
        x = x.reshape(*x.shape[:shared], J, *x.shape[-3:])
        return jnp.moveaxis(x, shared, -3).reshape(*x.shape[:shared], X * J, *x.shape[-2:])

    positions = None
    if cache.positions is not None:
        positions = cache.length // J + jnp.repeat(jnp.arange(X), J)
    return cache.append(in_order(keys), in_order(values), positions=positions)


def across(
    cache: Memory, mask: Mask, bias: Float[Array, "..."] | None, beams: int, queries: int
) -> tuple[Mask, Float[Array, "..."] | None]:
    """The mask [*#B 1 (J T) (X J)] and the bias of all beams of a row, whose queries follow each other.

    Args:
      cache: [*B (X J) K H], grown by J beams.
      mask: which of T queries may read which of X positions, the same for every beam, [*#B #N #T #X].
      bias: the same for every beam, [*#B N T X]; or None.
      beams: J.
      queries: T, of each beam.
    """
    J, T, X = beams, queries, cache.size // beams
    if cache.ancestors is None:
        own = jnp.eye(J, dtype=bool)[:, None, :]  # [J X=1 J]
    else:
        own = cache.ancestors[..., None] == jnp.arange(J)  # [*B J X J]
    allowed = mask.block(jnp.arange(T), jnp.arange(X))
    allowed = allowed[..., None, :, :, None] & own[..., None, :, None, :, :]
    allowed = jnp.broadcast_to(allowed, (*allowed.shape[:-4], J, T, X, J))
    # What is not filled yet is not even looked at.
    filled = Mask(()) if cache.length is None else masks.lengths(cache.length)
    whole = filled & Mask((masks.Explicit(_flat(allowed)),))
    if bias is not None:
        bias = _flat(jnp.broadcast_to(bias[..., None, :, :, None], (*bias.shape[:-2], J, T, X, J)))
    return whole, bias


def repeated(
    mask: Mask, bias: Float[Array, "..."] | None, beams: int, queries: int, keys: int
) -> tuple[Mask, Float[Array, "..."] | None]:
    """The mask and the bias of T queries, for J times T that read the same keys, one T after the other.

    Args:
      mask: which of T queries may read which key, the same for every beam, [*#B #N #T #S].
      bias: the same for every beam, [*#B #N #T #S]; or None.
      beams: J.
      queries: T, of each beam.
      keys: S.
    """

    def times(x: Array) -> Array:
        return x if x.shape[-2] == 1 else jnp.concatenate([x] * beams, axis=-2)

    if mask.terms:
        allowed = mask.block(jnp.arange(queries), jnp.arange(keys))
        mask = mask if allowed.shape[-2] == 1 else Mask((masks.Explicit(times(allowed)),))
    return mask, None if bias is None else times(bias)


def _flat(x: Bool[Array, "*B J T X J"] | Float[Array, "*B J T X J"]) -> Array:
    J, T, X, _ = x.shape[-4:]
    return x.reshape(*x.shape[:-4], J * T, X * J)


__all__ = ["across", "grow", "repeated"]
