"""What decoding returns."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from crossattn.types import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Hypotheses:
    """Generated sequences, best first.

    Attributes:
      tokens: [B J T], end-of-sentence included where reached, then padding.
      scores: [B J], sums of log-probabilities, divided by the length penalty if one was asked for.
      lengths: [B J], number of tokens before padding.
    """

    tokens: Int[Array, "B J T"]
    scores: Float[Array, "B J"]
    lengths: Int[Array, "B J"]

    @classmethod
    def of(
        cls, tokens: Int[Array, "B J T"], scores: Float[Array, "B J"], pad_id: int
    ) -> "Hypotheses":
        """Lengths counted from the tokens."""
        return cls(tokens, scores, jnp.sum(tokens != pad_id, axis=-1))
