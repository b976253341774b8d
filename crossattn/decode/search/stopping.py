"""When a row of beams has found enough, and which of its candidates may end."""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

from crossattn.decode.search.penalties import Penalty
from crossattn.types import Array, Bool, Float


@dataclass(frozen=True)
class Stopping:
    """The rule by which a row stops once it has J finished hypotheses.

    Attributes:
      bound: what a live prefix may still be worth. "best": the most that any length allows, so that
        stopping changes nothing. "now": its worth at its present length. "nothing": stop at once.
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
        """Which rows go on, after prefixes of ``length`` tokens; log-probabilities only fall.

        Args:
          live, done: log-probabilities of prefixes, and what finished hypotheses are worth, best first.
          filled: whether there are J finished ones.
          longest: the length of the longest hypothesis allowed.
        """
        if self.bound == "nothing":
            return ~filled
        divisor = penalty(length)
        if self.bound == "best":
            divisor = jnp.maximum(divisor, penalty(longest))
        return ~filled | (live.max(-1) / divisor > done[..., -1])


EXACT = Stopping()
"""A row stops when no live prefix can still beat its worst finished hypothesis."""


def transformers(
    early_stopping: bool | Literal["never"] = False, length_penalty: float = 1.0
) -> Stopping:
    """The rule of ``generate`` in ``transformers``, for the same hypotheses token by token.

    Goes with ``penalties.power(length_penalty)`` as the length penalty.
    """
    if early_stopping is True:
        return Stopping("nothing", among_beams=True)
    longest = early_stopping == "never" and length_penalty > 0
    return Stopping("best" if longest else "now", among_beams=True)
