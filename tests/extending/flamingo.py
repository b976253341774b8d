"""A Flamingo, written from outside: before each block of a language model, a gated one reads images.

Source: Alayrac et al. 2022, "Flamingo: a Visual Language Model for Few-Shot Learning".
"""

import jax.numpy as jnp
from flax import nnx

from crossattn.nn import (
    Block,
    BlockConfig,
    DecoderBlock,
    OutputConfig,
    Stack,
    TokenInput,
    TokenOutput,
)

from .perceiver import Perceiver


class Flamingo(nnx.Module):
    def __init__(self, vocab_size, dim, image_dim, *, periods=2, scan=False, rngs):
        shape = BlockConfig.of(dim, num_heads=4, mlp_dim=2 * dim)
        scheme = dict(positions="sinusoidal", max_length=64)
        self.input = TokenInput(vocab_size, dim, **scheme, rngs=rngs)
        self.resampler = Perceiver(dim, image_dim, num_latents=3, num_classes=1, rngs=rngs)

        def gated(rngs):
            return Block(
                gated=shape.cross_attention(rngs, memory_dim=dim, reads="images", gated=True),
                gated_feedforward=shape.feedforward(rngs, gated=True),
            )

        block = lambda rngs: DecoderBlock(shape, None, rngs=rngs)  # noqa: E731
        self.decoder = Stack([gated, block], periods, scan=scan, rngs=rngs)
        self.norm = shape.normalise(rngs)
        self.output = TokenOutput(vocab_size, shape, OutputConfig(), tied=True, rngs=rngs)

    def hidden(self, tokens, images, places):
        """Vectors [B T D] of tokens that read the last of the images [B I S M] before them, by its place."""
        latents = self.resampler.encode(images).vectors
        rows, count, size, dim = latents.shape
        seen = (jnp.arange(tokens.shape[-1])[:, None] >= places[:, None]).sum(-1)
        image = jnp.arange(count * size) // size
        last = seen[..., None] - 1 == image
        x, _ = self.decoder(
            self.input(tokens),
            memories={"images": latents.reshape(rows, count * size, dim)},
            memory_masks={"images": last[:, None]},
        )
        return self.norm(x)

    def logits(self, hidden):
        return self.output.logits(self.output.transform(hidden), self.input.embedding)

    def __call__(self, tokens, images, places):
        return self.logits(self.hidden(tokens, images, places))
