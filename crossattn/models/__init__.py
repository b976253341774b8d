"""Architectures, one file each: a frozen config, the module, and ``tiny()`` for tests."""

from crossattn.models.bert import Bert, BertConfig
from crossattn.models.decoder import Decoder, DecoderConfig
from crossattn.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from crossattn.models.transformer import Transformer, TransformerConfig
from crossattn.models.whisper import Whisper, WhisperConfig

__all__ = [
    "Bert",
    "BertConfig",
    "Decoder",
    "DecoderConfig",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "Transformer",
    "TransformerConfig",
    "Whisper",
    "WhisperConfig",
]
