"""Stopping rules of beam search."""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

from crossattn.decode.search.penalties import Penalty
from crossattn.types import Array, Bool, Float


@dataclass(frozen=True)
class Stopping:
    """Rule by which a row stops once it has J finished hypotheses.

    Attributes:
      bound: bound on the score of a live prefix, which must exceed the worst finished one. "best": over all
        lengths, so that stopping changes nothing. "now": at its present length. "nothing": stop at once.
      among_beams: only the J best candidates of a step may end, rather than all of them.
    """

    bound: Literal["best", "now", "nothing"] = "best"
    among_beams: bool = False

    def open(
        self,
        live: Float[Array, "*B J"],
        done: Float[Array, "*B J"],
        filled: Bool[Array, "*B"],
        length: Float[Array, ""],
        longest: Float[Array, "..."],
        penalty: Penalty,
    ) -> Bool[Array, "*B"]:
        """Returns which rows continue, after prefixes of ``length`` tokens.

        Args:
          live, done: log-probabilities of prefixes, and scores of finished hypotheses, best first.
          filled: whether there are J finished ones.
          longest: largest length of a hypothesis.
        """
        if self.bound == "nothing":
            return ~filled
        divisor = penalty(length)
        if self.bound == "best":
            divisor = jnp.maximum(divisor, penalty(longest))
        return ~filled | (live.max(-1) / divisor > done[..., -1])


EXACT = Stopping()
"""Rule that stops a row when no live prefix can still beat its worst finished hypothesis."""


def transformers(
    early_stopping: bool | Literal["never"] = False, length_penalty: float = 1.0
) -> Stopping:
    """Returns the rule of ``generate`` in ``transformers``, for the same hypotheses token by token.

    The length penalty must then be ``penalties.power(length_penalty)``.
    """
    if early_stopping is True:
        return Stopping("nothing", among_beams=True)
    longest = early_stopping == "never" and length_penalty > 0
    return Stopping("best" if longest else "now", among_beams=True)
