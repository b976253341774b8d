"""Cross-entropy fused with the output layer, so that logits are made once and never kept.

The output layer of a small model is a third of its work. Computing the loss's gradient right where
the logits are, instead of saving them for the backward pass, leaves three matrix products and one
exponential; in chunks, it needs no more memory than one chunk of logits. On a mesh each device goes through
the chunks of its own tokens by itself: the table is gathered once, and its gradient summed over devices once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from crossattn.axes import placed
from crossattn.rows import OwnTokens


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
    def own(vocabulary, *tokens):
        def chunk(x, label, weight):
            return _sums(vocabulary, vocabulary.logits(x), label, weight, label_smoothing, z_loss)[
                0
            ]

        return _over_chunks(chunk, tokens, _parts(tokens[0], chunks)), None, None

    sums, _, _ = _by_device(own, table, (hidden, labels, weights))
    return sums["loss"], sums


def _forward(hidden, table, labels, weights, label_smoothing, z_loss, chunks):
    def own(vocabulary, *tokens):
        count = _parts(tokens[0], chunks)
        # One chunk's is the whole, and sent to other devices as it is.
        added = table.dtype if count == 1 else jnp.float32

        def chunk(x, label, weight):
            logits = vocabulary.logits(x)
            sums, log_z, loss = _sums(vocabulary, logits, label, weight, label_smoothing, z_loss)
            options = label_smoothing, z_loss
            gradient = _gradient(vocabulary, logits, log_z, label, weight, *options).astype(x.dtype)
            d_x = vocabulary.sum(jnp.einsum("btv,vd->btd", gradient, vocabulary.table))
            d_table = jnp.einsum("btv,btd->vd", gradient, x, preferred_element_type=added)
            return (sums, d_table), (placed(d_x, "embed"), loss)

        (sums, d_table), beside = _over_chunks_mapped(chunk, tokens, count)
        return sums, d_table.astype(table.dtype), beside

    sums, d_table, (d_hidden, d_weights) = _by_device(own, table, (hidden, labels, weights))
    return (sums["loss"], sums), (d_hidden, d_table, d_weights)


def _backward(label_smoothing, z_loss, chunks, residuals, cotangents):
    d_loss = cotangents[0]
    d_hidden, d_table, d_weights = jax.tree.map(lambda d: (d * d_loss).astype(d.dtype), residuals)
    return d_hidden, d_table, None, d_weights


_loss.defvjp(_forward, _backward)


@dataclass(frozen=True)
class _Vocabulary:
    """Rows of the table, of all tokens or of those that this device has of them.

    Attributes:
      table: as narrow as the vectors that it is multiplied with.
      over: mesh axes that split the tokens.
    """

    table: Float[Array, "V D"]
    over: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """How many tokens there are."""
        return self.table.shape[0] * (jax.lax.axis_size(self.over) if self.over else 1)

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Of the tokens that are here."""
        logits = jnp.einsum("btd,vd->btv", x, self.table, preferred_element_type=jnp.float32)
        return placed(logits, "vocab")

    def here(self, labels: Int[Array, "*B"]) -> Int[Array, "*B"]:
        """Where among the rows a label is, which may be outside of them."""
        if not self.over:
            return labels
        return labels - jax.lax.axis_index(self.over) * self.table.shape[0]

    def sum(self, x: Array) -> Array:
        """Of what the devices have."""
        return jax.lax.psum(x, self.over) if self.over else x

    def max(self, x: Array) -> Array:
        """Of what the devices have."""
        return jax.lax.pmax(x, self.over) if self.over else x

    def score(self, logits: Float[Array, "B T V"], labels: Int[Array, "B T"]) -> Array:
        """The label's logit."""
        if not self.over:
            return _picked(logits, labels)
        labels = self.here(labels)
        mine = (labels >= 0) & (labels < logits.shape[-1])
        return self.sum(jnp.where(mine, _picked(logits, jnp.where(mine, labels, 0)), 0.0))

    def mean(self, logits: Float[Array, "B T V"]) -> Float[Array, "B T"]:
        """Over all tokens."""
        if not self.over:
            return jnp.mean(logits, axis=-1)
        return self.sum(jnp.sum(logits, axis=-1)) / self.size


def _picked(logits: Float[Array, "B T V"], labels: Int[Array, "B T"]) -> Float[Array, "B T"]:
    return jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]


def _by_device(own: Callable, table: Array, tokens: tuple) -> tuple[Any, Any, Any]:
    """``own(vocabulary, *tokens)`` of each device: sums, the table's gradient, what stands beside tokens."""
    hidden, labels, _ = tokens
    here = OwnTokens.of(table, labels)
    if here is None:
        return own(_Vocabulary(table.astype(hidden.dtype)), *tokens)
    split = here.split

    def each(part, *tokens):
        vocabulary = _Vocabulary(here.gathered(part.astype(hidden.dtype)), here.kept)
        sums, d_table, beside = own(vocabulary, *tokens)
        if d_table is not None:
            d_table = here.scattered(d_table.astype(hidden.dtype)).astype(part.dtype)
        return jax.tree.map(lambda x: x.reshape([1] * len(split)), sums), d_table, beside

    out = PartitionSpec(*split), here.places, here.rows
    sums, d_table, beside = here.each(each, out, table, *tokens)
    return jax.tree.map(jnp.sum, sums), d_table, beside


def _parts(x: Float[Array, "B T D"], chunks: int) -> int:
    """Into how many chunks a device cuts its part of the length."""
    return math.gcd(x.shape[1], chunks)


def _sums(vocabulary, logits, labels, weights, label_smoothing, z_loss):
    """Weighted sums over the tokens, and each token's log-normaliser and loss, 0 for padding."""
    highest = vocabulary.max(jnp.max(logits, axis=-1))
    exponentials = jnp.sum(jnp.exp(logits - highest[..., None]), axis=-1)
    log_z = highest + jnp.log(vocabulary.sum(exponentials))
    label_score = vocabulary.score(logits, labels)
    nll = log_z - label_score
    loss = nll
    if label_smoothing:
        even = log_z - vocabulary.mean(logits)
        loss = (1.0 - label_smoothing) * nll + label_smoothing * even
    if z_loss:
        loss = loss + z_loss * jnp.square(log_z)
    values = {"loss": loss, "nll": nll, "correct": (label_score >= highest).astype(jnp.float32)}
    sums = {k: jnp.sum(jnp.where(weights != 0, v * weights, 0.0)) for k, v in values.items()}
    return {**sums, "weight": jnp.sum(weights)}, log_z, jnp.where(weights != 0, loss, 0.0)


def _gradient(vocabulary, logits, log_z, labels, weights, label_smoothing, z_loss):
    """The loss's derivative by the logits in one pass: probabilities minus the smoothed target, weighted."""
    on_z = weights * (1.0 + 2.0 * z_loss * log_z)
    even = weights * (label_smoothing / vocabulary.size)
    probabilities = jnp.exp(logits - log_z[..., None])
    is_label = jnp.arange(logits.shape[-1]) == vocabulary.here(labels)[..., None]
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
    joined = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])  # noqa: E731
    return total, jax.tree.map(joined, beside)


def _cut(arrays, chunks: int):
    """[B T ...] -> [chunks B T/chunks ...]: along T, so that a batch sharded over B stays so."""

    def cut(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0], chunks, -1, *x.shape[2:]), 1, 0)

    return jax.tree.map(cut, arrays)
