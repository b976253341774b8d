"""ViT: a Transformer encoder of the patches of a picture.

    picture [H W C] ─► patches [S P P C] ─► linear, + positions ─► layers of self-attention ─► norm
    class token ─────────────────────────────────┘ stands first          └─ its vector ─► logits

    x <- x + Attend(LN x, LN x); x <- x + MLP(LN x)

A DeiT also has a distillation token, which learns from a teacher and may have logits of its own.

Source: Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words", equations 1 to 4; Touvron et al. 2021,
"Training data-efficient image transformers & distillation through attention", section 4.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import jax.numpy as jnp
from flax import nnx

from crossattn.models.decoder import DecoderConfig
from crossattn.nn.encoded import Encoded
from crossattn.nn.examples import vectors
from crossattn.nn.layers import linear
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.outputs import ClassOutput, logits_of
from crossattn.nn.patches import PatchEmbedding, Size
from crossattn.nn.stack import encoder_stack, layer_weights
from crossattn.nn.sublayers import BlockConfig, split
from crossattn.ops.dropout import dropout
from crossattn.types import AnyArray, Array, Count, Float, Key


@dataclass(frozen=True)
class ViTConfig:
    """The shape of a ViT.

    Attributes:
      block: shape of the layers.
      layers: depth, L.
      patch_size: side of a patch, in pixels, or its height and width.
      image_size: height and width of the learnt positions; other sizes interpolate them.
      channels: of a pixel.
      num_classes: of the logits; None has no head.
      class_token: add a learnt vector before the patches.
      distillation_token: add DeiT's.
      distillation_output: add logits of that token; the model's are the mean of both.
      pooler: add the layer over the class token's vector.
      patch_bias: a bias in the projection of patches.
      input_norm: add a norm before the first layer (CLIP).
      output_norm: the norm after the last layer: of all "vectors", of the "class" token alone (CLIP), or
        "none".
      scan, remat: of the layers, see ``Stack``.
    """

    block: BlockConfig
    layers: Count
    patch_size: Count | Size
    image_size: Size
    channels: int = 3
    num_classes: int | None = None
    class_token: bool = True
    distillation_token: bool = False
    distillation_output: bool = False
    pooler: bool = False
    patch_bias: bool = True
    input_norm: bool = False
    output_norm: Literal["vectors", "class", "none"] = "vectors"
    scan: bool = False
    remat: bool | str = False


def tiny(**changes: Any) -> ViTConfig:
    """Returns a small configuration for tests."""
    block = BlockConfig.of(dim=32, num_heads=2, mlp_dim=64, activation="gelu")
    small = ViTConfig(block, layers=2, patch_size=4, image_size=(12, 12), num_classes=5)
    return replace(small, **changes)


def example(config: ViTConfig, rows: int = 2, padding: int = 0) -> dict[str, Any]:
    """Draws random arguments of a call; see ``Architecture``."""
    return dict(image=vectors(rows, *config.image_size, config.channels))


@dataclass(frozen=True)
class SeeingDecoderConfig(DecoderConfig):
    """The shape of a language model, and of its encoder of pictures.

    Attributes:
      image_dim: size of the vectors of patches, M.
      image_size: height and width of pictures; other sizes interpolate positions.
      channels: of a pixel.
      patch_size: side of a patch.
      image_layers: depth of the encoder of patches.
      image_heads: of its attention.
      image_norm_epsilon: of its layer norms.
    """

    image_dim: Count = 64
    image_size: Size | None = None
    channels: int = 3
    patch_size: Count = 8
    image_layers: Annotated[int, "[0, inf)"] = 2
    image_heads: Count = 4
    image_norm_epsilon: float = 1e-5

    def image_block(self) -> BlockConfig:
        """Returns the shape of blocks on patches."""
        return BlockConfig.of(
            self.image_dim,
            self.image_heads,
            4 * self.image_dim,
            activation="gelu",
            norm_epsilon=self.image_norm_epsilon,
            dropout_rate=self.block.dropout_rate,
            dtype=self.block.dtype,
        )

    def patch_reader(self) -> ViTConfig:
        """Returns the config of the encoder of pictures, without a class token."""
        assert self.image_size is not None
        return ViTConfig(
            self.image_block(),
            layers=self.image_layers,
            patch_size=self.patch_size,
            image_size=self.image_size,
            channels=self.channels,
            class_token=False,
        )


class ViT(nnx.Module):
    """Pictures [*B H W C] in, vectors of patches or logits of classes [*B C] out.

    Raises:
      ValueError: classes or a pooler need a class token, which the config has not.
    """

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        block = config.block
        if not config.class_token and (config.num_classes is not None or config.pooler):
            raise ValueError(
                "class_token is False, but classes and a pooler read its vector; leave them out."
            )
        self.patches = PatchEmbedding(
            config.image_size,
            config.patch_size,
            config.channels,
            block.dim,
            class_token=config.class_token,
            distillation_token=config.distillation_token,
            use_bias=config.patch_bias,
            dtype=block.dtype,
            rngs=rngs,
        )
        self.input_norm = block.normalise(rngs) if config.input_norm else None
        self.image_size, self.dropout_rate = config.image_size, block.dropout_rate
        self.encoder = encoder_stack(
            block, config.layers, scan=config.scan, remat=config.remat, rngs=rngs
        )
        self.norm: Any = None if config.output_norm == "none" else block.normalise(rngs)
        self.norm_vectors = config.output_norm == "vectors"
        options: dict[str, Any] = dict(dtype=block.dtype, rngs=rngs)
        output = partial(ClassOutput, block.dim, config.num_classes or 0, **options)
        self.output = None if config.num_classes is None else output()
        self.distillation_output = output() if config.distillation_output else None
        options |= dict(in_axes=("embed",), out_axes=("mlp",))
        self.pooler = linear(block.dim, block.dim, **options) if config.pooler else None

    @on_any_mesh
    def encode(
        self, image: Float[Array, "*B H W C"], *, key: Key[Array, ""] | None = None
    ) -> Encoded:
        """Encodes pictures to vectors [*B 1+S D] of the class token, if any, and the patches.

        DeiT's distillation token is between them. A key turns dropout on.
        """
        return Encoded(self._vectors(image, key))

    @on_any_mesh
    def hidden(
        self, image: Float[Array, "*B H W C"], *, key: Key[Array, ""] | None = None
    ) -> Float[Array, "..."]:
        """Computes the vector [*B D] of the class token, which the output layer reads.

        With a ``distillation_output`` these are the vectors of both tokens, [*B 2 D].
        """
        vectors = self._vectors(image, key)
        tokens = vectors[..., 0, :] if self.distillation_output is None else vectors[..., :2, :]
        return tokens if self.norm is None or self.norm_vectors else self.norm(tokens)

    @on_any_mesh
    def logits(self, hidden: Float[Array, "..."]) -> Float[Array, "*B classes"]:
        """Applies the output layer to the result of ``hidden``: logits of classes, float32.

        Raises:
          ValueError: the model has no classes.
        """
        if self.output is None:
            raise ValueError("this ViT has no classes; build it with num_classes.")
        if self.distillation_output is None:
            return self.output.logits(hidden)
        own, taught = hidden[..., 0, :], hidden[..., 1, :]
        return (self.output.logits(own) + self.distillation_output.logits(taught)) / 2

    @on_any_mesh
    def pooled(self, vectors: Float[AnyArray, "*B S D"]) -> Float[Array, "*B D"]:
        """Computes a vector for each picture, of its class token, from the vectors of ``encode``.

        Raises:
          ValueError: this ViT has no pooler.
        """
        if self.pooler is None:
            raise ValueError("this ViT has no pooler; set pooler=True in its config.")
        return jnp.tanh(self.pooler(jnp.asarray(vectors)[..., 0, :]))

    @logits_of(hidden)
    def __call__(self) -> Any:
        """Computes logits of classes [*B C]; the arguments of ``hidden``."""

    @on_any_mesh
    def patch_weights(self, image: Float[Array, "*B H W C"]) -> dict[str, Float[Array, "*B h w"]]:
        """Computes the class token's attention weights on patches in the last layer, means over heads."""
        _, states = self.encoder(self._input(image), capture=("attention.weights",))
        weights: Any = layer_weights(states)
        read = jnp.mean(weights[-1][..., 0, self.patches.tokens :], axis=-2)
        return {"patches": self.patches.on_grid(read, image)}

    def _vectors(
        self, image: Float[Array, "*B H W C"], key: Key[Array, ""] | None
    ) -> Float[Array, "*B S D"]:
        keys = split(key, 2)
        x, _ = self.encoder(dropout(self._input(image), self.dropout_rate, keys[0]), key=keys[1])
        return self.norm(x) if self.norm_vectors else x

    def _input(self, image: Float[Array, "*B H W C"]) -> Float[Array, "*B S D"]:
        x = self.patches(image)
        return x if self.input_norm is None else self.input_norm(x)
