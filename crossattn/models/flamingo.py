"""Flamingo: a trained language model with gated cross-attention to pictures between its blocks.

    pixels ──► patches ──► encoder ──┐ keys, values (and the latents' own)
    latents ───────────────────► resampler, for each image ──┐ keys, values
    <image> a red apple <image> a …  ──► embedding ──► gated ──► block ──► gated ──► block ──► logits
                                         each token reads the images of its own place alone:
    the last <image> at or before it; before the first one it reads nothing

    z <- z + Attend(LN z, [LN x; LN z]); z <- z + MLP(LN z)                          resampler
    y <- y + tanh(a) Attend(norm y, z); y <- y + tanh(b) MLP(norm y)                 gated

Gates a and b are 0 at initialisation, so that the model equals its language model. The language model's
parameters have the names of a ``Decoder``'s: training may start from a run of one.

Source: Alayrac et al. 2022, "Flamingo: a Visual Language Model for Few-Shot Learning", sections 2.1 to 2.3.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from crossattn.functional import Build
from crossattn.models import decoder
from crossattn.models.decoder import Decoder
from crossattn.models.transformer import with_positions
from crossattn.models.vit import SeeingDecoderConfig, ViT
from crossattn.nn.blocks import Block
from crossattn.nn.examples import texts, vectors
from crossattn.nn.images import with_places
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.outputs import logits_of
from crossattn.nn.stack import Stack, layer_weights
from crossattn.nn.states import CachedStates
from crossattn.nn.sublayers import Sublayer, split
from crossattn.types import AnyArray, Array, Bool, Count, Float, Int, Key


@dataclass(frozen=True)
class FlamingoConfig(SeeingDecoderConfig):
    """The shape of a Flamingo: of the language model, and of the encoder and resampler of pictures.

    The resampler has the encoder's sizes ``image_dim``, ``image_heads`` and ``image_norm_epsilon``.

    Attributes:
      image_size: height and width of pictures; None reads vectors of patches [B I P M] of any encoder.
      interval: blocks of the language model per block that reads images.
      resampler_head_dim: size of the resampler's heads; None is ``image_dim / image_heads``.
      image_latents: latents of each image, L.
      resampler_layers: depth of the resampler.
    """

    interval: Count = 1
    resampler_head_dim: int | None = None
    image_latents: Count = 8
    resampler_layers: Count = 2


def tiny(**changes: Any) -> FlamingoConfig:
    """Returns a small configuration for tests."""
    small = FlamingoConfig(
        **vars(decoder.tiny()),
        image_dim=16,
        image_size=(8, 8),
        patch_size=4,
        image_layers=1,
        image_heads=2,
        image_latents=3,
        resampler_layers=1,
    )
    return replace(small, **changes)


def example(config: FlamingoConfig, rows: int = 2, padding: int = 0) -> dict[str, Any]:
    """Draws random arguments of a call; see ``Architecture``."""
    tokens, segment_ids = texts(rows, 5, config.vocab_size, padding)
    shape = (4, config.image_dim)  # patches of an image
    if config.image_size is not None:
        shape = (*config.image_size, config.channels)
    places = np.tile(np.array([0, 2], np.int32), (rows, 1))
    return dict(
        tokens=tokens,
        images=vectors(rows, 2, *shape),
        image_positions=places,
        segment_ids=segment_ids,
    )


class Flamingo(Decoder):
    """Tokens and images in, logits of the next token out.

    Raises:
      ValueError: pictures are smaller than a patch, or ``interval`` does not divide the layers.
    """

    def __init__(self, config: FlamingoConfig, *, rngs: nnx.Rngs):
        super().__init__(config, build=_period(config), rngs=rngs)
        pictures = config.image_size is not None
        self.vision: Any = ViT(config.patch_reader(), rngs=rngs) if pictures else None
        self.resampler = Resampler(config, rngs=rngs)

    @on_any_mesh
    def encode(
        self, images: Float[Array, "B I *P C"], key: Key[Array, ""] | None = None
    ) -> Float[Array, "B I_L M"]:
        """Computes latents [B (I L) M] of pictures [B I H W C], or of vectors of patches [B I P M]."""
        keys = split(key, 2)
        x = images if self.vision is None else self.vision.encode(images, key=keys[0]).vectors
        x = self.resampler(x, keys[1])
        return x.reshape(x.shape[0], -1, x.shape[-1])

    def seen(
        self, positions: Int[Array, "*B T"], image_positions: Int[Array, "B I"]
    ) -> dict[str, Bool[Array, "B 1 T S"]]:
        """Makes the mask of latents for tokens at these positions: they read the last images before them."""
        places = image_positions[:, None]
        last = jnp.max(jnp.where(places <= positions[..., None], places, -1), axis=-1)
        allowed = (places == last[..., None]) & (places >= 0)
        return {"images": jnp.repeat(allowed, self.resampler.num_latents, axis=-1)[:, None]}

    @on_any_mesh
    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        images: Float[AnyArray, "B I *P C"] | None = None,
        image_positions: Int[AnyArray, "B I"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        key: Key[Array, ""] | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Computes the last vectors, before the output layer, and the gated layers' weights if asked for.

        Args:
          tokens: [B T], from position 0 on.
          images: pictures [B I H W C], or vectors of patches [B I P M] of a model without ``image_size``.
          image_positions: of each image in the text, see ``image_positions``; -1 is none. Several images
            at one position are read together.
          segment_ids: 0 for padding.
          key: turns dropout on.
          return_weights: return the weights [L B N T (I latents)] too, those before dropout.

        Raises:
          ValueError: one of images and positions is given without the other, or their numbers differ.
        """
        keys = split(key, 3)
        latents, image_positions = self._images(images, image_positions, len(tokens), keys[2])
        x, states = self.decoder(
            self.input(tokens, None, keys[0]),
            self.decoder.read(images=latents),
            keys[1],
            segment_ids=segment_ids,
            memory_masks=self.seen(jnp.arange(tokens.shape[-1]), image_positions),
            capture=self.decoder.reading() if return_weights else (),
        )
        return (x, layer_weights(states)) if return_weights else x

    @logits_of(hidden)
    def __call__(self) -> Any:
        """Computes logits [B T V] of the token after each of ``tokens``; the arguments of ``hidden``."""

    @on_any_mesh
    def prefill(
        self,
        batch: int,
        num_beams: int,
        cache_length: int,
        *,
        images: Float[AnyArray, "B I *P C"] | None = None,
        image_positions: Int[AnyArray, "B I"] | None = None,
        lookahead: int = 0,
    ) -> CachedStates:
        """Makes decoding states that have read the images; for the other arguments see ``Autoregressive``.

        Args:
          images, image_positions: as in ``hidden``, of the prompt without its left padding.

        Raises:
          ValueError: as ``hidden`` does, or the inputs have not ``batch`` rows.
        """
        latents, image_positions = self._images(images, image_positions, batch, None)
        layers = self.decoder.read(images=latents)
        return self._filled(layers, batch, num_beams, cache_length, lookahead, image_positions)

    @on_any_mesh
    def patch_weights(
        self,
        tokens: Int[Array, "B T"],
        images: Float[AnyArray, "B I H W C"],
        image_positions: Int[AnyArray, "B I"],
    ) -> Float[Array, "B T I h w"]:
        """Computes the weights of tokens on patches: those on latents times those of latents on patches.

        The weights are means over heads, and those of tokens also over the gated layers, without their gates.
        A token without an image has 0.

        Raises:
          ValueError: this model reads vectors of patches, not pictures.
        """
        if self.vision is None:
            raise ValueError("this Flamingo reads no pictures; build it with an image_size.")
        given: dict[str, Any] = dict(images=images, image_positions=image_positions)
        _, read = self.hidden(tokens, **given, return_weights=True)
        asked = jnp.mean(read, axis=(0, 2))
        asked = asked.reshape(*asked.shape[:2], images.shape[1], self.resampler.num_latents)
        seen = self.resampler.patch_weights(self.vision.encode(images).vectors)
        found = jnp.einsum("BTIL,BILP->BTIP", asked, seen)
        grid = self.vision.patches.grid((images.shape[2], images.shape[3]))
        return found.reshape(*found.shape[:3], *grid)

    def _images(
        self, images: Any, image_positions: Any, batch: int, key: Any
    ) -> tuple[Array, Array]:
        """Returns latents and positions of the images; without images, those of one at position -1."""
        placed_images = with_places(images, image_positions, batch)
        if placed_images is None:
            shape = (batch, self.resampler.num_latents, self.resampler.dim)
            return jnp.zeros(shape), jnp.full((batch, 1), -1)
        images, image_positions = placed_images
        return self.encode(images, key), image_positions


