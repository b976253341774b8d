"""A pointer-generator, written from outside: the next token is generated, or copied from the source.

    source x [S] ─► embed ─► blocks ─► norm ─► m [S D] ──────────────┐ keys, values
    target [T] ──► embed ─► e ─► blocks: masked self-attention, reads ◄┘ ─► s [T D]
                                            └─ a [T S], weights of a head of the last block
    p(w) = p_gen p_vocab(w) + (1 - p_gen) sum_i a_i [x_i = w]
    p_gen = sigmoid(w_c . sum_i a_i m_i + w_s . s + w_x . e + b)

Source: See et al. 2017, "Get To The Point: Summarization with Pointer-Generator Networks", section 2.2, with
a Transformer in place of its LSTMs.
"""

from crossattn.nn import (
    Autoregressive,
    BlockConfig,
    CopyOutput,
    DecoderStack,
    Encoded,
    EncoderBlock,
    Stack,
    TokenInput,
    TokenOutput,
    layer_weights,
)
from crossattn.ops import masks


class Pointer(Autoregressive):
    """Source tokens [*B S] and target tokens so far [*B T] in, log p of the next one [*B T V] out."""

    def __init__(self, vocab_size, dim, *, layers=2, num_heads=2, rngs, **layout):
        shape = BlockConfig.of(dim, num_heads, mlp_dim=2 * dim)
        scheme = dict(positions="sinusoidal")
        self.target_input = TokenInput(vocab_size, dim, **scheme, rngs=rngs)  # the source's too
        self.encoder = Stack(lambda rngs: EncoderBlock(shape, rngs=rngs), layers, rngs=rngs)
        self.encoder_norm = shape.normalise(rngs)
        self.decoder = DecoderStack(
            shape, layers, memory_dim=dim, positions="sinusoidal", **layout, rngs=rngs
        )
        words = TokenOutput(vocab_size, dim, tied=True, rngs=rngs)
        self.output = CopyOutput(words, vocab_size, shape, dim, rngs=rngs)

    def encode(self, source):
        """Vectors [*B S D] of the source; token 0 is padding."""
        x, _ = self.encoder(self.target_input(source), mask=masks.key_padding(source > 0))
        return Encoded(self.encoder_norm(x), source > 0)

    def copying(self, x, weights, tokens, source, read):
        """A ``Copying`` of vectors [*B T D], weights [L *B N T S], tokens [*B T], and of the source."""
        inputs = self.target_input.embedding(tokens)
        return self.output(x, weights[-1][..., 0, :, :], inputs, source, read)

    def __call__(self, source, target_in):
        encoded = self.encode(source)
        states = self.decoder.read(source=encoded)
        x = self.target_input(target_in)
        x, states = self.decoder(x, states, capture=self.decoder.reading())
        read = self.output.read(encoded.vectors)
        return self.logits(self.copying(x, layer_weights(states), target_in, source, read))

    def prefill(self, batch, num_beams, cache_length, *, source, lookahead=0):
        """States that have read the source [B S], and know its tokens."""
        encoded = self.encode(source)
        states, length = self.decoder.read(source=encoded), cache_length + lookahead
        context = {"source": source, "read": self.output.read(encoded.vectors)}
        return self.decoder.prefill(states, batch, num_beams, length, context)

    def decode_hidden(self, tokens, states, *, return_weights=False):
        """What ``logits`` reads of the next tokens [B J T], the new states, and the weights if asked for."""
        x, states, weights = self.decoder.decode(self.embed, tokens, states, return_weights=True)
        source, read = (states.context[name][:, None] for name in ("source", "read"))
        hidden = self.copying(x, weights, tokens, source, read)
        return (hidden, states, weights) if return_weights else (hidden, states)
