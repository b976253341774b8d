"""Beams that share one cache and read each other's slots, so that no cache is copied or reordered.

The J beams of a row are folded into one sequence, position after position and beam after beam, [B (T J) D].
So they fill J slots a position, slot ``position * J + beam``; the mask says which are the past of which beam.
"""

import jax.numpy as jnp

from crossattn.ops import masks
from crossattn.ops.masks import Mask
from crossattn.types import AnyArray, Array, Float, Int


def fold(x: Float[Array, "*B J T D"]) -> Float[Array, "*B T_J D"]:
    """Returns all beams of a row as one sequence."""
    x = jnp.swapaxes(x, -3, -2)
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


def unfold(x: Float[Array, "*B T_J D"], num_beams: int) -> Float[Array, "*B J T D"]:
    """Returns the inverse of ``fold``."""
    return jnp.swapaxes(x.reshape(*x.shape[:-2], -1, num_beams, x.shape[-1]), -3, -2)


def unfold_weights(
    weights: Float[Array, "*B N T_J S"], num_beams: int
) -> Float[Array, "*B J N T S"]:
    """Returns attention weights of folded queries, beam by beam."""
    return jnp.moveaxis(unfold(weights, num_beams), -3, -4)


def fold_mask(
    mask: Mask,
    bias: Float[Array, "..."] | None,
    ancestors: Int[AnyArray, "*B J X"],
    queries: int,
) -> tuple[Mask, Float[Array, "..."] | None]:
    """Returns mask [*B #N (T J) (X J)] and bias of all beams of a row, folded.

    Args:
      mask: which of T queries may read which of X positions, the same for every beam, [*#B #N #T #X].
      bias: the same for every beam, [*#B #N T X]; or None.
      ancestors: the beam whose slot each beam reads at each position.
      queries: T, of each beam.
    """
    J, X = ancestors.shape[-2:]
    T = queries
    own = ancestors[..., None] == jnp.arange(J)  # [*B J X J]
    allowed = mask.block(jnp.arange(T), jnp.arange(X))
    allowed = allowed[..., :, None, :, None] & own[..., None, None, :, :, :]  # [*B N T J X J]
    allowed = jnp.broadcast_to(allowed, (*allowed.shape[:-4], T, J, X, J))
    folded = Mask((masks.Explicit(allowed.reshape(*allowed.shape[:-4], T * J, X * J)),))
    if bias is not None:
        bias = jnp.broadcast_to(bias[..., :, None, :, None], (*bias.shape[:-2], T, J, X, J))
        bias = bias.reshape(*bias.shape[:-4], T * J, X * J)
    return folded, bias