class Resampler(nnx.Module):
    """A few latents that read the patches of an image and one another; images of any size give as many.

    Source: Alayrac et al. 2022, section 2.1 and figure 5.
    """

    def __init__(self, config: FlamingoConfig, *, rngs: nnx.Rngs):
        head_dim = config.resampler_head_dim
        own = dict(activation="relu", use_bias=False, head_dim=head_dim)
        shape = config.image_block().changed(**own)
        self.num_latents, self.dim = config.image_latents, shape.dim
        latents = jax.random.normal(rngs.params(), (self.num_latents, self.dim)) * 0.02
        self.latents = nnx.Param(latents, axes=(None, "embed"))

        def block(rngs: nnx.Rngs) -> Block:
            norm, own = shape.normalise(rngs), shape.self_attention(rngs)
            reading = replace(own, inner=LatentAttention(norm, own.inner), reads="patches")
            return Block(reading=reading, feedforward=shape.feedforward(rngs))

        self.layers = Stack(block, config.resampler_layers, rngs=rngs)
        self.norm = shape.normalise(rngs)

    def __call__(
        self, patches: Float[Array, "*B P M"], key: Key[Array, ""] | None = None
    ) -> Float[Array, "*B L M"]:
        """Computes [*B P M] -> [*B L M]."""
        latents, _ = self._layers(patches, key)
        return self.norm(latents)

    def patch_weights(self, patches: Float[Array, "*B P M"]) -> Float[Array, "*B L P"]:
        """Computes the weights of latents on patches in the last layer, through other latents too.

        The weights are means over heads, without residual connections, so that a row's sum is at most 1.
        """
        _, states = self._layers(patches, None, capture=("reading.weights",))
        count = patches.shape[-2]
        seen = jnp.zeros((*patches.shape[:-2], self.num_latents, count))
        weights: Any = layer_weights(states)
        for read in jnp.mean(weights, axis=-3):
            seen = read[..., :count] + read[..., count:] @ seen
        return seen

    def _layers(self, patches: Array, key: Array | None, **options: Any) -> tuple[Array, Any]:
        latents = self.latents[...].astype(patches.dtype)
        latents = jnp.broadcast_to(latents, (*patches.shape[:-2], *latents.shape))
        memories = {"patches": patches}
        return self.layers(latents, key=key, memories=memories, **options)


