"""Architectures, one file each: a frozen config, the module, and ``tiny()`` for tests."""

from crossattn.models.decoder import Decoder, DecoderConfig
from crossattn.models.transformer import Transformer, TransformerConfig

__all__ = ["Decoder", "DecoderConfig", "Transformer", "TransformerConfig"]
