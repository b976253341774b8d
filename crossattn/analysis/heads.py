"""Numbers that tell heads apart, [L N] each, from ``attention_stats``: no matrix of weights is needed.

_, found = interventions.run(model, None, **batch, capture=["decoder.cross.stats"])
numbers = of_heads(found["decoder.cross.stats"])
"""

from typing import Any

import jax.numpy as jnp

from crossattn.ops.blockwise.stats import AttentionStats
from crossattn.types import AnyArray, Array, Bool, Float

SHARP = 0.5
"""A query is linked to a key that has more than this share of its weight."""


def of_heads(
    stats: AttentionStats,
    valid: Bool[AnyArray, "B S"] | None = None,
    queries: Bool[AnyArray, "B T"] | None = None,
) -> dict[str, Float[Array, "L N"]]:
    """Summarises each head over the queries that read anything.

    entropy: of the weights, in nats, the mean over queries. first, last: the share of all weight on the first
    key and on the last one that is read, such as a beginning or an end. padding: on keys that are not
    ``valid``. diagonality: 1 less the mean distance of where a query looks from where it stands, both as
    shares of their lengths. links: the share of queries with more than half of their weight on one key.

    Args:
      stats: of all layers, [L *B N T] and [L *B N S].
      valid: keys that are not padding; None leaves "padding" out.
      queries: those that are not padding; None counts all that read anything. Shares of keys are of all
        queries that read them.
    """
    reads = jnp.isfinite(stats.lse)  # [L B N T]
    asks = reads if queries is None else reads & jnp.asarray(queries)[..., None, :]
    count = asks.sum(-1, keepdims=True)
    S = stats.mass.shape[-1]
    read = stats.mass > 0
    end = jnp.where(read, jnp.arange(S), 0).max(-1, keepdims=True)
    place = (jnp.cumsum(asks, -1) - 1) / jnp.maximum(count - 1, 1)
    off = jnp.abs(stats.expected / jnp.maximum(end, 1) - place)
    of_queries = {
        "entropy": jnp.where(asks, stats.entropy, 0),
        "diagonality": jnp.where(asks, 1 - off, 0),
        "links": asks & (stats.maximum > SHARP),
    }
    of_keys = {
        "first": stats.mass[..., :1],
        "last": jnp.take_along_axis(stats.mass, end, -1),
    }
    if valid is not None:
        of_keys["padding"] = jnp.where(jnp.asarray(valid)[..., None, :], 0, stats.mass)
    return {
        name: _summed(x) / jnp.maximum(_summed(counted), 1)
        for found, counted in ((of_queries, asks), (of_keys, reads))
        for name, x in found.items()
    }


def _summed(x: Any) -> Array:
    """Sums [L *B N T] to [L N]."""
    return x.sum((*range(1, x.ndim - 2), x.ndim - 1))
