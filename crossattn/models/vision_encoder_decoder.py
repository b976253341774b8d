"""Image captioning: a ViT encodes a picture, and a decoder of any width reads it by cross-attention.

    picture [H W C] ─► patches ─► layers of self-attention ─► vectors [1+S D] ─► [linear] ─┐
                                                                                   reads │
    words so far [T] ─► layers of masked self-attention, cross-attention ◄────────────────┘
                                     └─► logits of the next word [T V]

    y <- y + Attend(y, y before it); y <- y + Attend(y, ViT(picture)); y <- y + MLP(y)

A linear layer projects the ViT's vectors to a ``memory_dim`` of another size.

Source: Vinyals et al. 2015, "Show and Tell"; Li et al. 2023, "TrOCR", section 2.
"""

from dataclasses import dataclass, replace
from typing import Any

from flax import nnx

from crossattn.models import decoder, vit
from crossattn.models.decoder import DecoderConfig
from crossattn.models.encoder_decoder import EncoderDecoder
from crossattn.models.vit import ViT, ViTConfig
from crossattn.nn.encoded import Encoded
from crossattn.nn.examples import texts
from crossattn.nn.meshes import on_any_mesh
from crossattn.types import Array, Float, Key


@dataclass(frozen=True)
class VisionEncoderDecoderConfig:
    """The shapes of both halves.

    Attributes:
      encoder: of the encoder of pictures.
      decoder: of the decoder, see ``EncoderDecoderConfig``.
    """

    encoder: ViTConfig
    decoder: DecoderConfig


def tiny(**changes: Any) -> VisionEncoderDecoderConfig:
    """Returns a small configuration for tests."""
    reader, writer = vit.tiny(num_classes=None), decoder.tiny(memory_dim=24)
    return replace(VisionEncoderDecoderConfig(reader, writer), **changes)


def example(config: VisionEncoderDecoderConfig, rows: int = 2, padding: int = 0) -> dict[str, Any]:
    """Draws random arguments of a call; see ``Architecture``."""
    target_in, target_segment_ids = texts(rows, 5, config.decoder.vocab_size, padding)
    source = vit.example(config.encoder, rows)["image"]
    return dict(source=source, target_in=target_in, target_segment_ids=target_segment_ids)


class VisionEncoderDecoder(EncoderDecoder):
    """Pictures [*B H W C] and target tokens in, logits of the next token out.

    Called and decoded like an ``EncoderDecoder``; ``source`` is the pictures, which have no padding.
    """

    def __init__(self, config: VisionEncoderDecoderConfig, *, rngs: nnx.Rngs):
        super().__init__(config, build_encoder=ViT, rngs=rngs)

    @property
    def longest(self) -> tuple[None, int | None]:
        """None, as pictures have any size; and the largest number of target tokens."""
        return None, self.decoder.input.longest

    @property
    def pad_id(self) -> None:
        """None, as pictures have no padding."""
        return None

    @on_any_mesh
    def encode(
        self,
        source: Float[Array, "*B H W C"],
        segment_ids: None = None,
        positions: None = None,
        key: Key[Array, ""] | None = None,
    ) -> Encoded:
        """Encodes pictures to vectors [*B S M] of the size that the decoder reads: tokens, then patches."""
        return self.bridged(self.encoder.encode(source, key=key))
