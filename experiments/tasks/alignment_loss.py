"""Losses that teach cross-attention to align words: by the diagonal, a lexicon or human alignments.

Row t of the attention predicts the token that row t + 1 reads; row t + 2 follows that token.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from crossattn.models import Transformer, TransformerConfig
from crossattn.nn import linear
from crossattn.nn.meshes import on_any_mesh
from crossattn.train.alignment_losses import (
    coverage,
    diagonal_prior,
    guided_alignment,
    guided_columns,
    latent_alignment,
    prior_alignment,
)

Sums = dict[str, jax.Array]


class TransformerWithLexicon(Transformer):
    """A ``Transformer`` and a lexicon for the losses, which translation does not use."""

    def __init__(self, config: TransformerConfig, *, rngs):
        super().__init__(config, rngs=rngs)
        dim = config.block.dim
        self.lexicon = linear(dim, dim, in_axes=("embed",), out_axes=("mlp",), rngs=rngs)

    @on_any_mesh
    def word_scores(
        self, source: Int[Array, "*B S"], target: Int[Array, "*B T"]
    ) -> Float[Array, "*B T S"]:
        """Returns log p(target token | source token), without context or positions.

        A linear layer maps the source's embeddings to the output table. With cross-attention as the
        posterior, a loss of these scores is a neural IBM model 1; see ``latent_alignment``.
        """
        embed = None if self.source_input is None else self.source_input.embedding
        words = self.lexicon((embed or self.target_input.embedding)(source))
        log_z = jax.nn.logsumexp(self.logits(words), axis=-1)
        own = self.output_table()[target].astype(words.dtype)
        scores = jnp.einsum("...td,...sd->...ts", own, words, preferred_element_type=jnp.float32)
        return scores - log_z[..., None, :]


def alignment_loss(
    model: Any, batch: Any, weights: Float[Array, "L B N T S"], options: Any
) -> tuple[jax.Array, Sums]:
    """Returns the loss of a layer's mean over heads, summed over tokens, and sums to report.

    Args:
      model: a ``TransformerWithLexicon``; any model for "diagonal".
      batch: of the pipeline; without gold links (evaluation) all links are latent.
      weights: cross-attention of every layer.
      options: ``config.loss``. ``alignment_layer`` None is the first layer for "latent", and the last for
        the others; "gold" links then teach the layers before it too.
    """
    means, layer, near = weights.mean(2), options.alignment_layer, options.alignment_diagonal
    if options.alignment == "latent":
        return _latent(model, batch, means[layer or 0], near)
    if options.alignment == "diagonal":
        positions, segment_ids = batch["target_positions"], batch["target_segment_ids"]
        prior = _diagonal(batch, positions, segment_ids, near)
        return prior_alignment(means[-1 if layer is None else layer], prior, segment_ids > 0)
    loss, sums = _gold(model, batch, means[-1 if layer is None else layer], near)
    if layer is None and "target_links" in batch:
        # Links in the layers before, one row earlier, let the last learn in fewer steps (deep supervision,
        # Lee et al. 2015).
        links = batch["target_links"], batch["linked_words"]
        loss = loss + sum(guided_alignment(mean, *links)[0] for mean in means[:-1])
    return loss, sums


def coverage_loss(
    batch: Any, weights: Float[Array, "L B N T S"], options: Any
) -> tuple[jax.Array, Sums]:
    """Returns ``coverage`` of a layer's mean over heads; a token expects an equal share of the target."""
    target, source = batch["target_segment_ids"], batch["source_segment_ids"]
    layer = -1 if options.alignment_layer is None else options.alignment_layer
    attention = jnp.where((target > 0)[..., None], weights[layer].mean(1), 0.0)
    valid = source > 0
    same = source[:, :, None] == source[:, None, :]
    theirs = source[:, :, None] == target[:, None, :]
    expected = theirs.sum(-1) / jnp.maximum(same.sum(-1), 1)
    return coverage(attention.sum(-2), valid, expected)


def _latent(model: Any, batch: Any, weights: Float[Array, "B T S"], sharpness: float):
    """Row t learns the posterior of its input, whose prior is half row t - 1, half the diagonal."""
    tokens, positions, segment_ids = (
        batch[name][:, 1:] for name in ("target_in", "target_positions", "target_segment_ids")
    )
    near = _diagonal(batch, positions, segment_ids, sharpness)
    return latent_alignment(
        model.word_scores(batch["source"], tokens),
        prior=jnp.where(near > 0, 0.5 * (weights[:, :-1] + near), 0.0),
        posterior=weights[:, 1:],
        weights=(segment_ids > 0) & (positions > 0),
    )


def _gold(model: Any, batch: Any, weights: Float[Array, "B T S"], sharpness: float):
    """The row after the one that reads a token learns its links: it knows the next token too.

    Rows learn distributions over source words, and columns over target tokens. Links that are not given are
    latent; given links restrict the source tokens of the lexicon: semi-supervised EM (Fraser and Marcu 2006,
    "Semi-supervised training for statistical word alignment"). The prior is half that row, half the diagonal.
    """
    positions, segment_ids = batch["target_positions"], batch["target_segment_ids"]
    later, followed = _next_rows(weights, segment_ids)
    near = _diagonal(batch, positions, segment_ids, sharpness)
    prior = jnp.where(near > 0, 0.5 * (jax.lax.stop_gradient(later) + near), 0.0)
    loss, sums = jnp.zeros(()), {}
    if "target_links" in batch:
        links = jnp.where(followed[..., None], batch["target_links"], -1)
        allowed = (links[..., None] == jnp.arange(prior.shape[-1])).any(-2)
        loss, sums = guided_alignment(later, links, batch["linked_words"])
        loss_back, sums_back = guided_columns(jnp.where(followed[..., None], later, 0.0), allowed)
        loss, sums = loss + loss_back, {**sums, **sums_back}
        known = batch["target_linked"] > 0
        prior = jnp.where(known[..., None] & ~allowed, 0.0, prior)
        followed &= ~known | allowed.any(-1)
    rest, rest_sums = latent_alignment(
        model.word_scores(batch["source"], batch["target_in"]),
        prior=prior,
        posterior=later,
        weights=followed & (positions > 0),
    )
    return loss + rest, {**sums, **rest_sums}


def _diagonal(batch: Any, positions: Array, segment_ids: Array, sharpness: float) -> Array:
    source = batch["source_positions"], batch["source_segment_ids"]
    return diagonal_prior(positions, source[0], segment_ids, source[1], sharpness)


def _next_rows(
    weights: Float[Array, "B T S"], segment_ids: Int[Array, "B T"]
) -> tuple[Float[Array, "B T S"], Bool[Array, "B T"]]:
    """Returns the next row of each row, and whether it belongs to the same sentence."""
    followed = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    return (
        jnp.pad(weights[:, 1:], ((0, 0), (0, 1), (0, 0))),
        jnp.pad(followed, ((0, 0), (0, 1))),
    )
