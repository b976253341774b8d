"""Losses, summed over tokens, so that accumulated and sharded batches add up exactly.

The one thing to know: `cross_entropy` returns sums, never means. Divide by `sums["tokens"]`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

ArrayLike = Array | np.ndarray


def cross_entropy(
    logits: Float[ArrayLike, "*B T V"],
    labels: Int[ArrayLike, "*B T"],
    weights: Float[ArrayLike, "*B T"] | Int[ArrayLike, "*B T"] | Bool[ArrayLike, "*B T"],
    label_smoothing: float | int = 0.0,
    z_loss: float | int = 0.0,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Weighted cross-entropy in nats: (loss summed over tokens, sums to report).

    Args:
        logits: unnormalised scores; computed on in float32 whatever their dtype.
        labels: the token to predict; any value where the weight is 0.
        weights: weight of each token, 0 for padding, whose logits may hold anything, even NaN.
        label_smoothing: share of the target spread evenly over the whole vocabulary
            (https://arxiv.org/abs/1512.00567), as in torch's CrossEntropyLoss.
        z_loss: factor of log(Z)^2, which keeps the normaliser near 1 (PaLM, section 5).

    Returns:
        loss_sum, which carries the gradient, and float32 sums without one: "loss",
        "nll" (no smoothing, no z-loss), "correct" (the label has the highest logit), "tokens".

    Raises:
        ValueError: label_smoothing outside [0, 1), or shapes that do not go together.
    """
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must be at least 0 and below 1")
    if labels.shape != logits.shape[:-1] or weights.shape != labels.shape:
        raise ValueError(
            f"labels {labels.shape} and weights {weights.shape} must both have the shape of"
            f" logits {logits.shape} without the vocabulary axis"
        )
    per_token: Any = _token_loss(logits, labels, float(label_smoothing), float(z_loss))
    weights = weights.astype(jnp.float32)

    def total(values: Float[Array, "*B T"]) -> Float[Array, ""]:
        return jnp.sum(jnp.where(weights != 0, values * weights, 0.0))

    loss, nll, correct = map(total, per_token)
    sums = {"loss": loss, "nll": nll, "correct": correct, "tokens": jnp.sum(weights)}
    return loss, jax.lax.stop_gradient(sums)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _token_loss(logits, labels, label_smoothing, z_loss):
    """(loss, nll, correct) of every token; only the loss and the nll carry a gradient."""
    return _forward(logits, labels, label_smoothing, z_loss)[0]


def _token_loss_forward(logits, labels, label_smoothing, z_loss):
    out, log_z = _forward(logits, labels, label_smoothing, z_loss)
    return out, (logits, labels, log_z)


def _forward(logits, labels, label_smoothing, z_loss):
    scores = logits.astype(jnp.float32)
    highest = jnp.max(scores, axis=-1)
    # A row of -inf (or one with +inf) must give an honest NaN or inf, not hide it.
    log_z = highest + jnp.log(jnp.sum(jnp.exp(scores - highest[..., None]), axis=-1))
    # A label outside the vocabulary reads as NaN, so it cannot go unnoticed.
    label_score = jnp.take_along_axis(scores, labels[..., None], axis=-1)[..., 0]
    nll = log_z - label_score
    loss = nll
    if label_smoothing:
        even = log_z - jnp.mean(scores, axis=-1)
        loss = (1.0 - label_smoothing) * nll + label_smoothing * even
    if z_loss:
        loss = loss + z_loss * jnp.square(log_z)
    correct = (label_score >= highest).astype(jnp.float32)
    return (loss, nll, correct), log_z


def _token_loss_backward(label_smoothing, z_loss, residuals, cotangents):
    """One fused pass that writes the gradient over the logits' own buffer.

    The probabilities are made again from the logits and the saved log-normaliser: keeping
    them would cost a second [tokens, vocabulary] array, more than the exponential costs.
    """
    logits, labels, log_z = residuals
    d_loss, d_nll, _ = cotangents
    off_label = d_loss * (label_smoothing / logits.shape[-1])
    on_label = off_label + d_loss * (1.0 - label_smoothing) + d_nll
    d_log_z = d_loss * (1.0 + 2.0 * z_loss * log_z) + d_nll
    probabilities = jnp.exp(logits.astype(jnp.float32) - log_z[..., None])
    tokens = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    targets = jnp.where(tokens == labels[..., None], on_label[..., None], off_label[..., None])
    gradient = d_log_z[..., None] * probabilities - targets
    ignored = (d_loss == 0) & (d_nll == 0)
    gradient = jnp.where(ignored[..., None], 0.0, gradient)
    return gradient.astype(logits.dtype), None


_token_loss.defvjp(_token_loss_forward, _token_loss_backward)


def diagonal_prior(
    target_positions: Int[Array, "*B T"],
    source_positions: Int[Array, "*B S"],
    target_segments: Int[Array, "*B T"],
    source_segments: Int[Array, "*B S"],
    sharpness: float,
) -> Float[Array, "*B T S"]:
    """Each target token's distribution over its own sentence that favours the same relative place.

    Args:
        target_positions, source_positions: place of each token in its sentence, from 0.
        target_segments, source_segments: sentence of each token, 0 for padding, which gets all 0.
        sharpness: exp(-sharpness |t / T - s / S|), up to a factor; 0 is even.
    Source: Dyer et al. 2013, "A simple, fast, and effective reparameterization of IBM model 2".
    """

    def same(left: Array, right: Array) -> Array:
        return (left[..., :, None] == right[..., None, :]) & (right[..., None, :] > 0)

    readable = same(target_segments, source_segments)
    S = jnp.maximum(readable.sum(-1, keepdims=True), 1)
    T = jnp.maximum(same(target_segments, target_segments).sum(-1, keepdims=True), 1)
    far = jnp.abs(target_positions[..., :, None] / T - source_positions[..., None, :] / S)
    near = jnp.where(readable, jnp.exp(-sharpness * far), 0.0)
    return near / jnp.maximum(near.sum(-1, keepdims=True), 1e-9)


def latent_alignment(
    scores: Float[Array, "*B T S"],
    prior: Float[Array, "*B T S"],
    posterior: Float[Array, "*B T S"],
    weights: Int[Array, "*B T"] | Bool[Array, "*B T"] | Float[Array, "*B T"],
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
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
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
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
    found = jnp.take_along_axis(attention, place, axis=-1)
    mass = jnp.sum(jnp.where(together, found[..., None, :], 0.0), axis=-1)
    share = linked / jnp.maximum(together.sum(-1), 1)  # of a token in its word; they sum to 1
    surprise = -share * jnp.log(jnp.maximum(mass, 1e-9))
    loss = jnp.sum(surprise.sum(-1) / jnp.maximum(share.sum(-1), 1))
    return loss, {"guided": jax.lax.stop_gradient(loss)}


def guided_columns(
    attention: Float[Array, "*B T S"], linked: Bool[Array, "*B T S"]
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
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
