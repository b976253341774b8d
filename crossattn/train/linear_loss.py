"""Cross-entropy fused with the output layer: logits are computed once and never stored.

The output layer of a small model is a third of its work. The forward pass computes the gradient from the
logits at once, which leaves three matrix products and one exponential, and holds one chunk of logits at a
time. On a mesh each device loops over the chunks of its own tokens: the table is gathered once, and its
gradient is summed over devices once.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from crossattn.axes import placed
from crossattn.rows import OwnTokens
from crossattn.train.losses import logits_gradient, token_losses, weighted_sums


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
    """Computes ``losses.cross_entropy`` of the logits ``hidden table^T``, with the same results and sums.

    Args:
      hidden: the vectors before the output layer.
      table: the output layer, one row a token.
      labels: the token to predict.
      weights: weight of each token; 0 for padding.
      label_smoothing: see ``cross_entropy``.
      z_loss: see ``cross_entropy``.
      chunks: parts of the T axis; more parts hold fewer logits at once.

    Raises:
      ValueError: ``chunks`` does not divide T, or label_smoothing is outside [0, 1).
    Source: the fused form, Hsu et al. 2024, "Liger Kernel", section 3.2.
    """
    if hidden.shape[1] % chunks:
        raise ValueError(
            f"chunks is {chunks}; expected a divisor of the length, {hidden.shape[1]}."
        )
    options = (float(label_smoothing), float(z_loss), chunks)
    sums: Any = _sums(hidden, table, labels, weights.astype(jnp.float32), *options)
    return sums["loss"], jax.lax.stop_gradient(sums)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _sums(hidden, table, labels, weights, label_smoothing, z_loss, chunks):
    def own(table, over, *tokens):
        def chunk(x, labels, weights):
            logits = _logits(x, table)
            per_token, _ = token_losses(logits, labels, label_smoothing, z_loss, over)
            return weighted_sums(per_token, weights), None

        return *_over_chunks(chunk, tokens, _own_chunks(tokens, chunks)), None

    return _by_device(own, table, (hidden, labels, weights))[0]


def _forward(hidden, table, labels, weights, label_smoothing, z_loss, chunks):
    options = label_smoothing, z_loss

    def own(vocabulary, over, *tokens):
        count = _own_chunks(tokens, chunks)
        # The gradient of a single chunk is the whole, and sent to other devices as it is.
        added = table.dtype if count == 1 else jnp.float32

        def chunk(x, labels, weights):
            logits = _logits(x, vocabulary)
            per_token, log_z = token_losses(logits, labels, *options, over)
            d_logits = logits_gradient(logits, labels, weights, log_z, *options, over)
            d_logits = d_logits.astype(x.dtype)
            d_x = jax.lax.psum(jnp.einsum("btv,vd->btd", d_logits, vocabulary), over)
            d_table = jnp.einsum("btv,btd->vd", d_logits, x, preferred_element_type=added)
            d_weights = jnp.where(weights != 0, per_token[0], 0.0)
            sums = weighted_sums(per_token, weights)
            return (sums, d_table), (placed(d_x, "embed"), d_weights)

        (sums, d_table), of_tokens = _over_chunks(chunk, tokens, count)
        return sums, of_tokens, d_table.astype(table.dtype)

    sums, (d_hidden, d_weights), d_table = _by_device(own, table, (hidden, labels, weights))
    return sums, (d_hidden, d_table, d_weights)


def _backward(label_smoothing, z_loss, chunks, residuals, cotangents):
    d_loss = cotangents["loss"]
    d_hidden, d_table, d_weights = jax.tree.map(lambda d: (d * d_loss).astype(d.dtype), residuals)
    return d_hidden, d_table, None, d_weights


_sums.defvjp(_forward, _backward)


def _logits(x: Float[Array, "B T D"], table: Float[Array, "V D"]) -> Float[Array, "B T V"]:
    logits = jnp.einsum("btd,vd->btv", x, table, preferred_element_type=jnp.float32)
    return placed(logits, "vocab")


def _by_device(own: Callable, table: Array, tokens: tuple) -> tuple[Any, Any, Any]:
    """Calls ``own(rows of the table, mesh axes that split them, *tokens)`` on each device.

    Returns sums, arrays [B T ...] of the tokens, and the table's gradient, as ``own`` does.
    """
    hidden, labels, _ = tokens
    here = OwnTokens.of(table, labels)
    if here is None:
        return own(table.astype(hidden.dtype), (), *tokens)
    split = here.split

    def each(part, *tokens):
        gathered = here.gathered(part.astype(hidden.dtype))
        sums, of_tokens, d_table = own(gathered, here.kept, *tokens)
        if d_table is not None:
            d_table = here.scattered(d_table.astype(hidden.dtype)).astype(part.dtype)
        return jax.tree.map(lambda x: x.reshape([1] * len(split)), sums), of_tokens, d_table

    out = PartitionSpec(*split), here.rows, here.places
    sums, of_tokens, d_table = here.each(each, out, table, *tokens)
    return jax.tree.map(jnp.sum, sums), of_tokens, d_table


def _own_chunks(tokens: tuple, chunks: int) -> int:
    """Returns the number of chunks of a device's part of the length."""
    return math.gcd(tokens[0].shape[1], chunks)


def _over_chunks(chunk, arrays, count):
    """Calls ``chunk`` on pieces of the T axis; adds its first results up, and joins its second along T."""
    if count == 1:
        return chunk(*arrays)

    def cut(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0], count, -1, *x.shape[2:]), 1, 0)

    def joined(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])

    def body(total, piece):
        added, of_tokens = chunk(*piece)
        return jax.tree.map(jnp.add, total, added), of_tokens

    pieces = jax.tree.map(cut, arrays)
    shapes = jax.eval_shape(chunk, *jax.tree.map(lambda x: x[0], pieces))[0]
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    total, of_tokens = jax.lax.scan(body, zeros, pieces)
    return total, jax.tree.map(joined, of_tokens)
