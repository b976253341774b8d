"""Distributions over tokens by attention to a source: the sum of weights over the places of each token.

A pointer-generator's head mixes it with a generated token. That distribution is never stored for a whole
text: a loss needs it a chunk of tokens at a time.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from crossattn.nn.layers import Embedding, linear
from crossattn.nn.outputs import TokenOutput
from crossattn.nn.sublayers import BlockConfig
from crossattn.types import AnyArray, Array, Float, Int

FLOOR = 1e-4
"""The probability of all tokens together where a model only points, so that no loss is infinite."""


def summed(
    weights: Float[AnyArray, "*B T S"], source: Int[AnyArray, "*B T S"], vocab_size: int
) -> Float[Array, "*B T V"]:
    """Computes sum_i a_i [x_i = w] of each token w, float32."""
    lead, S = weights.shape[:-1], weights.shape[-1]
    rows = jnp.arange(math.prod(lead))[:, None]
    found = jnp.zeros((math.prod(lead), vocab_size), jnp.float32)
    found = found.at[rows, source.reshape(-1, S)].add(weights.reshape(-1, S))
    return found.reshape(*lead, vocab_size)


def pointed(
    weights: Float[AnyArray, "*B T S"], source: Int[AnyArray, "*#B S"], vocab_size: int
) -> Float[Array, "*B T V"]:
    """Computes log p of every token of a model that only points, float32.

    All tokens share ``FLOOR``; where nothing may be read, all are alike.

    Source: Kadlec et al. 2016, "Text Understanding with the Attention Sum Reader Network", equation 3.
    """
    weights = weights.astype(jnp.float32)
    source = jnp.broadcast_to(source[..., None, :], weights.shape)
    rest = jnp.where(weights.sum(-1, keepdims=True) > 0, FLOOR, 1.0)
    return jnp.log((1 - FLOOR) * summed(weights, source, vocab_size) + rest / vocab_size)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Copying:
    """What ``CopyOutput`` reads of each step; all have the batch axes and T.

    Attributes:
      vectors: of the decoder, [*B T D].
      weights: of attention to the source, [*B T S]; a row that may read nothing is 0.
      source: tokens of the source, [*B T S].
      gate: logit of p_gen, [*B T].
    """

    vectors: Float[AnyArray, "*B T D"]
    weights: Float[AnyArray, "*B T S"]
    source: Int[AnyArray, "*B T S"]
    gate: Float[AnyArray, "*B T"]


class CopyOutput(nnx.Module):
    """The mixture p(w) = p_gen p_vocab(w) + (1 - p_gen) sum_i a_i [x_i = w].

    ``a`` are weights of attention to the source's tokens ``x``, and the gate is
    p_gen = sigmoid(w_c . sum_i a_i h_i + w_s . s + w_x . e + b), of the encoder's vectors h, the decoder's
    vector s and the embedding e of its last token. A step that may read nothing generates.

    Args:
      tokens: gives p_vocab.
      vocab_size: V.
      block: shape of the decoder's blocks.
      memory_dim: size of the encoder's vectors, M.

    Source: See et al. 2017, "Get To The Point", equations 8 and 9.
    """

    def __init__(
        self,
        tokens: TokenOutput,
        vocab_size: int,
        block: BlockConfig,
        memory_dim: int,
        *,
        rngs: nnx.Rngs,
    ):
        options: dict[str, Any] = dict(
            in_axes=("embed",), out_axes=(None,), dtype=block.dtype, rngs=rngs
        )
        self.tokens = tokens
        self.of_vector = linear(block.dim, 1, **options)
        self.of_input = linear(block.dim, 1, use_bias=False, **options)
        self.of_source = linear(memory_dim, 1, use_bias=False, **options)
        self.vocab_size = vocab_size

    def read(self, encoded: Float[Array, "*B S M"]) -> Float[Array, "*B S"]:
        """Computes w_c . h of each vector of the encoder, whose mean by ``weights`` is the gate's."""
        return self.of_source(encoded)[..., 0].astype(jnp.float32)

    def __call__(
        self,
        vectors: Float[Array, "*B T D"],
        weights: Float[Array, "*B T S"],
        inputs: Float[Array, "*B T D"],
        source: Int[Array, "*#B S"],
        read: Float[Array, "*#B S"],
    ) -> Copying:
        """Computes the gate of each step.

        Args:
          vectors: of the decoder.
          weights: of attention to the source.
          inputs: embeddings of the tokens that were read.
          source, read: tokens, and the result of ``read``.
        """
        weights = weights.astype(jnp.float32)
        source = jnp.broadcast_to(source[..., None, :], weights.shape)
        gate = (self.of_vector(vectors) + self.of_input(inputs))[..., 0].astype(jnp.float32)
        return Copying(vectors, weights, source, gate + (weights * read[..., None, :]).sum(-1))

    def logits(self, hidden: Copying, embedding: Embedding) -> Float[Array, "*B T V"]:
        """Computes log p of every token, float32."""
        return self._mixed(hidden, self._generated(hidden, embedding))

    def losses(
        self,
        hidden: Copying,
        labels: Int[Array, "B T"],
        embedding: Embedding,
        *,
        chunks: int = 1,
    ) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
        """Computes -log p of each label, and whether it is the likeliest token (without gradient).

        Args:
          hidden: the result of a call.
          labels: tokens.
          embedding: whose table may be that of the output.
          chunks: parts of the T axis, whose distributions are computed one after the other, and again for
            the gradient.

        Raises:
          ValueError: ``chunks`` does not divide T.
        """
        T = labels.shape[-1]
        if T % chunks:
            raise ValueError(f"chunks is {chunks}; expected a divisor of the length, {T}.")
        each = jax.checkpoint(functools.partial(self._losses, embedding))
        if chunks == 1:
            return each((hidden, labels))

        def cut(x: Array) -> Array:
            return jnp.moveaxis(x.reshape(x.shape[0], chunks, T // chunks, *x.shape[2:]), 1, 0)

        found = jax.lax.map(each, jax.tree.map(cut, (hidden, labels)))
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(labels.shape), found)

    def _losses(self, embedding: Embedding, part: tuple[Copying, Array]) -> tuple[Array, Array]:
        hidden, labels = part
        generated = self._generated(hidden, embedding)
        # The label's probability alone needs no table of copies; whether it is the likeliest does.
        own = jnp.take_along_axis(generated, labels[..., None], axis=-1)[..., 0]
        copied = jnp.where(hidden.source == labels[..., None], hidden.weights, 0).sum(-1)
        log_gen, log_copy = _gates(hidden)
        log_p = jnp.logaddexp(log_gen + own, log_copy + _log(copied))
        best = self._mixed(*jax.lax.stop_gradient((hidden, generated))).argmax(-1)
        return -log_p, (best == labels).astype(jnp.float32)

    def _generated(self, hidden: Copying, embedding: Embedding) -> Float[Array, "*B T V"]:
        """Computes log p_vocab."""
        vectors: Any = hidden.vectors
        return jax.nn.log_softmax(self.tokens.logits(vectors, embedding))

    def _mixed(self, hidden: Copying, generated: Float[Array, "*B T V"]) -> Float[Array, "*B T V"]:
        log_gen, log_copy = _gates(hidden)
        copied = _log(summed(hidden.weights, hidden.source, self.vocab_size))
        copied = log_copy[..., None] + copied
        return jnp.logaddexp(log_gen[..., None] + generated, copied)


def _gates(hidden: Copying) -> tuple[Float[Array, "*B T"], Float[Array, "*B T"]]:
    """Returns log p_gen and log (1 - p_gen)."""
    reads = hidden.weights.sum(-1) > 0
    log_gen, log_copy = jax.nn.log_sigmoid(hidden.gate), jax.nn.log_sigmoid(-hidden.gate)
    return jnp.where(reads, log_gen, 0.0), jnp.where(reads, log_copy, -jnp.inf)


def _log(x: Array) -> Array:
    """Computes the logarithm, with a gradient of 0 at 0."""
    return jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1.0)), -jnp.inf)