class LatentAttention(nnx.Module):
    """Attention of latents to patches and latents; patches have a norm of their own."""

    def __init__(self, norm: nnx.Module, attention: nnx.Module):
        self.norm: Any = norm
        self.attention: Any = attention

    def memory(self, x: Float[Array, "*B P M"], **_: Any) -> Float[Array, "*B P M"]:
        """Normalises the patches."""
        return self.norm(x)

    def __call__(
        self,
        x: Float[Array, "*B L M"],
        memory: Float[Array, "*B P M"],
        mask: Any = None,
        **options: Any,
    ) -> Any:
        """Computes [*B L M] of normalised latents."""
        return self.attention(x, jnp.concatenate([memory, x], axis=-2), mask, **options)


def _period(config: FlamingoConfig) -> list[Build]:
    """Makes builds of a block with gated sublayers before its own, then of ``interval - 1`` plain blocks.

    Gated attention has no biases: a token without an image gets exactly 0.
    """
    block = with_positions(config.block, config.positions)
    cross = replace(block.cross or block.attention, use_bias=False, key_bias=None)
    block = replace(block, cross=cross)

    def plain(rngs: nnx.Rngs) -> dict[str, Sublayer]:
        return dict(
            attention=block.self_attention(rngs, causal=True), feedforward=block.feedforward(rngs)
        )

    def gated(rngs: nnx.Rngs) -> Block:
        own, reads = plain(rngs), dict[str, Any](memory_dim=config.image_dim, reads="images")
        reading = block.cross_attention(rngs, **reads, gated=True)
        network = block.feedforward(rngs, gated=True)
        return Block(scope="decoder_attention", gated=reading, gated_feedforward=network, **own)

    others = lambda rngs: Block(scope="decoder_attention", **plain(rngs))  # noqa: E731
    return [gated, *[others] * (config.interval - 1)]
