"""A picture in words: a ViT reads it, and a decoder of another width reads the ViT by cross-attention.

    picture [H W C] ─► patches ─► layers of self-attention ─► vectors [1+S D] ─► [linear] ─┐
                                                                                   reads │
    words so far [T] ─► layers of masked self-attention, cross-attention ◄────────────────┘
                                     └─► logits of the next word [T V]

    y <- y + Attend(y, y before it); y <- y + Attend(y, ViT(picture)); y <- y + MLP(y)

The linear layer is there where the decoder's ``memory_dim`` is not the size of the ViT's vectors.

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
      encoder: of the half that reads the picture.
      decoder: of the half that writes, see ``EncoderDecoderConfig``.
    """

    encoder: ViTConfig
    decoder: DecoderConfig


def tiny(**changes: Any) -> VisionEncoderDecoderConfig:
    """A configuration that compiles and runs in a blink, for tests."""
    reader, writer = vit.tiny(num_classes=None), decoder.tiny(memory_dim=24)
    return replace(VisionEncoderDecoderConfig(reader, writer), **changes)


def example(config: VisionEncoderDecoderConfig, rows: int = 2, padding: int = 0) -> dict[str, Any]:
    """Arguments of a call, drawn at random; see ``Architecture``."""
    target_in, target_segment_ids = texts(rows, 5, config.decoder.vocab_size, padding)
    source = vit.example(config.encoder, rows)["image"]
    return dict(source=source, target_in=target_in, target_segment_ids=target_segment_ids)


class VisionEncoderDecoder(EncoderDecoder):
    """Pictures [*B H W C] and target tokens in, logits of the next token out.

    Called and decoded like an ``EncoderDecoder``; ``source`` is the pictures, of which nothing is padding.
    """

    def __init__(self, config: VisionEncoderDecoderConfig, *, rngs: nnx.Rngs):
        super().__init__(config, build_encoder=ViT, rngs=rngs)

    @property
    def longest(self) -> tuple[None, int | None]:
        """Pictures are of any size; the most tokens of a text that have positions."""
        return None, self.decoder.input.longest

    @property
    def pad_id(self) -> None:
        """Pictures are not filled up."""
        return None

    @on_any_mesh
    def encode(
        self,
        source: Float[Array, "*B H W C"],
        segment_ids: None = None,
        positions: None = None,
        key: Key[Array, ""] | None = None,
    ) -> Encoded:
        """The picture's vectors [*B S M], as the decoder reads them: of its tokens, then its patches."""
        return self.bridged(self.encoder.encode(source, key=key))
