"""SpeechT5, the checkpoints that speak (``SpeechT5ForTextToSpeech``)."""

from typing import Any

from crossattn.models.speecht5 import SpeechT5, SpeechT5Config
from crossattn.nn.sublayers import BlockConfig
from crossattn.weights.families.bart import ATTENTION
from crossattn.weights.formats.safetensors import CheckpointError
from crossattn.weights.rules import Names, Rules, under
from crossattn.weights.settings import Settings

_FEEDFORWARD = {
    "feedforward.up": "feed_forward.intermediate_dense",
    "feedforward.down": "feed_forward.output_dense",
}
_ENCODER = {
    **under("attention", "attention", ATTENTION),
    "attention_norm": "layer_norm",
    **_FEEDFORWARD,
    "feedforward_norm": "final_layer_norm",
}
_DECODER = {
    **under("attention", "self_attn", ATTENTION),
    "attention_residual.norm": "self_attn_layer_norm",
    **under("cross", "encoder_attn", ATTENTION),
    "cross_residual.norm": "encoder_attn_layer_norm",
    **_FEEDFORWARD,
    "feedforward_residual.norm": "final_layer_norm",
}
_READER, _WRITER = "speecht5.encoder.wrapped_encoder", "speecht5.decoder.wrapped_decoder"
_NAMES = {
    "letters": "speecht5.encoder.prenet.embed_tokens",
    "letter_position_scale": "speecht5.encoder.prenet.encode_positions.alpha",
    "encoder_norm": f"{_READER}.layer_norm",
    "relative_keys": f"{_READER}.embed_positions.pe_k.weight",
    **under("encoder.{}", f"{_READER}.layers.{{}}", _ENCODER),
    "prenet.first": "speecht5.decoder.prenet.layers.0",
    "prenet.second": "speecht5.decoder.prenet.layers.1",
    "prenet.out": "speecht5.decoder.prenet.final_layer",
    "frame_position_scale": "speecht5.decoder.prenet.encode_positions.alpha",
    "speaker": "speecht5.decoder.prenet.speaker_embeds_layer",
    **under("decoder.stack.layers.{}", f"{_WRITER}.layers.{{}}", _DECODER),
    "frames": "speech_decoder_postnet.feat_out",
    "stop": "speech_decoder_postnet.prob_out",
    "postnet.layers.{}.conv": "speech_decoder_postnet.layers.{}.conv",
    "postnet.layers.{}.norm": "speech_decoder_postnet.layers.{}.batch_norm",
}
# Counts of training batches; tables of sinusoids that older checkpoints have.
_RULES = Rules(_NAMES, unused=(r".*\.num_batches_tracked", r"speecht5\..*\.encode_positions\.pe"))


def configure(settings: Settings, names: Names, dtype: Any) -> tuple[Any, SpeechT5Config, Rules]:
    """Returns module, config and rules of this checkpoint."""
    known = settings.get("architectures") or ["SpeechT5ForTextToSpeech"]
    if known != ["SpeechT5ForTextToSpeech"]:
        raise CheckpointError(
            f"config.json has architectures {known}; of SpeechT5 the model that speaks is read,"
            " SpeechT5ForTextToSpeech."
        )
    settings.refuse("speech_decoder_prenet_layers", 2)
    config = SpeechT5Config(
        vocab_size=settings["vocab_size"],
        block=_block(settings, "decoder", dtype),
        encoder_block=_block(settings, "encoder", dtype),
        encoder_layers=settings.get("encoder_layers", 12),
        decoder_layers=settings.get("decoder_layers", 6),
        mels=settings.get("num_mel_bins", 80),
        group=settings.get("reduction_factor", 2),
        prenet_dim=settings.get("speech_decoder_prenet_units", 256),
        prenet_dropout_rate=settings.get("speech_decoder_prenet_dropout", 0.5),
        postnet_layers=settings.get("speech_decoder_postnet_layers", 5),
        postnet_dim=settings.get("speech_decoder_postnet_units", 256),
        postnet_width=settings.get("speech_decoder_postnet_kernel", 5),
        postnet_dropout_rate=settings.get("speech_decoder_postnet_dropout", 0.5),
        speaker_dim=settings.get("speaker_embedding_dim", 512),
        farthest=settings.get("encoder_max_relative_position", 160),
    )
    return SpeechT5, config, _RULES


def _block(settings: Settings, half: str, dtype: Any) -> BlockConfig:
    return BlockConfig.of(
        dim=settings.get("hidden_size", 768),
        num_heads=settings.get(f"{half}_attention_heads", 12),
        mlp_dim=settings.get(f"{half}_ffn_dim", 3072),
        activation=settings.activation("hidden_act", "gelu"),
        norm_first=False,
        norm_epsilon=settings.get("layer_norm_eps", 1e-5),
        dropout_rate=settings.get("hidden_dropout", 0.1),
        attention_dropout_rate=settings.get("attention_dropout", 0.1),
        mlp_dropout_rate=settings.get("activation_dropout", 0.1),
        dtype=dtype,
    )
