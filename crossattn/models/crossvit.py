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
from flax import nnx

from crossattn.nn.blocks import Block, EncoderBlock
from crossattn.nn.examples import vectors
from crossattn.nn.feedforward import activate
from crossattn.nn.layers import linear
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.outputs import ClassOutput, logits_of
from crossattn.nn.patches import PatchEmbedding, Size, resized
from crossattn.nn.stack import Stack
from crossattn.nn.sublayers import BlockConfig, split
from crossattn.types import Array, Count, Float, Key


@dataclass(frozen=True)
class CrossViTConfig:
    """The shape of a CrossViT.

    Attributes:
      block: shape of the layers of the branch of small patches.
      large_dim, large_heads, large_mlp_dim: in which those of large patches differ.
      small_patch, large_patch: sides of patches, in pixels of the picture as its branch gets it.
      small_layers, large_layers: layers of each branch in a stage.
      stages: how often the branches are run and exchange.
      num_classes: of the logits.
      image_size: height and width for which positions are learnt; other sizes interpolate them.
      channels: of a pixel.
      small_size, large_size: to which each branch scales a picture of ``image_size``; None leaves it.
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
    small_size: Size | None = None
    large_size: Size | None = None
    scan: bool = False
    remat: bool | str = False

    @property
    def large(self) -> BlockConfig:
        """Shape of the layers of the branch of large patches."""
        sizes = dict(dim=self.large_dim, num_heads=self.large_heads, mlp_dim=self.large_mlp_dim)
        return self.block.changed(**sizes)


def tiny(**changes: Any) -> CrossViTConfig:
    """A configuration that compiles and runs in a blink, for tests."""
    small = CrossViTConfig(
        BlockConfig.of(dim=16, num_heads=2, mlp_dim=32, activation="gelu"),
        large_dim=24, large_heads=2, large_mlp_dim=48, small_patch=2, large_patch=4,
        small_layers=1, large_layers=1, stages=2, num_classes=5, image_size=(8, 12),
    )  # fmt: skip
    return replace(small, **changes)


def example(config: CrossViTConfig, rows: int = 2, padding: int = 0) -> dict[str, Any]:
    """Arguments of a call, drawn at random; see ``Architecture``."""
    return dict(image=vectors(rows, *config.image_size, config.channels))


class CrossViT(nnx.Module):
    """Pictures [*B H W C] in, logits of classes [*B C] out."""

    def __init__(self, config: CrossViTConfig, *, rngs: nnx.Rngs):
        small, large, size = config.block, config.large, config.image_size
        self.sizes = (config.small_size or size, config.large_size or size)
        self.image_size = size

        def patches(block: BlockConfig, size: Size, patch: int) -> PatchEmbedding:
            options: dict[str, Any] = dict(dtype=block.dtype, rngs=rngs)
            return PatchEmbedding(size, patch, config.channels, block.dim, **options)

        def output(block: BlockConfig) -> ClassOutput:
            return ClassOutput(block.dim, config.num_classes, dtype=block.dtype, rngs=rngs)

        self.small_patches = patches(small, self.sizes[0], config.small_patch)
        self.large_patches = patches(large, self.sizes[1], config.large_patch)
        self.stages = nnx.List([Stage(config, rngs=rngs) for _ in range(config.stages)])
        self.small_norm, self.large_norm = small.normalise(rngs), large.normalise(rngs)
        self.small_output, self.large_output = output(small), output(large)
        self.small_dim = small.dim

    @on_any_mesh
    def hidden(
        self,
        image: Float[Array, "*B H W C"],
        *,
        key: Key[Array, ""] | None = None,
        return_weights: bool = False,
    ) -> Any:
        """The class tokens of both branches, side by side [*B D], which the output layer gets.

        Args:
          image: [*B H W C].
          key: turns dropout on.
          return_weights: also return, of each stage, the weights with which the class token of the small
            patches reads [*B N 1 1+S] (itself, then the large patches), and that of the large ones.
        """
        small, large = (
            patches(resized(image, size))
            for patches, size in zip(self._branches(), self._scaled(image), strict=True)
        )
        weights = []
        for stage, own in zip(self.stages, split(key, len(self.stages)), strict=True):
            small, large, read = stage(small, large, key=own, return_weights=return_weights)
            weights.append(read)
        tokens = self.small_norm(small[..., 0, :]), self.large_norm(large[..., 0, :])
        hidden = jnp.concatenate(tokens, axis=-1)
        return (hidden, weights) if return_weights else hidden

    @on_any_mesh
    def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B classes"]:
        """Logits of classes, float32: the mean of those of both branches."""
        small, large = jnp.split(hidden, [self.small_dim], axis=-1)
        return (self.small_output.logits(small) + self.large_output.logits(large)) / 2

    @logits_of(hidden)
    def __call__(self) -> Any:
        """Logits of classes [*B C]; the arguments of ``hidden``."""

    @on_any_mesh
    def patch_weights(self, image: Float[Array, "*B H W C"]) -> dict[str, Float[Array, "*B h w"]]:
        """What each class token reads of each patch of the other branch at the last exchange.

        They are means over heads; what a token reads of itself is left out.
        """
        _, weights = self.hidden(image, return_weights=True)
        small, large = (read[..., 0, 1:].mean(-2) for read in weights[-1])
        sizes = self._scaled(image)
        return {
            "large patches": self.large_patches.on_grid(small, image, sizes[1]),
            "small patches": self.small_patches.on_grid(large, image, sizes[0]),
        }

    def _branches(self) -> tuple[PatchEmbedding, PatchEmbedding]:
        return self.small_patches, self.large_patches

    def _scaled(self, image: Array) -> tuple[Size, Size]:
        """To which each branch scales a picture."""
        height, width = (
            given / learnt
            for given, learnt in zip(image.shape[-3:-1], self.image_size, strict=True)
        )
        small, large = ((round(height * h), round(width * w)) for h, w in self.sizes)
        return small, large


class Stage(nnx.Module):
    """Layers of both branches, then their exchange.

    Args:
      config: the model's.
    """

    def __init__(self, config: CrossViTConfig, *, rngs: nnx.Rngs):
        small, large = config.block, config.large

        def layers(block: BlockConfig, count: int) -> Stack:
            options: dict[str, Any] = dict(scan=config.scan, remat=config.remat, rngs=rngs)
            return Stack(lambda rngs: EncoderBlock(block, rngs=rngs), count, **options)

        self.small, self.large = (
            layers(small, config.small_layers),
            layers(large, config.large_layers),
        )
        self.small_reads, self.large_reads = (
            Exchange(small, large, rngs=rngs),
            Exchange(large, small, rngs=rngs),
        )

    def __call__(
        self,
        small: Float[Array, "*B S D"],
        large: Float[Array, "*B Z E"],
        *,
        key: Key[Array, ""] | None = None,
        return_weights: bool = False,
    ) -> tuple[Array, Array, tuple[Array | None, Array | None]]:
        """Both branches' vectors, and the weights with which each class token read the other branch."""
        keys = split(key, 4)
        small, _ = self.small(small, key=keys[0])
        large, _ = self.large(large, key=keys[1])
        new_small, small_read = self.small_reads(small, large, keys[2], return_weights)
        new_large, large_read = self.large_reads(large, small, keys[3], return_weights)
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
        """The branch with its new class token; its patches are as they were."""
        token = self.there(own[..., :1, :])
        read = jnp.concatenate([token, other[..., 1:, :]], axis=-2)
        # One norm is that of the token which reads, and of what is read, the token itself among it.
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
      block: shape of the branch that vectors come from.
      dim: of that to which they go.
    """

    def __init__(self, block: BlockConfig, dim: int, *, rngs: nnx.Rngs):
        self.norm = block.normalise(rngs)
        axes: dict[str, Any] = dict(in_axes=("embed",), out_axes=("mlp",))
        self.linear = linear(block.dim, dim, **axes, dtype=block.dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B T E"]:
        """[*B T D] -> [*B T E]."""
        return self.linear(activate("gelu_exact", self.norm(x)))
