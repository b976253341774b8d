"""PixArt: text to image. Patches of a noisy picture read a caption, and say what is noise in them.

    words [S] ─► embed ─► layers of self-attention ─► m [S D] ───────────┐ keys, values of each block
    noisy picture x_t [H W C] ─► patches ─► z [P D] ─► blocks: itself, words, MLP ─► norm ─► output [H W C]
    time t ─► sinusoids ─► MLP ─► c [D] ──────────────────┴───────────────────────────┘ shift, scale, gate

    z <- z + g1(c) Attend(n1(z, c), n1(z, c))       n(z, c) = (1 + W c) LN z + V c,   g(c) = U c
    z <- z + Attend(z, m)                           neither normalised nor gated
    z <- z + g2(c) MLP(n2(z, c))                    adaLN-Zero: W, V, U and the output are 0 at first

The output is what the process of training asks for, a velocity, the picture or the noise:
``crossattn.decode.diffusion`` has processes, samplers and guidance. Without words (``segment_ids`` 0)
attention to them adds the bias of its output and nothing else, which is the unconditional model.

PixArt shares W, V and U between its blocks, which then differ in their biases alone (adaLN-single); here each
has its own, as in DiT, of which the former are a special case.

Source: Peebles and Xie 2023, "Scalable Diffusion Models with Transformers", sections 3.2 and 3.3 (DiT); the
cross-attention to words, Chen et al. 2023, "PixArt-alpha: Fast Training of Diffusion Transformer for
Photorealistic Text-to-Image Synthesis", section 2.3.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx

from crossattn.axes import placed
from crossattn.nn.blocks import Block
from crossattn.nn.encoded import Encoded
from crossattn.nn.examples import texts, vectors
from crossattn.nn.feedforward import FeedForward
from crossattn.nn.inputs import TokenInput
from crossattn.nn.layers import linear, zeroed
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.patches import PatchEmbedding, Size
from crossattn.nn.stack import Stack, encoder_stack, layer_weights
from crossattn.nn.sublayers import BlockConfig, Residual, split
from crossattn.ops import masks
from crossattn.ops.dropout import dropout
from crossattn.ops.positions import sinusoidal
from crossattn.types import Array, Count, Float, Int, Key

_TIMES = 1000  # that the sinusoids tell apart, between 0 and 1
_LONGEST = 100.0  # 2 pi times this is the longest period of the places of patches


@dataclass(frozen=True)
class PixArtConfig:
    """The shape of a PixArt.

    Attributes:
      vocab_size: of captions, V.
      block: shape of the blocks of patches, and of the layers of words.
      layers: number of blocks.
      text_layers: depth of the encoder of words.
      patch_size: side of a patch, which divides those of the picture.
      image_size: height and width of pictures.
      max_length: the longest caption.
      channels: of a pixel.
      scan, remat: of the blocks, see ``Stack``.
    """

    vocab_size: int
    block: BlockConfig
    layers: Count
    text_layers: Annotated[int, "[0, inf)"]
    patch_size: Count
    image_size: Size
    max_length: Count
    channels: int = 3
    scan: bool = False
    remat: bool | str = False


def tiny(**changes: Any) -> PixArtConfig:
    """Returns a small configuration for tests."""
    block = BlockConfig.of(dim=32, num_heads=2, mlp_dim=64, activation="gelu")
    small = PixArtConfig(
        vocab_size=64, block=block, layers=2, text_layers=1, patch_size=2, image_size=(4, 6), max_length=16,
    )  # fmt: skip
    return replace(small, **changes)


def example(config: PixArtConfig, rows: int = 2, padding: int = 0) -> dict[str, Any]:
    """Draws random arguments of a call; see ``Architecture``."""
    tokens, segment_ids = texts(rows, 5, config.vocab_size, padding)
    return dict(
        image=vectors(rows, *config.image_size, config.channels),
        time=abs(vectors(rows, 1))[:, 0] % 1,
        tokens=tokens,
        segment_ids=segment_ids,
    )


class PixArt(nnx.Module):
    """Noisy pictures [*B H W C], their times [*B] from 0 to 1 and captions in, vectors [*B H W C] out.

    Raises:
      ValueError: the patches do not fill the picture.
    """

    def __init__(self, config: PixArtConfig, *, rngs: nnx.Rngs):
        plain, side = config.block, config.patch_size
        if any(size % side for size in config.image_size):
            height, width = config.image_size
            raise ValueError(
                f"image_size is {height} x {width}; expected multiples of patch_size, {side}."
            )
        D, options = plain.dim, dict[str, Any](dtype=plain.dtype, rngs=rngs)
        self.input = TokenInput(
            config.vocab_size,
            D,
            positions="sinusoidal",
            max_length=config.max_length,
            dropout_rate=plain.dropout_rate,
            **options,
        )
        self.encoder = encoder_stack(plain, config.text_layers, rngs=rngs)
        self.encoder_norm = plain.normalise(rngs)
        self.patches = PatchEmbedding(
            config.image_size, side, config.channels, D, class_token=False, **options
        )
        places = self.patches.positions.table
        places.set_value(sinusoids_of(self.patches.grid_size, D).astype(places.get_value().dtype))
        self.time = FeedForward(D, D, "silu", **options)
        build = lambda rngs: reading_block(plain, rngs)  # noqa: E731
        self.stack = Stack(build, config.layers, scan=config.scan, remat=config.remat, rngs=rngs)
        self.norm = plain.normalise(rngs)
        axes = dict[str, Any](in_axes=("condition",), out_axes=(None, "embed"))
        self.modulation = zeroed(linear(D, (2, D), **axes, **options))
        axes = dict[str, Any](in_axes=("embed",), out_axes=(None, None, "channels"))
        self.output = zeroed(linear(D, (side, side, config.channels), **axes, **options))
        self.dim, self.image_shape = D, (*config.image_size, config.channels)

    @on_any_mesh
    def read(
        self,
        tokens: Int[Array, "*B S"],
        segment_ids: Int[Array, "*B S"] | None = None,
        *,
        key: Key[Array, ""] | None = None,
    ) -> Any:
        """Reads captions once, for any number of ``denoise``: keys and values of their words in each block.

        Args:
          tokens: [*B S].
          segment_ids: 0 for padding; a caption of padding alone is none, see ``denoise``.
          key: turns dropout on.
        """
        valid = jnp.ones(tokens.shape, bool) if segment_ids is None else segment_ids > 0
        keys = split(key, 2)
        x = self.input(tokens, key=keys[0])
        mask = None if segment_ids is None else masks.segments(segment_ids)
        x, _ = self.encoder(x, key=keys[1], mask=mask)
        words = Encoded(self.encoder_norm(x), valid)
        return self.stack.map(lambda block: block.read({"words": words}))

    @on_any_mesh
    def denoise(
        self,
        image: Float[Array, "*B H W C"],
        time: Float[Array, "*B"],
        states: Any,
        *,
        key: Key[Array, ""] | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Computes the output [*B H W C], float32, from noisy pictures and captions that ``read`` has read.

        Args:
          image: noisy pictures, x_t.
          time: from 0, a picture, to 1, noise.
          states: of ``read``.
          key: turns dropout on.
          return_weights: also return the attention weights [L *B N P S] of the patches on the words.

        Raises:
          ValueError: the pictures are of another size.
        """
        if image.shape[-3:] != self.image_shape:
            raise ValueError(f"image is {image.shape}; expected [... {self.image_shape}].")
        times = jnp.round(_TIMES * time).astype(jnp.int32)
        condition = jax.nn.silu(self.time(sinusoidal(times, self.dim)))
        capture = ("cross.weights",) if return_weights else ()
        z = self.patches(image)
        z, states = self.stack(z, states, key, condition=condition, capture=capture)
        scale, shift = jnp.moveaxis(self.modulation(condition)[..., None, :, :], -2, 0)
        patches = self.output((1 + scale) * self.norm(z) + shift)
        grid = self.patches.grid(self.image_shape[:2])
        patches = patches.reshape(*patches.shape[:-4], *grid, *patches.shape[-3:])
        pixels = patches.swapaxes(-4, -3).reshape(image.shape).astype(jnp.float32)
        return (pixels, layer_weights(states)) if return_weights else pixels

    @on_any_mesh
    def __call__(
        self,
        image: Float[Array, "*B H W C"],
        time: Float[Array, "*B"],
        tokens: Int[Array, "*B S"],
        segment_ids: Int[Array, "*B S"] | None = None,
        *,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "*B H W C"]:
        """Computes the output [*B H W C]; the arguments of ``denoise`` and ``read``."""
        keys = split(key, 2)
        return self.denoise(image, time, self.read(tokens, segment_ids, key=keys[0]), key=keys[1])


