"""A lexicon beside a translator, word for word, for losses that align words.

It is trained with the model and not used when it translates.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from crossattn.models import Transformer, TransformerConfig
from crossattn.nn import linear
from crossattn.nn.meshes import on_any_mesh


class TransformerWithLexicon(Transformer):
    """A ``Transformer`` and its ``word_scores``."""

    def __init__(self, config: TransformerConfig, *, rngs):
        super().__init__(config, rngs=rngs)
        dim = config.block.dim
        self.lexicon = linear(dim, dim, in_axes=("embed",), out_axes=("mlp",), rngs=rngs)

    @on_any_mesh
    def word_scores(
        self, source: Int[Array, "*B S"], target: Int[Array, "*B T"]
    ) -> Float[Array, "*B T S"]:
        """Log p(target token | source token), word for word: no context, no position.

        A linear layer takes the source's embeddings to the output table. With the cross-attention
        weights as the posterior, a loss on these is a neural IBM model 1; see
        ``crossattn.train.alignment_losses.latent_alignment``.
        """
        embed = None if self.source_input is None else self.source_input.embedding
        words = self.lexicon((embed or self.target_input.embedding)(source))
        log_z = jax.nn.logsumexp(self.logits(words), axis=-1)
        own = self.output_table()[target].astype(words.dtype)
        scores = jnp.einsum("...td,...sd->...ts", own, words, preferred_element_type=jnp.float32)
        return scores - log_z[..., None, :]
