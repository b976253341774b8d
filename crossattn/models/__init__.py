"""Architectures, one file each: a frozen config, the module, and ``tiny()`` for tests."""

from crossattn.models.decoder import Decoder, DecoderConfig
from crossattn.models.transformer import Transformer, TransformerConfig
from crossattn.models.whisper import Whisper, WhisperConfig

__all__ = [
    "Decoder",
    "DecoderConfig",
    "Transformer",
    "TransformerConfig",
    "Whisper",
    "WhisperConfig",
]
