"""A recurrent translator, written from outside: a gated cell that reads the source with attention.

Source: Bahdanau et al. 2015, with dot products for scores; the cell, Cho et al. 2014.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx

import crossattn as xa


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentStates:
    """One vector a sequence [B J D], and the source. It cannot go back, so there is no ``rewind``."""

    vector: jax.Array
    source: xa.Memory

    def select(self, parents):
        return replace(self, vector=jnp.take_along_axis(self.vector, parents[..., None], axis=1))

    @property
    def source_valid(self):
        return self.source.readable


class RecurrentTranslator(xa.nn.Autoregressive):
    def __init__(self, vocab_size, dim, *, rngs):
        self.embedding = nnx.Embed(vocab_size, dim, rngs=rngs)
        self.attention = xa.nn.MultiHeadAttention(dim, 1, rngs=rngs)
        self.gates = nnx.Linear(3 * dim, 2 * dim, rngs=rngs)
        self.candidate = nnx.Linear(3 * dim, dim, rngs=rngs)
        self.logits = nnx.Linear(dim, vocab_size, rngs=rngs)
        self.dim = dim

    def prefill(self, batch, num_beams, cache_length, *, source, source_segment_ids=None):
        valid = None if source_segment_ids is None else source_segment_ids > 0
        memory = self.attention.memory(self.embedding(source), valid=valid)
        return RecurrentStates(jnp.zeros((batch, num_beams, self.dim)), memory)

    def decode_hidden(self, tokens, states, *, return_weights=False):
        def read(h, x):  # [B J D]
            query = h[:, :, None]
            context, weights = self.attention(query, states.source, return_weights=True)
            x = jnp.concatenate([x, context[:, :, 0]], axis=-1)
            gates = nnx.sigmoid(self.gates(jnp.concatenate([x, h], axis=-1)))
            update, reset = jnp.split(gates, 2, axis=-1)
            new = jnp.tanh(self.candidate(jnp.concatenate([x, reset * h], axis=-1)))
            h = update * h + (1 - update) * new
            return h, (h, weights[:, :, :, 0])

        embedded = jnp.moveaxis(self.embedding(tokens), 2, 0)  # [T B J D]
        vector, (hidden, weights) = jax.lax.scan(read, states.vector, embedded)
        found = jnp.moveaxis(hidden, 0, 2), replace(states, vector=vector)
        return (*found, jnp.moveaxis(weights, 0, 3)[None]) if return_weights else found
