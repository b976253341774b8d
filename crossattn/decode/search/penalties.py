"""Penalties of beam search: of length, and of source words that no target word attended to."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from crossattn.decode.capture import Capture
from crossattn.types import Array, Bool, Float

Penalty = Callable[[Any], Any]
"""Function from a number of tokens to the divisor of log p."""


def gnmt(alpha: float) -> Penalty:
    """Returns ``((5 + n) / 6) ** alpha``. Source: Wu et al. 2016, "GNMT", equation 14."""
    return lambda n: ((5.0 + n) / 6.0) ** alpha


def power(alpha: float) -> Penalty:
    """Returns ``n ** alpha``, the penalty of ``transformers`` and fairseq; 1 is the mean log-probability."""
    return lambda n: (1.0 * n) ** alpha


@dataclass(frozen=True)
class Coverage:
    """Cost of source words that no target word attended to, added to the score of a finished hypothesis.

    ``beta * sum_s log(min(sum_t a[t, s], 1))``, where a is the mean of the heads of ``attention``.

    Source: Wu et al. 2016, equation 14.
    """

    beta: float
    attention: Capture = Capture(layers=(-1,))

    def cost(
        self, covered: Float[Array, "B C S"], valid: Bool[Array, "B S"]
    ) -> Float[Array, "B C"]:
        """Computes the cost, at most 0, from the sum of attention over the tokens so far."""
        missed = jnp.log(jnp.clip(covered, 1e-6, 1.0))
        return self.beta * jnp.sum(jnp.where(valid[:, None], missed, 0.0), axis=-1)
