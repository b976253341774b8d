"""A Flamingo, written from outside: before each block of a language model, a gated one reads images.

Source: Alayrac et al. 2022, "Flamingo: a Visual Language Model for Few-Shot Learning".
"""

import jax.numpy as jnp

from crossattn.nn import (
    Autoregressive,
    Block,
    BlockConfig,
    DecoderBlock,
    DecoderStack,
    TokenInput,
    TokenOutput,
)

from .perceiver import Perceiver


class Flamingo(Autoregressive):
    def __init__(self, vocab_size, dim, image_dim, *, periods=2, rngs, **layout):
        shape = BlockConfig.of(dim, num_heads=4, mlp_dim=2 * dim)
        scheme = dict(positions="sinusoidal")
        self.target_input = TokenInput(vocab_size, dim, **scheme, rngs=rngs)
        self.resampler = Perceiver(dim, image_dim, num_latents=3, num_classes=1, rngs=rngs)

        def gated(rngs):
            return Block(
                gated=shape.cross_attention(rngs, memory_dim=dim, reads="images", gated=True),
                gated_feedforward=shape.feedforward(rngs, gated=True),
            )

        block = lambda rngs: DecoderBlock(shape, None, rngs=rngs)  # noqa: E731
        self.decoder = DecoderStack(
            shape, periods, build=[gated, block], positions="sinusoidal", **layout, rngs=rngs
        )
        self.output = TokenOutput(vocab_size, dim, rngs=rngs)

    def encode(self, images):
        """Latents [B (I 3) D] of images [B I S M]."""
        latents = self.resampler.encode(images).vectors
        return latents.reshape(latents.shape[0], -1, latents.shape[-1])

    def seen(self, positions, places):
        """Tokens read the last of the images before them, by its place."""
        last = (positions[..., None] >= places[:, None]).sum(-1) - 1
        return {"images": (last[..., None] == jnp.arange(3 * places.shape[-1]) // 3)[:, None]}

    def hidden(self, tokens, images, places):
        states = self.decoder.read(images=self.encode(images))
        masks = self.seen(jnp.arange(tokens.shape[-1]), places)
        return self.decoder(self.target_input(tokens), states, memory_masks=masks)[0]

    def prefill(self, batch, num_beams, cache_length, *, images, places, lookahead=0):
        states = self.decoder.read(images=self.encode(images))
        length = cache_length + lookahead
        return self.decoder.prefill(states, batch, num_beams, length, context=places)

    def __call__(self, tokens, images, places):
        return self.logits(self.hidden(tokens, images, places))
