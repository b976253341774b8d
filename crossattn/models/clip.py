"""CLIP: an encoder of pictures and one of texts, whose vectors are similar for matching pairs.

    picture [H W C] ─► ViT ─► class token's vector ─► linear ─► unit length ─┐
                                                                   products ─► logits [pictures texts]
    text [T] ─► layers of masked self-attention ─► vector at </s> ─► linear ─► unit length ─┘

    logits = e^s I T^t,  I = unit(W_i vision(picture)),  T = unit(W_t text(tokens))

There is no cross-attention; a LLaVA uses the encoder of pictures.

Source: Radford et al. 2021, "Learning Transferable Visual Models From Natural Language Supervision".
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx

from crossattn.models import decoder, vit
from crossattn.models.decoder import Decoder, DecoderConfig
from crossattn.models.vit import ViT, ViTConfig
from crossattn.nn.examples import texts
from crossattn.nn.layers import linear
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.sublayers import split
from crossattn.types import Array, Float, Int, Key


@dataclass(frozen=True)
class CLIPConfig:
    """The shape of a CLIP.

    Attributes:
      vision: the encoder of pictures.
      text: the encoder of texts, without its output layer.
      dim: size of the compared vectors, E.
      eos_id: the token whose first vector represents its text; None is the highest token of each text,
        the end of a text in CLIP's own vocabulary.
    """

    vision: ViTConfig
    text: DecoderConfig
    dim: int
    eos_id: int | None = None


def tiny(**changes: Any) -> CLIPConfig:
    """Returns a small configuration for tests."""
    reader = vit.tiny(num_classes=None, patch_bias=False, input_norm=True, output_norm="class")
    return replace(CLIPConfig(reader, decoder.tiny(), dim=16), **changes)


def example(config: CLIPConfig, rows: int = 2, padding: int = 0) -> dict[str, Any]:
    """Draws random arguments of a call; see ``Architecture``."""
    tokens, segment_ids = texts(rows, 5, config.text.vocab_size, padding)
    tokens[:, 4] = config.text.vocab_size - 1  # where a text ends, which is where it is read
    image = vit.example(config.vision, rows)["image"]
    return dict(image=image, tokens=tokens, segment_ids=segment_ids)


class CLIP(nnx.Module):
    """Pictures [I H W C] and texts [J T] in, logits [I J] that they match out."""

    def __init__(self, config: CLIPConfig, *, rngs: nnx.Rngs):
        self.vision = ViT(config.vision, rngs=rngs)
        self.text = Decoder(config.text, rngs=rngs)
        options: dict[str, Any] = dict(
            in_axes=("embed",), out_axes=("mlp",), use_bias=False, rngs=rngs
        )
        self.vision_projection = linear(config.vision.block.dim, config.dim, **options)
        self.text_projection = linear(config.text.block.dim, config.dim, **options)
        self.logit_scale = nnx.Param(jnp.asarray(math.log(1 / 0.07)), axes=())
        self.eos_id = config.eos_id

    @on_any_mesh
    def encode_image(
        self, image: Float[Array, "*B H W C"], *, key: Key[Array, ""] | None = None
    ) -> Float[Array, "*B E"]:
        """Computes vectors of pictures, of unit length; a key turns dropout on."""
        return _unit(self.vision_projection(self.vision.hidden(image, key=key)))

    @on_any_mesh
    def encode_text(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        *,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B E"]:
        """Computes vectors of texts, of unit length; tokens after the end have no influence."""
        vectors = self.text.hidden(tokens, segment_ids=segment_ids, key=key)
        ends = tokens if self.eos_id is None else tokens == self.eos_id
        ends = ends if segment_ids is None else jnp.where(segment_ids > 0, ends, -1)
        last = jnp.argmax(ends, axis=-1)
        own = jnp.take_along_axis(vectors, last[..., None, None], axis=-2)[..., 0, :]
        return _unit(self.text_projection(own))

    @on_any_mesh
    def __call__(
        self,
        image: Float[Array, "I H W C"],
        tokens: Int[Array, "J T"],
        segment_ids: Int[Array, "J T"] | None = None,
        *,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "I J"]:
        """Computes logits of each picture with each text, float32."""
        keys = split(key, 2)
        images = self.encode_image(image, key=keys[0])
        said = self.encode_text(tokens, segment_ids, key=keys[1])
        return jnp.exp(self.logit_scale[...]) * (images @ said.T)


def _unit(x: Float[Array, "*B E"]) -> Float[Array, "*B E"]:
    x = x.astype(jnp.float32)
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)
