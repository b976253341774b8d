"""A CrossViT, written from outside: patches of two sizes, and each class token reads the other's patches.

    small patches ─► blocks ─► class token ─► in the other's width, reads the large ones ─► back ─► stage 2
    large patches ─► blocks ─► class token ─► in the other's width, reads the small ones ─► back ─► stage 2

    c' = f(c);  y = c' + Attend(LN c', LN [c'; patches]);  c <- g(y),   f, g = linear(GELU(LN ·))
    logits are means of both branches'

Source: Chen et al. 2021, "CrossViT: Cross-Attention Multi-Scale Vision Transformer for Image Classification",
equations 4 to 6.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from crossattn.nn import (
    Block,
    BlockConfig,
    ClassOutput,
    EncoderBlock,
    PatchEmbedding,
    Stack,
    linear,
)


class Projection(nnx.Module):
    """A class token [*B 1 D] in the width of the other branch [*B 1 E]."""

    def __init__(self, shape, dim, *, rngs):
        self.norm = shape.normalise(rngs)
        axes = dict(in_axes=("embed",), out_axes=("mlp",))
        self.linear = linear(shape.dim, dim, **axes, rngs=rngs)

    def __call__(self, token):
        return self.linear(jax.nn.gelu(self.norm(token), approximate=False))


class Branch(nnx.Module):
    """Patches of one size: in each stage, blocks, and then what its class token reads."""

    def __init__(self, shape, other, patch, image_size, channels, num_classes, stages, *, rngs):
        self.patches = PatchEmbedding(image_size, patch, channels, shape.dim, rngs=rngs)
        block = lambda rngs: EncoderBlock(shape, rngs=rngs)  # noqa: E731
        reads = dict(memory_dim=other.dim, reads="other")

        def times(make):
            return nnx.List([make() for _ in range(stages)])

        self.stacks = times(lambda: Stack(block, 1, rngs=rngs))
        self.there = times(lambda: Projection(shape, other.dim, rngs=rngs))
        self.exchanges = times(lambda: Block(cross=other.cross_attention(rngs, **reads)))
        self.back = times(lambda: Projection(other, shape.dim, rngs=rngs))
        self.norm = shape.normalise(rngs)
        self.output = ClassOutput(shape.dim, num_classes, rngs=rngs)

    def exchange(self, stage, own, other):
        """Vectors [*B S D] whose class token, the first, has read the patches of ``other`` [*B Z E]."""
        token, block = self.there[stage](own[..., :1, :]), self.exchanges[stage]
        read = jnp.concatenate([token, other[..., 1:, :]], axis=-2)
        # One norm is that of the query and of what it reads, which it is among.
        read = block.cross_residual.pre_norm(read)
        token, _ = block(token, memories={"other": read})
        return jnp.concatenate([self.back[stage](token), own[..., 1:, :]], axis=-2)

    def logits(self, x):
        """Logits [*B C] of vectors [*B S D], by their class token."""
        return self.output.logits(self.norm(x[..., 0, :]))


class CrossViT(nnx.Module):
    """Pictures [*B H W C] in, logits of classes [*B K] out."""

    def __init__(self, dims, patches, image_size, num_classes, *, channels=3, stages=2, rngs):
        shape = dict(num_heads=2, activation="gelu")
        small, large = (BlockConfig.of(dim, mlp_dim=2 * dim, **shape) for dim in dims)
        rest = image_size, channels, num_classes, stages
        self.small = Branch(small, large, patches[0], *rest, rngs=rngs)
        self.large = Branch(large, small, patches[1], *rest, rngs=rngs)
        self.stages = stages

    def __call__(self, image):
        small, large = self.small.patches(image), self.large.patches(image)
        for stage in range(self.stages):
            small, _ = self.small.stacks[stage](small)
            large, _ = self.large.stacks[stage](large)
            small, large = (
                self.small.exchange(stage, small, large),
                self.large.exchange(stage, large, small),
            )
        return (self.small.logits(small) + self.large.logits(large)) / 2
