"""A RETRO, written from outside: a chunk of a text reads neighbours that were retrieved for the one before.

Source: Borgeaud et al. 2022, "Improving Language Models by Retrieving from Trillions of Tokens"; the encoder
of neighbours reads the embeddings of their chunk, not its activations.
"""

from crossattn.nn import (
    Autoregressive,
    Block,
    BlockConfig,
    DecoderBlock,
    DecoderStack,
    Encoded,
    Stack,
    TokenInput,
    TokenOutput,
)
from crossattn.ops import masks


class Retro(Autoregressive):
    def __init__(self, vocab_size, dim, chunk, *, periods=2, rngs, **layout):
        shape = BlockConfig.of(dim, num_heads=4, mlp_dim=2 * dim)
        self.target_input = TokenInput(vocab_size, dim, positions="sinusoidal", rngs=rngs)

        def neighbour(rngs):
            return Block(
                attention=shape.self_attention(rngs),
                cross=shape.cross_attention(rngs, memory_dim=dim, reads="chunk"),
                feedforward=shape.feedforward(rngs),
            )

        def retro(rngs):
            reads = dict(chunk=chunk, memory_dim=dim, relative=True)
            return Block(
                attention=shape.self_attention(rngs, causal=True),
                chunked=shape.chunked_attention(rngs, **reads),
                feedforward=shape.feedforward(rngs),
            )

        plain = lambda rngs: DecoderBlock(shape, None, rngs=rngs)  # noqa: E731
        self.encoder = Stack(neighbour, 1, rngs=rngs)
        self.decoder = DecoderStack(
            shape, periods, build=[plain, retro], positions="sinusoidal", **layout, rngs=rngs
        )
        self.output = TokenOutput(vocab_size, dim, rngs=rngs)
        self.chunk, self.dim = chunk, dim

    def encode(self, chunks, neighbours):
        """Vectors [B C K R D] of the neighbours [B C K R] of chunks [B C m]; token 0 is padding."""
        x = self.target_input(neighbours.reshape(-1, *neighbours.shape[-2:]))
        read = {"chunk": self.target_input(chunks.reshape(-1, self.chunk))}
        mask = masks.key_padding(neighbours.reshape(x.shape[:-1]) > 0)
        x, _ = self.encoder(x, memories=read, mask=mask)
        return Encoded(x.reshape(*neighbours.shape, self.dim), neighbours > 0)

    def hidden(self, tokens, neighbours):
        B, C = neighbours.shape[:2]
        chunks = tokens[:, : C * self.chunk].reshape(B, C, self.chunk)
        states = self.decoder.read(neighbours=self.encode(chunks, neighbours))
        return self.decoder(self.target_input(tokens), states)[0]

    def __call__(self, tokens, neighbours):
        return self.logits(self.hidden(tokens, neighbours))

    def prefill(self, batch, num_beams, cache_length, *, shape, lookahead=0):
        """Room for K neighbours of R tokens, ``shape``, of each chunk to come."""
        room = (batch, cache_length // self.chunk, shape[0])
        states = self.decoder.read(neighbours=Encoded.empty(room, shape[1], self.dim))
        return self.decoder.prefill(states, batch, num_beams, cache_length + lookahead)

    def retrieved(self, states, number, chunk, neighbours):
        """States that read the neighbours [B K R] of the chunk [B m] of this number too."""
        encoded = self.encode(chunk[:, None], neighbours[:, None])
        return self.decoder.reread(states, chunk=number, neighbours=encoded)
