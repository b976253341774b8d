"""Text to speech, written from outside: a decoder whose inputs and outputs are frames of a spectrogram.

Source: Li et al. 2019, "Neural Speech Synthesis with Transformer Network".
"""

import jax.numpy as jnp

from crossattn.nn import (
    Autoregressive,
    BlockConfig,
    DecoderStack,
    Encoded,
    EncoderBlock,
    FeedForward,
    Stack,
    TokenInput,
    VectorOutput,
    linear,
)
from crossattn.ops import masks
from crossattn.ops.positions.sinusoids import sinusoidal


class Speaker(Autoregressive):
    def __init__(self, letters, frame, dim, *, rngs, **layout):
        shape = BlockConfig.of(dim, num_heads=4, mlp_dim=2 * dim)
        scheme = dict(positions="sinusoidal")
        self.source_input = TokenInput(letters, dim, **scheme, rngs=rngs)
        self.encoder = Stack(lambda rngs: EncoderBlock(shape, rngs=rngs), 1, rngs=rngs)
        axes = dict(in_axes=("embed",), out_axes=("embed",))
        self.frame = linear(frame, dim, **axes, rngs=rngs)
        self.prenet = FeedForward(dim, dim, rngs=rngs)
        self.decoder = DecoderStack(
            shape, 2, memory_dim=dim, positions="sinusoidal", **layout, rngs=rngs
        )
        self.output = VectorOutput(dim, frame, rngs=rngs)

    def encode(self, source):
        """Vectors of letters [B S]; letter 0 is padding."""
        mask = masks.key_padding(source > 0)
        return Encoded(self.encoder(self.source_input(source), mask=mask)[0], source > 0)

    def embed(self, frames, positions, context=None):
        x = self.prenet(self.frame(frames))
        return x + sinusoidal(positions, x.shape[-1])

    def logits(self, hidden):
        """The next frame [*B T F], and the logit [*B T] that it is the last."""
        return self.output(hidden)

    def __call__(self, source, frames):
        x = self.embed(frames, jnp.arange(frames.shape[-2]))
        return self.logits(self.decoder(x, self.decoder.read(source=self.encode(source)))[0])

    def prefill(self, batch, num_beams, cache_length, *, source):
        states = self.decoder.read(source=self.encode(source))
        return self.decoder.prefill(states, batch, num_beams, cache_length)
