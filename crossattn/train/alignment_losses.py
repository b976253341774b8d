"""Losses that teach cross-attention where to look, summed over tokens like those of ``losses.py``.

Their attention [*B T S] is what one layer's heads give on average. At lengths where no such matrix fits,
``guided_spans`` and ``coverage`` take what ``crossattn.attention_stats`` gives in linear memory.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Weights = Int[Array, "*B T"] | Bool[Array, "*B T"] | Float[Array, "*B T"]
Loss = tuple[Float[Array, ""], dict[str, Float[Array, ""]]]
"""The loss with its gradient, and sums without one to report."""


def diagonal_prior(
    target_positions: Int[Array, "*B T"],
    source_positions: Int[Array, "*B S"],
    target_segment_ids: Int[Array, "*B T"],
    source_segment_ids: Int[Array, "*B S"],
    sharpness: float,
) -> Float[Array, "*B T S"]:
    """Each target token's distribution over its own sentence that favours the same relative place.

    Args:
        target_positions, source_positions: place of each token in its sentence, from 0.
        target_segment_ids, source_segment_ids: sentence of each token, 0 for padding, which gets all 0.
        sharpness: exp(-sharpness |t / T - s / S|), up to a factor; 0 is even.
    Source: Dyer et al. 2013, "A simple, fast, and effective reparameterization of IBM model 2".
    """

    def same(left: Array, right: Array) -> Array:
        return (left[..., :, None] == right[..., None, :]) & (right[..., None, :] > 0)

    readable = same(target_segment_ids, source_segment_ids)
    S = jnp.maximum(readable.sum(-1, keepdims=True), 1)
    T = jnp.maximum(same(target_segment_ids, target_segment_ids).sum(-1, keepdims=True), 1)
    far = jnp.abs(target_positions[..., :, None] / T - source_positions[..., None, :] / S)
    near = jnp.where(readable, jnp.exp(-sharpness * far), 0.0)
    return near / jnp.maximum(near.sum(-1, keepdims=True), 1e-9)


def latent_alignment(
    scores: Float[Array, "*B T S"],
    prior: Float[Array, "*B T S"],
    posterior: Float[Array, "*B T S"],
    weights: Weights,
) -> Loss:
    """Teaches attention to align words, from sentence pairs alone: no links are given.

    Each target token is taken for the translation of one source token, which one is not known:
    p(y_t) = sum_s prior[t, s] p(y_t | x_s). The negative log of that is a loss on the prior and on
    the word translations. The posterior that follows, prior[t, s] p(y_t | x_s) / p(y_t), is then
    what the attention that has seen y_t learns, by cross-entropy.

    Probabilities are mixed, not vectors, so attention cannot hide a code in what it reads. And the
    posterior is computed: a variational one was seen to settle on the prior, and the words on the
    target's frequencies, from where nothing is learnt.

    Args:
        scores: log p(y_t | x_s), target token t under source token s alone.
        prior: probability of s before y_t is known; 0 where s is not in the sentence of t.
        posterior: attention weights of the row whose input is y_t.
        weights: weight of each target token, 0 for padding.

    Returns:
        The loss summed over tokens, and sums without gradient: "alignment", the first part.

    Source: Brown et al. 1993, models 1 and 2, with attention for the parameters.
    """
    possible = prior > 0
    # 1 stands in where the logarithm of 0 would make NaN of a gradient that is not wanted.
    joint = jnp.where(possible, jnp.log(jnp.where(possible, prior, 1.0)) + scores, -1e9)
    log_p = jax.nn.logsumexp(joint, axis=-1)
    exact = jax.lax.stop_gradient(jnp.exp(joint - log_p[..., None]))
    learnt = -jnp.sum(exact * jnp.log(jnp.maximum(posterior, 1e-9)), axis=-1)
    nll, learnt = (jnp.sum(jnp.where(weights > 0, x * weights, 0.0)) for x in (-log_p, learnt))
    return nll + learnt, {"alignment": jax.lax.stop_gradient(nll)}


def guided_alignment(
    attention: Float[Array, "*B T S"],
    links: Int[Array, "*B T A"],
    source_words: Int[Array, "*B S"],
) -> Loss:
    """Teaches attention the links that people gave: cross-entropy with an even distribution over words.

    People link words. What a linked word gets is what its tokens get together: how it is shared out
    among them is left to attention.

    Args:
        attention: weights of the row that has read (or that predicts) each target token.
        links: source places that the token is linked with, each once, and -1 for the rest. A token
            without a link takes no part.
        source_words: the word of each source place; differs between the linked words of a token.

    Returns:
        The loss summed over tokens, and sums without gradient: "guided", the same.

    Source: Chen et al. 2016, "Guided alignment training for topic-aware neural machine
        translation"; Garg et al. 2019, "Jointly learning to align and translate".
    """
    linked = links >= 0
    place = jnp.where(linked, links, 0)
    word = jnp.take_along_axis(source_words[..., None, :], place, axis=-1)
    together = (
        (word[..., :, None] == word[..., None, :]) & linked[..., :, None] & linked[..., None, :]
    )
    probabilities = jnp.take_along_axis(attention, place, axis=-1)
    mass = jnp.sum(jnp.where(together, probabilities[..., None, :], 0.0), axis=-1)
    share = linked / jnp.maximum(together.sum(-1), 1)  # of a token in its word; they sum to 1
    surprise = -share * jnp.log(jnp.maximum(mass, 1e-9))
    loss = jnp.sum(surprise.sum(-1) / jnp.maximum(share.sum(-1), 1))
    return loss, {"guided": jax.lax.stop_gradient(loss)}


def guided_columns(attention: Float[Array, "*B T S"], linked: Bool[Array, "*B T S"]) -> Loss:
    """Teaches attention the same links seen from the source: which target tokens a source token gets.

    The other direction of a link is read off a column: its greatest share says whose translation the
    source token is. Of what a column gets in all, minus the log of the part that its links give it.

    Args:
        attention: weights of the rows that ``guided_alignment`` teaches, others 0.
        linked: whether the target and the source token are linked. A source token without a link takes
            no part.

    Returns:
        The loss summed over source tokens, and sums without gradient: "columns", the same.

    Source: the two directions' agreement of Liang et al. 2006, "Alignment by agreement", with one
        attention for both.
    """
    whole = jnp.maximum(attention.sum(-2), 1e-9)
    part = jnp.maximum(jnp.where(linked, attention, 0.0).sum(-2), 1e-9)
    loss = jnp.sum(jnp.where(linked.any(-2), jnp.log(whole / part), 0.0))
    return loss, {"columns": jax.lax.stop_gradient(loss)}


def prior_alignment(
    attention: Float[Array, "*B T S"], prior: Float[Array, "*B T S"], weights: Weights
) -> Loss:
    """Teaches attention a distribution known beforehand, such as ``diagonal_prior``: cross-entropy with it.

    Args:
        attention: weights of the rows that are to follow the prior.
        prior: sums to 1 over S, or is all 0 for a row that takes no part.
        weights: weight of each row, 0 for padding.

    Returns:
        The loss summed over tokens, and sums without gradient: "prior", the same.

    Source: the supervision of Chen et al. 2016, "Guided alignment training for topic-aware neural machine
        translation", with the diagonal of Dyer et al. 2013 in place of links.
    """
    surprise = -jnp.sum(prior * jnp.log(jnp.maximum(attention, 1e-9)), axis=-1)
    loss = jnp.sum(jnp.where(weights > 0, surprise * weights, 0.0))
    return loss, {"prior": jax.lax.stop_gradient(loss)}


def guided_spans(span_mass: Float[Array, "*B T"], weights: Weights) -> Loss:
    """Teaches attention links that are spans of keys: the negative log of what falls on each query's.

    Args:
        span_mass: attention of each target token on the span that it is linked with, as
            ``attention_stats(..., spans=(first, last)).span_mass`` gives it, the mean of its heads.
        weights: weight of each target token, 0 for padding and for tokens without a link.

    Returns:
        The loss summed over tokens, and sums without gradient: "guided", the same.

    Source: as ``guided_alignment``, to which it is equal where a word's tokens are neighbours.
    """
    surprise = -jnp.log(jnp.maximum(span_mass, 1e-9))
    loss = jnp.sum(jnp.where(weights > 0, surprise * weights, 0.0))
    return loss, {"guided": jax.lax.stop_gradient(loss)}


def coverage(
    mass: Float[Array, "*B S"],
    valid: Bool[Array, "*B S"],
    expected: Float[Array, "*#B #S"] | float | int = 1.0,
) -> Loss:
    """Asks of attention to look at every source token as much as at any other: a square for each.

    Args:
        mass: what each source token receives from all target tokens together; ``attention.sum(-2)``,
            or ``attention_stats(...).mass``, the mean of its heads.
        valid: which source tokens there are.
        expected: what each should receive; the paper's 1, or target tokens per source token.

    Returns:
        The loss summed over source tokens, and sums without gradient: "coverage", the same.

    Source: doubly stochastic attention, Xu et al. 2015, "Show, attend and tell", equation 14.
    """
    loss = jnp.sum(jnp.where(valid, jnp.square(expected - mass), 0.0))
    return loss, {"coverage": jax.lax.stop_gradient(loss)}
