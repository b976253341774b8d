"""Llama: names of its tensors, meaning of its config."""

from dataclasses import replace
from typing import Any

from crossattn.models.decoder import Decoder, DecoderConfig
from crossattn.nn.inputs import InputConfig
from crossattn.nn.sublayers import BlockConfig
from crossattn.weights.formats.safetensors import CheckpointError
from crossattn.weights.rules import Names, Rules, under
from crossattn.weights.settings import Settings

_LAYER = {
    "attention_residual.norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "feedforward_residual.norm": "post_attention_layernorm",
    **under("feedforward", "mlp", {"up": "up_proj", "gate": "gate_proj", "down": "down_proj"}),
}
_NAMES = {
    "input.embedding": "model.embed_tokens",
    "decoder.norm": "model.norm",
    "output": "lm_head",
    **under("decoder.stack.layers.{}", "model.layers.{}", _LAYER),
}
PREFIX = "model."


def configure(settings: Settings, names: Names, dtype: Any) -> tuple[Any, Any, Rules]:
    """Module, config and rules of this checkpoint; what its config leaves out is that of Llama 7B."""
    dim, heads = settings.get("hidden_size", 4096), settings.get("num_attention_heads", 32)
    block = BlockConfig.of(
        dim,
        heads,
        settings.get("intermediate_size", 11008),
        num_kv_heads=settings.get("num_key_value_heads") or heads,
        head_dim=settings.get("head_dim"),
        activation=settings.activation("hidden_act", "silu", gated=True),
        norm="rms",
        norm_epsilon=settings.get("rms_norm_eps", 1e-6),
        use_bias=settings.get("mlp_bias", False),
        rope_base=_rope_base(settings),
        attention_dropout_rate=settings.get("attention_dropout", 0.0),
        dtype=dtype,
    )
    attention = replace(block.attention, use_bias=settings.get("attention_bias", False))
    tied = settings.get("tie_word_embeddings", False)
    config = DecoderConfig(
        vocab_size=settings.get("vocab_size", 32000),
        block=replace(block, attention=attention),
        layers=settings.get("num_hidden_layers", 32),
        positions="rope",
        max_length=settings.get("max_position_embeddings", 2048),
        input=InputConfig(scale=1.0, frozen_id=settings.get("pad_token_id")),
        tie_output=tied,
    )
    rules = Rules(
        _NAMES,
        aliases={"lm_head.weight": "model.embed_tokens.weight"} if tied else {},
        # Wavelengths of the rotary positions, which early files hold once a layer.
        unused=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
    )
    return Decoder, config, rules


def _rope_base(settings: Settings) -> float:
    """The base of rotary positions, which are stretched by nothing.

    Raises:
      CheckpointError: the config stretches them, or rotates a part of each head.
    """
    scaling = settings.get("rope_scaling") or {}
    rope = (settings.get("rope_parameters") or {}) | scaling
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise CheckpointError(
            f"config.json has rotary positions of rope_type {kind!r}, which is not supported; expected "
            "'default'."
        )
    if (share := rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError(
            f"config.json has partial_rotary_factor {share!r}, which is not supported; expected 1.0."
        )
    return float(rope.get("rope_theta", settings.get("rope_theta", 10000.0)))
