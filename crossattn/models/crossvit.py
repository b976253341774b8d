"""CrossViT: one picture in patches of two sizes, and the class token of each reads the other's patches.

    small patches ─► layers of self-attention ─► class token ─► in width of large ─► reads ─► back ─┐
                                             └─ patches ───────────────────────┐      ▲           ├─► next
                                             ┌─ patches ───────────────────────┼──────┘           │   stage
    large patches ─► layers of self-attention ─► class token ─► in width of small ─► reads ─► back ─┘
    after the last stage: class tokens ─► norm ─► logits of each, and their mean

    c' = f(c), with f = linear(GELU(LN ·))            the class token of one branch in the other's width
    y  = c' + Attend(LN c', LN [c'; patches])         of the other branch
    c <- g(y), with g of the same form                back in its own width; patches stay as they are

A class token alone reads, so an exchange costs as many products as there are patches, not their square.

Source: Chen et al. 2021, "CrossViT: Cross-Attention Multi-Scale Vision Transformer for Image Classification",
equations 4 to 6 and figure 4.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from crossattn.nn.blocks import Block
from crossattn.nn.examples import vectors
from crossattn.nn.feedforward import activate
from crossattn.nn.layers import linear
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.outputs import ClassOutput, logits_of
from crossattn.nn.patches import PatchEmbedding, Size, resized
from crossattn.nn.stack import encoder_stack
from crossattn.nn.sublayers import BlockConfig, split
from crossattn.types import Array, Count, Float, Key


@dataclass(frozen=True)
class CrossViTConfig:
    """The shape of a CrossViT.

    Attributes:
      block: shape of the layers of the branch of small patches.
      large_dim, large_heads, large_mlp_dim: the same of the branch of large patches.
      small_patch, large_patch: sides of patches, in pixels of the branch's picture.
      small_layers, large_layers: layers of each branch in a stage.
      stages: number of stages, each of layers and an exchange.
      num_classes: of the logits.
      image_size: height and width of the learnt positions; other sizes interpolate them.
      channels: of a pixel.
      exchange: False blanks the patches that class tokens read: two models whose logits are averaged.
      small_size, large_size: the size to which each branch scales a picture; None does not scale it.
      scan, remat: of the layers of a branch, see ``Stack``.
    """

    block: BlockConfig
    large_dim: Count
    large_heads: Count
    large_mlp_dim: Count
    small_patch: Count
    large_patch: Count
    small_layers: Count
    large_layers: Count
    stages: Count
    num_classes: int
    image_size: Size
    channels: int = 3
    exchange: bool = True
    small_size: Size | None = None
    large_size: Size | None = None
    scan: bool = False
    remat: bool | str = False

    @property
    def large(self) -> BlockConfig:
        """The shape of the layers of the branch of large patches."""
        sizes = dict(dim=self.large_dim, num_heads=self.large_heads, mlp_dim=self.large_mlp_dim)
        return self.block.changed(**sizes)


def tiny(**changes: Any) -> CrossViTConfig:
    """Returns a small configuration for tests."""
    small = CrossViTConfig(
        BlockConfig.of(dim=16, num_heads=2, mlp_dim=32, activation="gelu"),
        large_dim=24, large_heads=2, large_mlp_dim=48, small_patch=2, large_patch=4,
        small_layers=1, large_layers=1, stages=2, num_classes=5, image_size=(8, 12),
    )  # fmt: skip
    return replace(small, **changes)


def example(config: CrossViTConfig, rows: int = 2, padding: int = 0) -> dict[str, Any]:
    """Draws random arguments of a call; see ``Architecture``."""
    return dict(image=vectors(rows, *config.image_size, config.channels))


class CrossViT(nnx.Module):
    """Pictures [*B H W C] in, logits of classes [*B C] out."""

    def __init__(self, config: CrossViTConfig, *, rngs: nnx.Rngs):
        small, large, size = config.block, config.large, config.image_size
        self.sizes = (config.small_size or size, config.large_size or size)
        self.image_size = size

        options: dict[str, Any] = dict(dtype=small.dtype, rngs=rngs)

        def patches(block: BlockConfig, size: Size, patch: int) -> PatchEmbedding:
            return PatchEmbedding(size, patch, config.channels, block.dim, **options)

        self.small_patches = patches(small, self.sizes[0], config.small_patch)
        self.large_patches = patches(large, self.sizes[1], config.large_patch)
        self.stages = nnx.List([Stage(config, rngs=rngs) for _ in range(config.stages)])
        self.small_norm, self.large_norm = small.normalise(rngs), large.normalise(rngs)
        self.small_output = ClassOutput(small.dim, config.num_classes, **options)
        self.large_output = ClassOutput(large.dim, config.num_classes, **options)
        self.small_dim = small.dim

    @on_any_mesh
    def hidden(
        self,
        image: Float[Array, "*B H W C"],
        *,
        key: Key[Array, ""] | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Computes the class tokens of both branches, concatenated [*B D], which the output layer reads.

        Args:
          image: [*B H W C].
          key: turns dropout on.
          return_weights: also return each stage's attention weights [*B N 1 1+S] of the small branch's class
            token (on itself, then on the large patches), and those of the large branch.
        """
        sizes = self._scaled(image)
        small = self.small_patches(resized(image, sizes[0]))
        large = self.large_patches(resized(image, sizes[1]))
        weights = []
        for stage, own in zip(self.stages, split(key, len(self.stages)), strict=True):
            small, large, read = stage(small, large, key=own, return_weights=return_weights)
            weights.append(read)
        tokens = self.small_norm(small[..., 0, :]), self.large_norm(large[..., 0, :])
        hidden = jnp.concatenate(tokens, axis=-1)
        return (hidden, weights) if return_weights else hidden

    @on_any_mesh
    def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B classes"]:
        """Computes logits of classes, float32: the mean of both branches."""
        small, large = jnp.split(hidden, [self.small_dim], axis=-1)
        return (self.small_output.logits(small) + self.large_output.logits(large)) / 2

    @logits_of(hidden)
    def __call__(self) -> Any:
        """Computes logits of classes [*B C]; the arguments of ``hidden``."""

    @on_any_mesh
    def patch_weights(self, image: Float[Array, "*B H W C"]) -> dict[str, Float[Array, "*B h w"]]:
        """Computes the weights of each class token on the other branch's patches at the last exchange.

        The weights are means over heads, without that of a token on itself.
        """
        _, weights = self.hidden(image, return_weights=True)
        small, large = (read[..., 0, 1:].mean(-2) for read in weights[-1])
        sizes = self._scaled(image)
        return {
            "large patches": self.large_patches.on_grid(small, image, sizes[1]),
            "small patches": self.small_patches.on_grid(large, image, sizes[0]),
        }

    def _scaled(self, image: Array) -> tuple[Size, Size]:
        """Returns the size to which each branch scales a picture."""
        height, width = np.divide(image.shape[-3:-1], self.image_size)
        small, large = ((round(height * h), round(width * w)) for h, w in self.sizes)
        return small, large


