"""Whisper."""

from typing import Any

from crossattn.models.transformer import TransformerConfig
from crossattn.models.whisper import STRIDE, Whisper, WhisperConfig
from crossattn.nn.inputs import InputConfig
from crossattn.weights.families.bart import LAYERS
from crossattn.weights.rules import Names, Rules
from crossattn.weights.settings import Settings, bart_block

_NAMES = {
    "source_input.first": "model.encoder.conv1",
    "source_input.second": "model.encoder.conv2",
    "source_input.positions": "model.encoder.embed_positions",
    "target_input.embedding": "model.decoder.embed_tokens",
    "target_input.learned": "model.decoder.embed_positions",
    "encoder_norm": "model.encoder.layer_norm",
    "decoder.norm": "model.decoder.layer_norm",
    **LAYERS,
}
_RULES = Rules(_NAMES, aliases={"proj_out.weight": "model.decoder.embed_tokens.weight"})
PREFIX = "model."


def configure(settings: Settings, names: Names, dtype: Any) -> tuple[Any, WhisperConfig, Rules]:
    """Returns module, config and rules of this checkpoint."""
    settings.refuse("tie_word_embeddings", True)
    options: dict[str, Any] = dict(key_bias=False, dropout_rate=0.0, dtype=dtype)
    text = TransformerConfig(
        vocab_size=settings["vocab_size"],
        block=bart_block(settings, "decoder", **options),
        encoder_block=bart_block(settings, "encoder", **options),
        encoder_layers=settings["encoder_layers"],
        decoder_layers=settings["decoder_layers"],
        positions="learned",
        max_length=settings["max_target_positions"],
        # transformers ignores scale_embedding here.
        input=InputConfig(scale=1.0, frozen_id=settings.get("pad_token_id", 50256)),
    )
    frames = STRIDE * settings["max_source_positions"]
    return Whisper, WhisperConfig(text, settings["num_mel_bins"], frames), _RULES
