"""Beams that read each other's caches, so that no cache is copied when beams are reordered.

The caches of a row's J beams become one memory of J * S slots, which all its beams read; the mask says
which slots are the past of which beam. Every key is still read once a row, as it would be without.
"""

import jax
import jax.numpy as jnp

from crossattn.ops.masks import Mask, explicit
from crossattn.ops.memory import Memory
from crossattn.types import Array, Float


def read_across_beams(
    memory: Memory, mask: Mask, bias: Float[Array, "..."] | None, queries: int
) -> tuple[Memory, Mask, Float[Array, "..."] | None]:
    """One memory [*B (J S) K H] for all beams of a row, its mask [*B 1 (J T) (J S)], its bias.

    Args:
      memory: a cache [*B J S K H] with ``ancestors`` [*B J S].
      mask: which query may read which slot of its own past, validity included.
      bias: the same for every beam, [*#B N T S]; or None.
      queries: T, of each beam.
    """
    assert memory.ancestors is not None
    *batch, J, S = memory.ancestors.shape
    T = queries
    allowed = mask.block(jnp.arange(T), jnp.arange(S))
    allowed = jnp.broadcast_to(allowed, (*batch, J, 1, T, S)).reshape(*batch, J, T, 1, S)
    own = memory.ancestors[..., None, :] == jnp.arange(J)[:, None]  # [*B J J S]
    allowed = (allowed & own[..., None, :, :]).reshape(*batch, 1, J * T, J * S)
    if bias is not None:
        lead = bias.shape[:-2]
        bias = jnp.broadcast_to(bias[..., None, :, None, :], (*lead, J, T, J, S))
        bias = bias.reshape(*lead, J * T, J * S)
    # Without the barrier XLA fuses the write of the newest slot into this reshape and into the loop's
    # own result, each with a copy of the whole cache.
    whole = jax.lax.optimization_barrier((memory.keys, memory.values))
    keys, values = (x.reshape(*batch, J * S, *x.shape[-2:]) for x in whole)
    return Memory(keys, values), explicit(allowed), bias
