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

WITH_LINKS = ("gold", "hmm")
"""Values of ``config.loss.alignment`` that teach a head links: of the data, or counted on its texts."""

ROW_OF_LINKS = 2
"""The row offset of ``Recipe`` at which a head learns links: it has read the token after."""


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
    """Returns the loss of cross-attention as alignment, summed over tokens, and sums to report.

    "gold" and "hmm" are "latent" in the first layer, where links that are known take the place of the
    posterior, and teach them to one head of another; the other heads stay free to read what the next word
    needs.

    Args:
      model: a ``TransformerWithLexicon``; any model for "diagonal".
      batch: of the pipeline; without links (evaluation) all links are latent.
      weights: cross-attention of every layer.
      options: ``config.loss``. ``alignment_layer`` None is the first layer for "latent", and the last for
        the others.

    Source: for the head, Garg et al. 2019, "Jointly learning to align and translate with Transformer models".
    """
    layer, near = options.alignment_layer, options.alignment_diagonal
    if options.alignment == "diagonal":
        positions, segment_ids = batch["target_positions"], batch["target_segment_ids"]
        prior = _diagonal(batch, positions, segment_ids, near)
        taught = weights[-1 if layer is None else layer].mean(1)
        return prior_alignment(taught, prior, segment_ids > 0)
    if options.alignment == "latent":
        return _latent(model, batch, weights[layer or 0].mean(1), near)
    first, taught = weights[0].mean(1), weights[-1 if layer is None else layer]
    loss, sums = _latent(model, batch, first, near)
    if "target_links" in batch:
        of_head, head_sums = head_loss(batch, taught[:, options.alignment_head], first)
        loss, sums = loss + options.alignment_head_weight * of_head, {**sums, **head_sums}
    return loss, sums


def head_loss(
    batch: Any, head: Float[Array, "B T S"], guess: Float[Array, "B T S"]
) -> tuple[jax.Array, Sums]:
    """Returns the loss of a head whose row after the one that reads a token learns its links.

    That row knows the next token too. Rows learn distributions over source words, and columns over target
    tokens. Tokens of examples without links learn a guess, the attention of another row.

    Args:
      batch: with "target_links", "target_linked" and "linked_words", see ``crossattn.data.features.Links``.
      head: weights of the head.
      guess: distributions of the rows that have just read each token; they learn nothing here.
    """
    later, followed = _next_rows(head, batch["target_segment_ids"])
    links = jnp.where(followed[..., None], batch["target_links"], -1)
    linked = (links[..., None] == jnp.arange(head.shape[-1])).any(-2)
    unknown = followed & (batch["target_linked"] == 0) & (batch["target_positions"] > 0)
    losses = (
        guided_alignment(later, links, batch["linked_words"]),
        guided_columns(jnp.where(followed[..., None], later, 0.0), linked),
        prior_alignment(later, jax.lax.stop_gradient(guess), unknown),
    )
    return sum((loss for loss, _ in losses), jnp.zeros(())), {
        name: value for _, sums in losses for name, value in sums.items()
    }


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
    """Row t learns the posterior of its input, whose prior is half row t - 1, half the diagonal.

    Gold links take the place of the posterior. The prior learns from all tokens alike: where it could choose
    among the linked words alone, the model translated worse.
    """
    tokens, positions, segment_ids = (
        batch[name][:, 1:] for name in ("target_in", "target_positions", "target_segment_ids")
    )
    near, posterior = _diagonal(batch, positions, segment_ids, sharpness), weights[:, 1:]
    if "target_links" in batch:
        posterior = jnp.where(batch["target_linked"][:, 1:, None] > 0, 1.0, posterior)
    loss, sums = latent_alignment(
        model.word_scores(batch["source"], tokens),
        prior=jnp.where(near > 0, 0.5 * (weights[:, :-1] + near), 0.0),
        posterior=posterior,
        weights=(segment_ids > 0) & (positions > 0),
    )
    if "target_links" in batch:
        loss += guided_alignment(weights, batch["target_links"], batch["linked_words"])[0]
    return loss, sums


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
