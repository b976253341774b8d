"""A recurrent translator, written from outside: cells read the source from both ends, others attend to it.

    source [S] ─► embed ─► cells, from both ends ─► m [S D] ──────────┐ keys, values
                                         │ last states                │
    target [T] ─► embed ─► x ──────────► s_0 ─► cells that attend ◄───┘ ─► o [T D] ─► logits [T V]

    s_0 = tanh(W [m_S; m_1])
    c_t = attend(s_(t-1));  s_t = cell([x_t; c_t], s_(t-1));  o_t = maxout(W [s_t; x_t; c_t] + b)    Bahdanau
    s_t = cell([x_t; o_(t-1)], s_(t-1));  c_t = attend(s_t);  o_t = tanh(W [c_t; s_t])               Luong

Source: Bahdanau, Cho and Bengio 2015, "Neural Machine Translation by Jointly Learning to Align and
Translate", section 3 and appendix A; Luong, Pham and Manning 2015, "Effective Approaches to Attention-based
Neural Machine Translation", section 3.
"""

import jax.numpy as jnp

from crossattn.nn import (
    AdditiveAttention,
    Autoregressive,
    Encoded,
    RecurrentDecoder,
    RecurrentStack,
    TokenInput,
    TokenOutput,
    linear,
)


class Recurrent(Autoregressive):
    """Source tokens [*B S] and target tokens so far [*B T] in, logits of the next one [*B T V] out."""

    def __init__(
        self,
        source_size,
        vocab_size,
        dim,
        *,
        cell="gru",
        attention=AdditiveAttention,
        layers=1,
        rngs,
    ):
        scheme = dict(positions="none")
        self.source_input = TokenInput(source_size, dim, **scheme, rngs=rngs)
        self.target_input = TokenInput(vocab_size, dim, **scheme, rngs=rngs)
        self.encoder = RecurrentStack(cell, layers, dim, dim, rngs=rngs)
        axes = dict(in_axes=("embed",), out_axes=(None, None, "mlp"))
        parts = {"gru": 1, "lstm": 2}[cell]
        self.bridge = linear(dim, (layers, parts, dim), **axes, rngs=rngs)
        before = attention is AdditiveAttention
        reads = dict(memory_dim=dim, before=before, feeding=not before)
        self.decoder = RecurrentDecoder(
            cell, layers, dim, attention=attention(dim, rngs=rngs), **reads, rngs=rngs
        )
        self.output = TokenOutput(vocab_size, dim, tied=True, rngs=rngs)

    def encode(self, source):
        """Vectors [*B S D] of the source, and the decoder's first states [*B 1 L P D]; token 0 is padding."""
        valid = source > 0
        x, states = self.encoder(self.source_input(source), valid.astype(jnp.int32))
        last = self.encoder.final(states[-1], valid[..., None, :])[..., 0, :]
        return Encoded(x, valid), jnp.tanh(self.bridge(last))

    def __call__(self, source, target_in):
        encoded, first = self.encode(source)
        carry = self.decoder.start(first[..., 0, :, :, :])
        return self.logits(
            self.decoder(self.target_input(target_in), carry, self.decoder.read(encoded))[0]
        )

    def prefill(self, batch, num_beams, cache_length, *, source):
        """States that have read the source [B S]; they have no length."""
        return self.decoder.prefill(*self.encode(source), batch, num_beams)
