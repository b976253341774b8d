"""Losses, summed over tokens, so that accumulated and sharded batches add up exactly.

`cross_entropy` returns sums, never means. Divide by `sums["weight"]`.
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
        "nll" (no smoothing, no z-loss), "correct" (the label has the highest logit), "weight".

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
    sums = {"loss": loss, "nll": nll, "correct": correct, "weight": jnp.sum(weights)}
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
