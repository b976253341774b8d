"""ViT: a picture is cut into patches, and read as a text is, by an encoder.

    picture [H W C] ─► patches [S P P C] ─► linear, + positions ─► layers of self-attention ─► norm
    class token ─────────────────────────────────┘ stands first          └─ its vector ─► logits

    x <- x + Attend(LN x, LN x); x <- x + MLP(LN x)

Source: Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words", equations 1 to 4.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx

from crossattn.keys import ConfigKey
from crossattn.nn.blocks import BlockConfig, EncoderBlock
from crossattn.nn.encoded import Encoded
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.outputs import ClassOutput
from crossattn.nn.patches import PatchEmbedding
from crossattn.nn.stack import Stack
from crossattn.types import Array, Float, Key

KEYS = {
    "layers": ConfigKey(int, "Layers of self-attention.", "[1, inf)"),
    "patch_size": ConfigKey(int, "Side of a patch, in pixels.", "[1, inf)"),
}
"""Keys of a config's section ``model`` that other models need not have."""


@dataclass(frozen=True)
class ViTConfig:
    """The shape of a ViT.

    Attributes:
      block: shape of the layers.
      layers: L.
      patch_size: side of a patch, in pixels.
      image_size: height and width for which positions are learnt; other sizes interpolate them.
      channels: of a pixel.
      num_classes: of the logits; None has no head.
      scan, remat: of the layers, see ``Stack``.
    """

    block: BlockConfig
    layers: int
    patch_size: int
    image_size: tuple[int, int]
    channels: int = 3
    num_classes: int | None = None
    scan: bool = False
    remat: bool | str = False


def tiny(**changes: Any) -> ViTConfig:
    """A configuration that compiles and runs in a blink, for tests."""
    block = BlockConfig.of(dim=32, num_heads=2, mlp_dim=64, activation="gelu")
    small = ViTConfig(block, layers=2, patch_size=4, image_size=(12, 12), num_classes=5)
    return replace(small, **changes)


class ViT(nnx.Module):
    """Pictures [*B H W C] in, vectors of patches or logits of classes [*B C] out."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        block = config.block
        self.patches = PatchEmbedding(
            config.image_size,
            config.patch_size,
            config.channels,
            block.dim,
            dtype=block.dtype,
            rngs=rngs,
        )
        self.encoder = Stack(
            lambda rngs: EncoderBlock(block, rngs=rngs),
            config.layers,
            scan=config.scan,
            remat=config.remat,
            rngs=rngs,
        )
        self.norm = block.normalise(rngs)
        self.output = (
            None
            if config.num_classes is None
            else ClassOutput(block.dim, config.num_classes, dtype=block.dtype, rngs=rngs)
        )

    @on_any_mesh
    def encode(
        self, image: Float[Array, "*B H W C"], *, key: Key[Array, ""] | None = None
    ) -> Encoded:
        """Vectors of the class token and the patches [*B 1+S D]; a key turns dropout on."""
        return Encoded(self._vectors(image, key))

    @on_any_mesh
    def hidden(
        self, image: Float[Array, "*B H W C"], *, key: Key[Array, ""] | None = None
    ) -> Float[Array, "*B D"]:
        """The vector of the class token, which the output layer gets."""
        return self._vectors(image, key)[..., 0, :]

    @on_any_mesh
    def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B classes"]:
        """Logits of classes, float32: the output layer alone.

        Raises:
          ValueError: the model has no classes.
        """
        if self.output is None:
            raise ValueError("this ViT has no classes; build it with num_classes.")
        return self.output.logits(hidden)

    @on_any_mesh
    def __call__(
        self, image: Float[Array, "*B H W C"], *, key: Key[Array, ""] | None = None
    ) -> Float[Array, "*B classes"]:
        """Logits of classes [*B C]."""
        return self.logits(self.hidden(image, key=key))

    @on_any_mesh
    def patch_weights(self, image: Float[Array, "*B H W C"]) -> dict[str, Float[Array, "*B h w"]]:
        """What the class token reads of each patch in the last layer, the mean of its heads.

        Raises:
          ValueError: the layers are scanned, of which none can be run alone.
        """
        if self.encoder.scan:
            raise ValueError("the layers of this ViT are scanned; build it with scan=False.")
        x = self.patches(image)
        *layers, last = self.encoder.layers
        for block in layers:
            x, _ = block(x)
        normed = last.attention_residual.pre_norm(x)
        _, weights = last.attention(
            normed[..., :1, :], last.attention.memory(normed), return_weights=True
        )
        *batch, height, width, _ = image.shape
        grid = self.patches.grid((height, width))
        return {"patches": jnp.mean(weights[..., 0, 1:], -2).reshape(*batch, *grid)}

    def _vectors(
        self, image: Float[Array, "*B H W C"], key: Key[Array, ""] | None
    ) -> Float[Array, "*B S D"]:
        x, _ = self.encoder(self.patches(image), key=key)
        return self.norm(x)
