"""Logits processors: functions from one sequence's logits to others, applied at each step in their order.

A ``LogitsProcessor`` is ``(logits [V], Context) -> logits [V]``; -inf is a token that cannot come. Searches
map them over rows, beams and positions, so each is written for one sequence, and your own may be any
function of JAX. ``sampling`` and ``constraints`` make the usual ones.

In beam search they get log-probabilities; what they take away is not shared out among the others.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from crossattn.types import Array, Float, Int


class Context(NamedTuple):
    """What is known of a sequence.

    Attributes:
      tokens: [X], the row's own prefix without any padding, then what was generated; what stands after
        ``length`` means nothing.
      length: how many tokens there are, prefix included.
      start: how many of them are prefix; an array where prefixes are of unlike lengths.
      row: the row of the batch.
      padding: how many tokens of padding stood before the prefix; none of the above counts them.
    """

    tokens: Int[Array, " X"]
    length: Int[Array, ""]
    start: int | Int[Array, ""]
    row: Int[Array, ""]
    padding: int | Int[Array, ""] = 0

    @property
    def generated(self) -> Int[Array, ""]:
        """How many tokens were generated."""
        return self.length - self.start

    @property
    def padded(self) -> "Context":
        """The same with its padding, counted as a part of the prefix."""
        if isinstance(self.padding, int) and not self.padding:
            return self
        length, start = self.length + self.padding, self.start + self.padding
        return Context(jnp.roll(self.tokens, self.padding), length, start, self.row)


LogitsProcessor = Callable[[Float[Array, " V"], Context], Float[Array, " V"]]


def apply(
    processors: Sequence[LogitsProcessor],
    logits: Float[Array, "B J V"],
    tokens: Int[Array, "B J X"],
    length: Int[Array, "..."],
    start: int,
    padding: Int[Array, " B"] | None = None,
) -> Float[Array, "B J V"]:
    """Logits after all processors.

    Args:
      length: how many tokens there are, one number for all or one a sequence [B J].
      start: how many of them are prefix.
      padding: how many of those are padding, on the left of each row; None is none.
    """
    if not processors:
        return logits

    def one(logits, tokens, length, row):
        own = Context(tokens, length, start, row)
        if padding is not None:
            left = padding[row]
            own = Context(jnp.roll(tokens, -left), length - left, start - left, row, left)
        for processor in processors:
            logits = processor(logits, own)
        return logits

    each = None if length.ndim == 0 else 0  # a shared length stays a scalar, and comparisons cheap
    beams = jax.vmap(one, (0, 0, each, None))
    return jax.vmap(beams, (0, 0, each, 0))(logits, tokens, length, jnp.arange(logits.shape[0]))
