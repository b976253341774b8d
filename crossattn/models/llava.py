"""LLaVA: a language model that reads projected patches of pictures among its tokens.

    picture [H W C] ──► patches ──► layers of self-attention ──► Z [P M] ──► projector ──► H [P D] ─┐
    <s> look at  <image> <image> ... <image>  what is this ?  ──► embedding [T D]                    │
             └──────── P places ────────┘  where an image stands, H takes the place of embeddings ◄──┘
                                                        └──► masked self-attention, over both ──► logits

    H = W2 gelu(W1 Z + b1) + b2, or H = W Z + b

There is no cross-attention: tokens and patches share self-attention and its cache. The language model's
parameters have the names of a ``Decoder``'s: training may start from a run of one.

Source: Liu et al. 2023, "Visual Instruction Tuning", equation 1; a projector of two layers, Liu et al. 2024,
"Improved Baselines with Visual Instruction Tuning", section 3.3.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from crossattn.models import decoder
from crossattn.models.decoder import Decoder
from crossattn.models.vit import SeeingDecoderConfig, ViT, ViTConfig
from crossattn.nn.examples import texts, vectors
from crossattn.nn.feedforward import Activation, activate
from crossattn.nn.images import image_positions, with_places
from crossattn.nn.layers import linear
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.outputs import logits_of
from crossattn.nn.patches import patch_grid
from crossattn.nn.stack import layer_weights
from crossattn.nn.states import CachedStates
from crossattn.nn.sublayers import split
from crossattn.types import AnyArray, Array, Float, Int, Key


@dataclass(frozen=True)
class LlavaConfig(SeeingDecoderConfig):
    """The shape of a LLaVA: of the language model, and of the encoder of pictures.

    Attributes:
      vision: an encoder, such as a CLIP's, that replaces the one of the ``image_`` values.
      keep_class_token: keep the vector of its class token before those of the patches.
      projector_layers: 1, a linear projector, or 2.
      projector_activation: between two layers.
      projector_bias: biases in the layers.
      image_id: the placeholder token of each vector of an image; None allows any.
    """

    image_size: tuple[int, int] = (32, 32)
    vision: ViTConfig | None = None
    keep_class_token: bool = False
    projector_layers: Annotated[int, "[1, 2]"] = 2
    projector_activation: Activation = "gelu_exact"
    projector_bias: bool = True
    image_id: int | None = None

    @property
    def tower(self) -> ViTConfig:
        """The config of the encoder of pictures."""
        return self.vision or self.patch_reader()

    @property
    def image_tokens(self) -> int:
        """The number of tokens of a picture of ``image_size`` in a text, P."""
        tower = self.tower
        return math.prod(patch_grid(tower.image_size, tower.patch_size)) + self.keep_class_token


def tiny(**changes: Any) -> LlavaConfig:
    """Returns a small configuration for tests."""
    small = LlavaConfig(
        **vars(decoder.tiny()),
        image_dim=16,
        image_size=(8, 8),
        patch_size=4,
        image_layers=1,
        image_heads=2,
        image_id=3,
    )
    return replace(small, **changes)


def example(config: LlavaConfig, rows: int = 2, padding: int = 0) -> dict[str, Any]:
    """Draws random arguments of a call; see ``Architecture``."""
    tokens, segment_ids = texts(rows, 4 + config.image_tokens, config.vocab_size, padding)
    if config.image_id is not None:
        tokens[:, 1 : 1 + config.image_tokens] = config.image_id
    return dict(
        tokens=tokens,
        images=vectors(rows, 1, *config.tower.image_size, config.channels),
        image_positions=np.ones((rows, 1), np.int32),
        segment_ids=segment_ids,
    )


class Llava(Decoder):
    """Tokens and images in, logits of the next token out.

    Raises:
      ValueError: pictures are smaller than a patch, or the projector has another number of layers.
    """

    def __init__(self, config: LlavaConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.vision = ViT(config.tower, rngs=rngs)
        # The vectors before those of patches that the text leaves out.
        self.skipped = 0 if config.keep_class_token else self.vision.patches.tokens
        self.projector = Projector(config, rngs=rngs)
        self.image_tokens, self.image_id = config.image_tokens, config.image_id

    @on_any_mesh
    def encode(
        self, images: Float[Array, "B I H W C"], key: Key[Array, ""] | None = None
    ) -> Float[Array, "B I P D"]:
        """Encodes pictures to vectors of the size of embeddings."""
        vectors = jnp.asarray(self.vision.encode(images, key=key).vectors)
        return self.projector(vectors[..., self.skipped :, :])

    def image_positions(
        self,
        tokens: Int[AnyArray, "B T"] | Sequence[Sequence[int]],
        images: Sequence[int] | None = None,
    ) -> Int[np.ndarray, "B I"]:
        """Finds the first position of each image in prompts with ``image_tokens`` of ``image_id`` for each.

        Args:
          tokens: [B T], or rows of unlike lengths; not traced, and without left padding.
          images: the number of images of each row; None checks no number.

        Raises:
          ValueError: a row has an image without its tokens, or tokens without an image; or this model has no
            ``image_id``.
        """
        if self.image_id is None:
            raise ValueError("this Llava has no image_id; set the token that stands for an image.")
        return image_positions(tokens, self.image_id, images, self.image_tokens)

    @on_any_mesh
    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        images: Float[AnyArray, "B I H W C"] | None = None,
        image_positions: Int[AnyArray, "B I"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B T D"]:
        """Computes the last vectors, before the output layer.

        Args:
          tokens: [B T], from position 0 on; the placeholders of an image may be any tokens.
          images: pictures [B I H W C].
          image_positions: the first position of each in the text, see the method; -1 is none.
          segment_ids: 0 for padding.
          key: turns dropout on.

        Raises:
          ValueError: one of images and positions is given without the other, or their numbers differ; or
            untraced tokens have another number of ``image_id`` than the images need.
        """
        keys = split(key, 3)
        context = self._images(images, image_positions, len(tokens), keys[2])
        self._check(tokens, images, image_positions)
        x = self._embed_text(tokens, context, keys[0])
        return self.decoder(x, self.decoder.read(), keys[1], segment_ids=segment_ids)[0]

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
        images: Float[AnyArray, "B I H W C"] | None = None,
        image_positions: Int[AnyArray, "B I"] | None = None,
        lookahead: int = 0,
    ) -> CachedStates:
        """Makes decoding states that have seen the images; for the other arguments see ``Autoregressive``.

        Args:
          images, image_positions: as in ``hidden``, of the prompt without its left padding.

        Raises:
          ValueError: as ``hidden`` does, or the inputs have not ``batch`` rows.
        """
        context = self._images(images, image_positions, batch, None)
        layers = self.decoder.read()
        return self._filled(layers, batch, num_beams, cache_length, lookahead, context)

    @on_any_mesh
    def patch_weights(
        self,
        tokens: Int[Array, "B T"],
        images: Float[AnyArray, "B I H W C"],
        image_positions: Int[AnyArray, "B I"],
    ) -> Float[Array, "B T I h w"]:
        """Computes the weights of tokens on patches in self-attention: means over layers and heads.

        The remaining weight of a token is on tokens. A token before an image has 0 for it, and patches read
        patches too.
        """
        context = self._images(images, image_positions, len(tokens), None)
        _, states = self.decoder(
            self._embed_text(tokens, context), self.decoder.read(), capture=("attention.weights",)
        )
        weights: Any = layer_weights(states)
        read = jnp.mean(weights, axis=(0, 2))[:, :, None]
        grid = self.vision.patches.grid((images.shape[2], images.shape[3]))
        starts = jnp.asarray(image_positions)[:, None, :, None]
        places = starts + self.image_tokens - math.prod(grid) + jnp.arange(math.prod(grid))
        found = jnp.take_along_axis(read, jnp.maximum(places, 0), axis=-1)
        return jnp.where(starts >= 0, found, 0).reshape(*found.shape[:3], *grid)

    def _embed_text(self, tokens: Array, context: Any, key: Any = None) -> Float[Array, "B T D"]:
        positions = jnp.arange(tokens.shape[-1])
        return self.embed(tokens[:, None], positions, context, key)[:, 0]

    def embed(
        self,
        tokens: Int[Array, "B J T"],
        positions: Int[Array, "*B T"],
        context: tuple[Array, Array] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B J T D"]:
        """Embeds tokens, and puts the row's images at their positions."""
        if context is None:
            return self.input(tokens, positions, key)
        vectors, starts = context
        B, count, P, D = vectors.shape
        places = jnp.broadcast_to(positions, (B, 1, tokens.shape[-1]))[..., None]
        starts = starts[:, None, None]
        which = places - starts + P * jnp.arange(count)  # [B 1 T I], of all vectors of the row
        inside = (starts >= 0) & (places >= starts) & (places < starts + P)
        which = jnp.max(jnp.where(inside, which, -1), axis=-1, initial=-1)
        found = jnp.take_along_axis(
            vectors.reshape(B, 1, count * P, D), jnp.maximum(which, 0)[..., None], axis=2
        )
        return self.input(tokens, positions, key, others=(which >= 0, found))

    def _images(
        self, images: Any, image_positions: Any, batch: int, key: Any
    ) -> tuple[Array, Array] | None:
        """Returns vectors of the images and their first positions; None without images."""
        given = with_places(images, image_positions, batch)
        return None if given is None else (self.encode(given[0], key), given[1])

    def _check(self, tokens: Any, images: Any, positions: Any) -> None:
        """Checks that untraced tokens have the placeholders of as many images."""
        known = not any(isinstance(x, jax.core.Tracer) for x in (tokens, positions))
        own = images is None or images.shape[-3:-1] == self.vision.image_size
        if self.image_id is None or not known or not own:
            return
        places = np.full((len(tokens), 1), -1) if positions is None else np.asarray(positions)
        self.image_positions(tokens, (places >= 0).sum(-1).tolist())


class Projector(nnx.Module):
    """A projection of patches to the size of embeddings: one linear layer, or two with a nonlinearity."""

    def __init__(self, config: LlavaConfig, *, rngs: nnx.Rngs):
        count, dim = config.projector_layers, config.block.dim
        if count not in (1, 2):
            raise ValueError(f"projector_layers is {count}; expected 1 or 2.")
        options: dict[str, Any] = dict(
            use_bias=config.projector_bias, dtype=config.block.dtype, rngs=rngs
        )
        image_dim = config.tower.block.dim
        self.first = linear(image_dim, dim, in_axes=("embed",), out_axes=("mlp",), **options)
        options |= dict(in_axes=("mlp",), out_axes=("embed",))
        self.second = linear(dim, dim, **options) if count == 2 else None
        self.activation: Activation = config.projector_activation

    def __call__(self, vectors: Float[Array, "*B P M"]) -> Float[Array, "*B P D"]:
        """Computes [*B P M] -> [*B P D]."""
        x = self.first(vectors)
        if self.second is not None:
            x = self.second(activate(self.activation, x))
        return x
