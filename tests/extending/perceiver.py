"""A Perceiver, written from outside: a few learnt latents read inputs of any number, and think.

Source: Jaegle et al. 2021, "Perceiver: General Perception with Iterative Attention".
"""

import jax
from flax import nnx

from crossattn.nn import Block, BlockConfig, ClassOutput, Encoded, EncoderBlock, Stack


class Perceiver(nnx.Module):
    def __init__(self, dim, input_dim, num_latents, num_classes, *, periods=2, rngs):
        shape = BlockConfig.of(dim, num_heads=4, mlp_dim=2 * dim, activation="gelu")
        latents = jax.random.normal(rngs.params(), (num_latents, dim)) * 0.02
        self.latents = nnx.Param(latents, axes=(None, "embed"))

        def read(rngs):
            return Block(
                cross=shape.cross_attention(rngs, memory_dim=input_dim, reads="inputs"),
                feedforward=shape.feedforward(rngs),
            )

        think = lambda rngs: EncoderBlock(shape, rngs=rngs)  # noqa: E731
        self.stack = Stack([read, think], periods, share=True, rngs=rngs)
        self.norm = shape.normalise(rngs)
        self.output = ClassOutput(dim, num_classes, rngs=rngs)

    def encode(self, inputs, valid=None):
        """Latents [*B L D] that have read inputs [*B S M]."""
        latents, _ = self.stack(self.latents[...], memories={"inputs": Encoded(inputs, valid)})
        return Encoded(self.norm(latents))

    def __call__(self, inputs, valid=None):
        """Logits of classes [*B C]."""
        return self.output.logits(self.encode(inputs, valid).vectors.mean(-2))