def reading_block(shape: BlockConfig, rngs: nnx.Rngs) -> Block:
    """Makes a block of patches: self-attention and a network that the time modulates, and a plain reading."""
    timed = replace(shape, condition_dim=shape.dim)
    cross = shape.cross_attention(rngs, memory_dim=shape.dim, reads="words")
    return Block(
        attention=timed.self_attention(rngs),
        cross=replace(cross, residual=Added(shape.dropout_rate)),
        feedforward=timed.feedforward(rngs),
    )


def sinusoids_of(grid: Size, dim: int) -> Float[Array, "P D"]:
    """Returns sinusoids of the rows of a grid of patches beside those of its columns.

    Learnt positions begin with them: smaller ones are lost beside patches of noise.
    """
    rows, columns = jnp.indices(grid).reshape(2, -1)
    halves = (rows, dim // 2), (columns, dim - dim // 2)
    return jnp.concatenate([sinusoidal(at, size, _LONGEST) for at, size in halves], axis=-1)


class Added(Residual):
    """A residual connection without a norm, ``x + dropout(f(x))``, whatever the condition."""

    def __init__(self, dropout_rate: float):
        self.dropout_rate = dropout_rate

    def pre_norm(self, x: Array, condition: Any = None) -> Array:
        """Returns ``x``."""
        return x

    def add_residual(self, x: Array, update: Array, key: Any, condition: Any = None) -> Array:
        """Returns the sum."""
        return placed(x + dropout(update, self.dropout_rate, key), "embed")
