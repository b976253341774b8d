"""Losses, summed over tokens, so that accumulated and sharded batches add up exactly.

The mean of a loss is its sum divided by `sums["weight"]`.
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
    """Computes the weighted cross-entropy in nats: (loss summed over tokens, sums to report).

    Args:
        logits: unnormalised scores of any dtype; the computation is in float32.
        labels: the token to predict; any value where the weight is 0.
        weights: weight of each token, 0 for padding, whose logits may be anything, even NaN.
        label_smoothing: share of the target spread evenly over the whole vocabulary
            (https://arxiv.org/abs/1512.00567), as in torch's CrossEntropyLoss.
        z_loss: factor of log(Z)^2, which keeps the normaliser near 1 (PaLM, section 5).

    Returns:
        The loss, and float32 sums without gradient: "loss", "nll" (no smoothing, no z-loss), "correct" (no
        logit is higher than the label's; 1 / V where all are equal), "weight".

    Raises:
        ValueError: label_smoothing is outside [0, 1), or the shapes do not match.
    """
    if labels.shape != logits.shape[:-1] or weights.shape != labels.shape:
        raise ValueError(
            f"labels {labels.shape} and weights {weights.shape} must both have the shape of"
            f" logits {logits.shape} without the vocabulary axis"
        )
    per_token: Any = _token_losses(logits, labels, float(label_smoothing), float(z_loss))
    sums = weighted_sums(per_token, weights.astype(jnp.float32))
    return sums["loss"], jax.lax.stop_gradient(sums)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _token_losses(logits, labels, label_smoothing, z_loss):
    return token_losses(logits, labels, label_smoothing, z_loss)[0]


def _token_losses_forward(logits, labels, label_smoothing, z_loss):
    out, log_z = token_losses(logits, labels, label_smoothing, z_loss)
    return out, (logits, labels, log_z)


def _token_losses_backward(label_smoothing, z_loss, residuals, cotangents):
    logits, labels, log_z = residuals
    gradient = logits_gradient(logits, labels, cotangents[0], log_z, label_smoothing, z_loss)
    return gradient.astype(logits.dtype), None


_token_losses.defvjp(_token_losses_forward, _token_losses_backward)


def token_losses(
    logits: Float[ArrayLike, "*B T V"],
    labels: Int[ArrayLike, "*B T"],
    label_smoothing: float,
    z_loss: float,
    over: tuple[str, ...] = (),
) -> tuple[tuple[Array, Array, Array], Array]:
    """Computes ((loss, nll, correct), log Z) of each token [*B T].

    over: the mesh axes that split the vocabulary, inside shard_map.
    """
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must be at least 0 and below 1")
    logits = logits.astype(jnp.float32)
    highest = jnp.max(logits, axis=-1)
    if over:
        highest = jax.lax.pmax(highest, over)
    # A row of -inf (or one with +inf) must give an honest NaN or inf, not hide it.
    exponentials = jnp.sum(jnp.exp(logits - highest[..., None]), axis=-1)
    log_z = highest + jnp.log(jax.lax.psum(exponentials, over))
    label_score = _label_scores(logits, labels, over)
    nll = log_z - label_score
    loss = nll
    if label_smoothing:
        mean = jax.lax.psum(jnp.sum(logits, axis=-1), over) / _vocab_size(logits, over)
        loss = (1.0 - label_smoothing) * nll + label_smoothing * (log_z - mean)
    if z_loss:
        loss = loss + z_loss * jnp.square(log_z)
    lowest = jnp.min(logits, axis=-1)
    if over:
        lowest = jax.lax.pmin(lowest, over)
    chosen = jnp.where(highest > lowest, 1.0, 1.0 / _vocab_size(logits, over))
    correct = jnp.where(label_score >= highest, chosen, 0.0)
    return (loss, nll, correct), log_z


def weighted_sums(
    per_token: tuple, weights: Float[ArrayLike, "*B T"]
) -> dict[str, Float[Array, ""]]:
    """Sums (loss, nll, correct) of each token by weight; a weight of 0 hides NaN."""

    def total(values: Float[Array, "*B T"]) -> Float[Array, ""]:
        return jnp.sum(jnp.where(weights != 0, values * weights, 0.0))

    loss, nll, correct = map(total, per_token)
    return {"loss": loss, "nll": nll, "correct": correct, "weight": jnp.sum(weights)}


def logits_gradient(
    logits: Float[ArrayLike, "*B T V"],
    labels: Int[ArrayLike, "*B T"],
    weights: Float[Array, "*B T"],
    log_z: Float[Array, "*B T"],
    label_smoothing: float,
    z_loss: float,
    over: tuple[str, ...] = (),
) -> Float[Array, "*B T V"]:
    """Computes the derivative of the weighted loss by the logits, in one fused pass.

    The probabilities are recomputed from the log-normaliser: a second array [tokens, vocabulary] would cost
    more than the exponential.
    """
    on_z = weights * (1.0 + 2.0 * z_loss * log_z)
    even = weights * (label_smoothing / _vocab_size(logits, over))
    probabilities = jnp.exp(logits.astype(jnp.float32) - log_z[..., None])
    is_label = jnp.arange(logits.shape[-1]) == _own_labels(logits, labels, over)[..., None]
    on_label = even + weights * (1.0 - label_smoothing)
    target = jnp.where(is_label, on_label[..., None], even[..., None])
    gradient = on_z[..., None] * probabilities - target
    return jnp.where((weights != 0)[..., None], gradient, 0.0)


def _vocab_size(logits, over):
    return logits.shape[-1] * jax.lax.axis_size(over)


def _own_labels(logits, labels, over):
    """Returns the labels' indices in this device's part of the vocabulary; others lie outside of it."""
    return labels - jax.lax.axis_index(over) * logits.shape[-1] if over else labels


def _label_scores(logits, labels, over):
    """Returns the label's logit of each token; NaN for a label outside the vocabulary of one device."""
    labels = _own_labels(logits, labels, over)
    own = (labels >= 0) & (labels < logits.shape[-1])
    index = jnp.where(own, labels, 0) if over else labels
    scores = jnp.take_along_axis(logits, index[..., None], axis=-1)[..., 0]
    return jax.lax.psum(jnp.where(own, scores, 0.0), over) if over else scores
