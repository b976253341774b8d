"""Logits processors: functions of the logits of one sequence, applied in order at each step.

A ``LogitsProcessor`` is ``(logits [V], Context) -> logits [V]``, any function of JAX; -inf forbids a token.
Searches map it over rows, beams and positions. ``sampling`` and ``constraints`` make the usual ones.

In beam search they get log-probabilities, which are not normalised afterwards.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from crossattn.types import Array, Float, Int


class Context(NamedTuple):
    """Context of a logits processor.

    Attributes:
      tokens: [X], the row's prefix without padding, then its generated tokens; undefined after ``length``.
      length: number of tokens, prefix included.
      start: number of tokens of the prefix; an array for prefixes of unlike lengths.
      row: row of the batch.
      padding: number of tokens of padding before the prefix, which the fields above do not count.
    """

    tokens: Int[Array, " X"]
    length: Int[Array, ""]
    start: int | Int[Array, ""]
    row: Int[Array, ""]
    padding: int | Int[Array, ""] = 0

    @property
    def generated(self) -> Int[Array, ""]:
        """Number of generated tokens."""
        return self.length - self.start

    @property
    def padded(self) -> "Context":
        """Context whose prefix includes its padding."""
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
    """Applies processors in order.

    Args:
      length: number of tokens, one for all or one for each sequence [B J].
      start: number of tokens of the prefix, padding included.
      padding: number of tokens of padding on the left of each row; None is none.
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
