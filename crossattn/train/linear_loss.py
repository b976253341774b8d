"""Cross-entropy fused with the output layer, so that logits are made once and never kept.

The output layer of a small model is a third of its work. Computing the loss's gradient right where
the logits are, instead of saving them for the backward pass, leaves three matrix products and one
exponential; in chunks, it needs no more memory than one chunk of logits.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from crossattn.axes import constrain, placed


def linear_cross_entropy(
    hidden: Float[Array, "B T D"],
    table: Float[Array, "V D"],
    labels: Int[Array, "B T"],
    weights: Int[Array, "B T"] | Bool[Array, "B T"] | Float[Array, "B T"],
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunks: int = 1,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """``losses.cross_entropy`` of the logits ``hidden table^T``, with the same results and sums.

    Args:
      hidden: the vectors before the output layer.
      table: the output layer, one row a token.
      labels: the token to predict.
      weights: weight of each token; 0 for padding.
      label_smoothing: see ``cross_entropy``.
      z_loss: see ``cross_entropy``.
      chunks: parts that the T axis is cut into, to hold fewer logits at once.

    Returns:
      The loss summed over tokens, and sums without gradient: "loss", "nll", "correct", "weight".

    Raises:
      ValueError: ``chunks`` does not divide T, or label_smoothing is outside [0, 1).
    Source: the fused form, Hsu et al. 2024, "Liger Kernel", section 3.2.
    """
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must be at least 0 and below 1")
    if hidden.shape[1] % chunks:
        raise ValueError(
            f"chunks is {chunks}; expected a divisor of the length, {hidden.shape[1]}."
        )
    options = (float(label_smoothing), float(z_loss), chunks)
    totals: Any = _loss(hidden, table, labels, weights.astype(jnp.float32), *options)
    loss, sums = totals
    return loss, jax.lax.stop_gradient(sums)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _loss(hidden, table, labels, weights, label_smoothing, z_loss, chunks):
    def chunk(x, label, weight):
        return _sums(_logits(x, table), label, weight, label_smoothing, z_loss)[0]

    sums = _over_chunks(chunk, (hidden, labels, weights), chunks)
    return sums["loss"], sums


def _forward(hidden, table, labels, weights, label_smoothing, z_loss, chunks):
    # One chunk's is the whole, and sent to other devices as it is.
    added = table.dtype if chunks == 1 else jnp.float32

    def chunk(x, label, weight):
        logits = _logits(x, table)
        sums, log_z = _sums(logits, label, weight, label_smoothing, z_loss)
        gradient = _gradient(logits, log_z, label, weight, label_smoothing, z_loss).astype(x.dtype)
        d_x = jnp.einsum("btv,vd->btd", gradient, table.astype(x.dtype))
        d_table = jnp.einsum("btv,btd->vd", gradient, x, preferred_element_type=added)
        return (sums, d_table), placed(d_x, "embed")

    (sums, d_table), d_hidden = _over_chunks_mapped(chunk, (hidden, labels, weights), chunks)
    return (sums["loss"], sums), (d_hidden, d_table.astype(table.dtype))


def _backward(label_smoothing, z_loss, chunks, residuals, cotangents):
    d_loss = cotangents[0]
    d_hidden, d_table = jax.tree.map(lambda d: (d * d_loss).astype(d.dtype), residuals)
    return d_hidden, d_table, None, None


_loss.defvjp(_forward, _backward)


def _logits(x: Float[Array, "B T D"], table: Float[Array, "V D"]) -> Float[Array, "B T V"]:
    table = constrain(table.astype(x.dtype), "vocab", None)  # Gathered as it is multiplied, narrow.
    logits = jnp.einsum("btd,vd->btv", x, table, preferred_element_type=jnp.float32)
    return placed(logits, "vocab")


def _sums(logits, labels, weights, label_smoothing, z_loss):
    """Weighted sums over the tokens, and each token's log-normaliser."""
    highest = jnp.max(logits, axis=-1)
    log_z = highest + jnp.log(jnp.sum(jnp.exp(logits - highest[..., None]), axis=-1))
    label_score = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    nll = log_z - label_score
    loss = nll
    if label_smoothing:
        even = log_z - jnp.mean(logits, axis=-1)
        loss = (1.0 - label_smoothing) * nll + label_smoothing * even
    if z_loss:
        loss = loss + z_loss * jnp.square(log_z)
    values = {"loss": loss, "nll": nll, "correct": (label_score >= highest).astype(jnp.float32)}
    sums = {k: jnp.sum(jnp.where(weights != 0, v * weights, 0.0)) for k, v in values.items()}
    return {**sums, "weight": jnp.sum(weights)}, log_z


def _gradient(logits, log_z, labels, weights, label_smoothing, z_loss):
    """The loss's derivative by the logits in one pass: probabilities minus the smoothed target, weighted."""
    on_z = weights * (1.0 + 2.0 * z_loss * log_z)
    even = weights * (label_smoothing / logits.shape[-1])
    probabilities = jnp.exp(logits - log_z[..., None])
    is_label = jnp.arange(logits.shape[-1]) == labels[..., None]
    target = jnp.where(
        is_label, (even + weights * (1.0 - label_smoothing))[..., None], even[..., None]
    )
    gradient = on_z[..., None] * probabilities - target
    return jnp.where((weights != 0)[..., None], gradient, 0.0)


def _over_chunks(chunk, arrays, chunks):
    """Sum of ``chunk`` over pieces of the T axis."""
    if chunks == 1:
        return chunk(*arrays)
    parts = jax.lax.map(lambda piece: chunk(*piece), _cut(arrays, chunks))
    return jax.tree.map(lambda x: x.sum(0), parts)


def _over_chunks_mapped(chunk, arrays, chunks):
    """``chunk`` returns (what is added up, what stands beside its piece of the T axis)."""
    if chunks == 1:
        return chunk(*arrays)
    pieces = _cut(arrays, chunks)
    shapes = jax.eval_shape(chunk, *jax.tree.map(lambda x: x[0], pieces))[0]
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def body(total, piece):
        added, beside = chunk(*piece)
        return jax.tree.map(jnp.add, total, added), beside

    total, beside = jax.lax.scan(body, zeros, pieces)
    beside = jnp.moveaxis(beside, 0, 1)
    return total, beside.reshape(beside.shape[0], -1, *beside.shape[3:])


def _cut(arrays, chunks: int):
    """[B T ...] -> [chunks B T/chunks ...]: along T, so that a batch sharded over B stays so."""

    def cut(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0], chunks, -1, *x.shape[2:]), 1, 0)

    return jax.tree.map(cut, arrays)
