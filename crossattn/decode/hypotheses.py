"""The result of decoding."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from crossattn.ops.exporting import exportable
from crossattn.types import AnyArray, Array, Float, Int


@exportable
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Hypotheses:
    """Generated sequences, best first.

    Attributes:
      tokens: [B J T], end-of-sentence included where reached, then padding.
      scores: [B J], sums of log-probabilities, divided by the length penalty if there is one.
      lengths: [B J], number of generated tokens, the end included. The tokens after them are padding, even
        where ``pad_id`` is that of the end or of a token of the text.
      weights: [B J M N T S], cross-attention of the layers and heads of ``Capture``; row t is the step that
        predicted token t, and 0 for padding. None without a ``Capture``.
    """

    tokens: Int[AnyArray, "B J T"]
    scores: Float[AnyArray, "B J"]
    lengths: Int[AnyArray, "B J"]
    weights: Float[AnyArray, "B J M N T S"] | None = None

    @classmethod
    def of(
        cls,
        tokens: Int[Array, "B J T"],
        scores: Float[Array, "B J"],
        lengths: Int[Array, "B J"],
        weights: Float[Array, "B J T M N S"] | None = None,
    ) -> "Hypotheses":
        """Makes hypotheses from the arrays of a search, with weights of 0 for padding."""
        if weights is not None:
            real = jnp.arange(tokens.shape[-1]) < lengths[..., None]
            weights = jnp.where(real[..., None, None, None], weights, 0)
            weights = jnp.moveaxis(weights, 2, 4)
        return cls(tokens, scores, lengths, weights)

    def best(self, count: int = 1) -> "Hypotheses":
        """Returns the first ``count`` of each row."""
        return jax.tree.map(lambda x: x[:, :count], self)