class Stage(nnx.Module):
    """Layers of both branches, then their exchange."""

    def __init__(self, config: CrossViTConfig, *, rngs: nnx.Rngs):
        small, large = config.block, config.large
        options: dict[str, Any] = dict(scan=config.scan, remat=config.remat, rngs=rngs)
        self.small = encoder_stack(small, config.small_layers, **options)
        self.large = encoder_stack(large, config.large_layers, **options)
        self.small_reads = Exchange(small, large, rngs=rngs)
        self.large_reads = Exchange(large, small, rngs=rngs)
        self.blank = not config.exchange

    def __call__(
        self,
        small: Float[Array, "*B S D"],
        large: Float[Array, "*B Z E"],
        *,
        key: Key[Array, ""] | None = None,
        return_weights: bool = False,
    ) -> tuple[Array, Array, tuple[Array | None, Array | None]]:
        """Computes both branches' vectors, and the attention weights of each class token."""
        keys = split(key, 4)
        small, _ = self.small(small, key=keys[0])
        large, _ = self.large(large, key=keys[1])
        seen = [jnp.zeros_like(x) if self.blank else x for x in (small, large)]
        new_small, small_read = self.small_reads(small, seen[1], keys[2], return_weights)
        new_large, large_read = self.large_reads(large, seen[0], keys[3], return_weights)
        return new_small, new_large, (small_read, large_read)


class Exchange(nnx.Module):
    """The class token of one branch reads the patches of the other.

    Args:
      own: shape of the branch whose class token reads.
      other: shape of the branch that it reads; its attention is of this width and has its heads.
    """

    def __init__(self, own: BlockConfig, other: BlockConfig, *, rngs: nnx.Rngs):
        self.there = Projection(own, other.dim, rngs=rngs)
        reads: dict[str, Any] = dict(memory_dim=other.dim, reads="patches")
        self.block = Block(cross=other.cross_attention(rngs, **reads))
        self.back = Projection(other, own.dim, rngs=rngs)

    def __call__(
        self,
        own: Float[Array, "*B S D"],
        other: Float[Array, "*B Z E"],
        key: Key[Array, ""] | None,
        return_weights: bool,
    ) -> tuple[Float[Array, "*B S D"], Float[Array, "*B N 1 Z"] | None]:
        """Returns the branch with its new class token and the same patches."""
        token = self.there(own[..., :1, :])
        read = jnp.concatenate([token, other[..., 1:, :]], axis=-2)
        # One norm serves the query and the memory, which contains the query's token.
        memory = self.block.cross_residual.pre_norm(read)
        token, state = self.block(
            token,
            key=key,
            memories={"patches": memory},
            capture=("cross.weights",) if return_weights else (),
        )
        own = jnp.concatenate([self.back(token), own[..., 1:, :]], axis=-2)
        return own, None if state is None else state.captured["cross.weights"]


class Projection(nnx.Module):
    """``linear(GELU(norm(x)))``, from one width to another.

    Args:
      block: shape of the branch of the inputs.
      dim: width of the other branch.
    """

    def __init__(self, block: BlockConfig, dim: int, *, rngs: nnx.Rngs):
        self.norm = block.normalise(rngs)
        axes: dict[str, Any] = dict(in_axes=("embed",), out_axes=("mlp",))
        self.linear = linear(block.dim, dim, **axes, dtype=block.dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B T E"]:
        """Computes [*B T D] -> [*B T E]."""
        return self.linear(activate("gelu_exact", self.norm(x)))
