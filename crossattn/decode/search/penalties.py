"""How beam search compares hypotheses of unlike length, and translations that left words out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from crossattn.decode.capture import Capture
from crossattn.types import Array, Bool, Float

Penalty = Callable[[Any], Any]
"""From a number of tokens to what log p is divided by."""


def gnmt(alpha: float) -> Penalty:
    """``((5 + n) / 6) ** alpha``. Source: Wu et al. 2016, "GNMT", equation 14."""
    return lambda n: ((5.0 + n) / 6.0) ** alpha


def power(alpha: float) -> Penalty:
    """``n ** alpha``, that of ``transformers`` and fairseq; 1 is the mean log-probability."""
    return lambda n: (1.0 * n) ** alpha


@dataclass(frozen=True)
class Coverage:
    """A cost for source words that no target word attended to, added to a finished hypothesis's score.

    ``beta * sum_s log(min(sum_t a[t, s], 1))``, a being the mean of the heads that ``attention`` names.

    Source: Wu et al. 2016, equation 14.
    """

    beta: float
    attention: Capture = Capture(layers=(-1,))

    def cost(
        self, covered: Float[Array, "B C S"], valid: Bool[Array, "B S"]
    ) -> Float[Array, "B C"]:
        """At most 0. ``covered`` is the sum of attention over the tokens so far."""
        missed = jnp.log(jnp.clip(covered, 1e-6, 1.0))
        return self.beta * jnp.sum(jnp.where(valid[:, None], missed, 0.0), axis=-1)
