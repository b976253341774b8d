"""Gates on heads that training opens or shuts: hard concrete ones, and the expected number of open gates.

    logits = run(model, gates({site: log_alpha}, key), **batch)
    loss = nll(logits) + weight * open_probability(log_alpha).sum()

A gate is exactly 0 or exactly 1 with positive probability, and differentiable between. Training ``log_alpha``
[L N] of a site with the model frozen, or with it, shuts heads that the loss does without.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from crossattn.nn.edits import Intervention
from crossattn.types import Array, Float, Key

TEMPERATURE, LEFT, RIGHT = 2 / 3, -0.1, 1.1
"""beta, gamma and zeta of the paper."""


def hard_concrete(
    log_alpha: Float[Array, "..."], key: Key[Array, ""] | None = None
) -> Float[Array, "..."]:
    """Draws gates in [0, 1]; without a key, returns their values at test.

    Args:
      log_alpha: logits of the gates; 0 is a gate of 0.5, large ones are open.

    Source: Louizos et al. 2018, "Learning Sparse Neural Networks through L0 Regularization", equations 10, 11
      and 13; on heads, Voita et al. 2019, "Analyzing Multi-Head Self-Attention", section 6.
    """
    logits = log_alpha
    if key is not None:
        u = jax.random.uniform(key, log_alpha.shape, minval=1e-6, maxval=1 - 1e-6)
        logits = (jnp.log(u) - jnp.log1p(-u) + log_alpha) / TEMPERATURE
    return jnp.clip(jax.nn.sigmoid(logits) * (RIGHT - LEFT) + LEFT, 0, 1)


def open_probability(log_alpha: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes the probability that a gate is not 0; the sum, the expected number, is the penalty.

    Source: Louizos et al. 2018, equation 12.
    """
    return jax.nn.sigmoid(log_alpha - TEMPERATURE * jnp.log(-LEFT / RIGHT))


def gates(
    log_alpha: Mapping[str, Float[Array, "L N"]], key: Key[Array, ""] | None = None
) -> dict[str, Intervention]:
    """Makes interventions of ``hard_concrete`` gates on heads, by site."""
    keys = [None] * len(log_alpha) if key is None else jax.random.split(key, len(log_alpha))
    by_name = sorted(log_alpha.items())  # as jit sorts them, so that a key draws the same
    return {
        name: Intervention(scale=hard_concrete(own, k))
        for (name, own), k in zip(by_name, keys, strict=True)
    }
