"""Llama, Mistral and Qwen2."""

import math
from dataclasses import replace
from typing import Any

from crossattn.models.decoder import Decoder, DecoderConfig
from crossattn.nn.inputs import InputConfig
from crossattn.nn.sublayers import BlockConfig
from crossattn.ops.positions.rotary import RopeScaling
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
# Defaults of the kinds.
_USUAL: dict[str, dict[str, Any]] = {
    "llama": dict(vocab_size=32000, intermediate_size=11008, max_position_embeddings=2048),
    "mistral": dict(
        vocab_size=32000, intermediate_size=14336, num_key_value_heads=8,
        max_position_embeddings=4096 * 32, sliding_window=4096,
    ),
    "qwen2": dict(
        vocab_size=151936, intermediate_size=22016, num_key_value_heads=32,
        max_position_embeddings=32768,
    ),
}  # fmt: skip


def configure(settings: Settings, names: Names, dtype: Any) -> tuple[Any, Any, Rules]:
    """Returns module, config and rules of this checkpoint."""
    kind = settings.get("model_type", "llama")
    settings = Settings(_USUAL[kind] | settings)
    settings.refuse("use_sliding_window", False)
    dim, heads = settings.get("hidden_size", 4096), settings.get("num_attention_heads", 32)
    block = BlockConfig.of(
        dim,
        heads,
        settings["intermediate_size"],
        num_kv_heads=settings.get("num_key_value_heads") or heads,
        head_dim=settings.get("head_dim"),
        activation=settings.activation("hidden_act", "silu", gated=True),
        norm="rms",
        norm_epsilon=settings.get("rms_norm_eps", 1e-6),
        use_bias=settings.get("mlp_bias", False),
        attention_dropout_rate=settings.get("attention_dropout", 0.0),
        dtype=dtype,
    )
    base, scaling = _rotations(settings)
    attention = replace(
        block.attention,
        use_bias=kind == "qwen2" or settings.get("attention_bias", False),
        out_bias=False if kind == "qwen2" else None,
        rope_base=base,
        rope_scaling=scaling,
    )
    tied = settings.get("tie_word_embeddings", False)
    config = DecoderConfig(
        vocab_size=settings["vocab_size"],
        block=replace(block, attention=attention),
        layers=settings.get("num_hidden_layers", 32),
        positions="rope",
        max_length=settings["max_position_embeddings"],
        window=settings.get("sliding_window") if kind == "mistral" else None,
        input=InputConfig(scale=1.0, frozen_id=settings.get("pad_token_id")),
        tie_output=tied,
    )
    rules = Rules(
        _NAMES,
        aliases={"lm_head.weight": "model.embed_tokens.weight"} if tied else {},
        # Early files hold the rotary wavelengths once a layer.
        unused=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
    )
    return Decoder, config, rules


def _rotations(settings: Settings) -> tuple[float, RopeScaling | None]:
    """Returns the base and the scaling of rotary positions.

    Raises:
      CheckpointError: the config scales them otherwise, or rotates a part of each head.
    """
    rope = Settings((settings.get("rope_parameters") or {}) | (settings.get("rope_scaling") or {}))
    kind = rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    rope.refuse("rope_type", "default", "linear", "dynamic", "llama3", "yarn")
    rope.refuse("partial_rotary_factor", 1.0)
    base = float(rope.get("rope_theta", settings.get("rope_theta", 10000.0)))
    if kind == "default":
        return base, None
    longest = settings["max_position_embeddings"]
    length = settings.get(
        "original_max_position_embeddings", rope.get("original_max_position_embeddings", longest)
    )
    if kind in ("linear", "dynamic"):
        return base, RopeScaling(kind, float(rope["factor"]), longest)
    if kind == "llama3":
        slow, fast = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        return base, RopeScaling(kind, float(rope["factor"]), length, slow, fast)
    factor = float(rope.get("factor") or longest / length)
    slow, fast = float(rope.get("beta_slow") or 1), float(rope.get("beta_fast") or 32)
    amplitude, whole = _amplitude(rope, factor), rope.get("truncate", True)
    return base, RopeScaling(kind, factor, length, slow, fast, amplitude, whole)


def _amplitude(rope: Settings, factor: float) -> float:
    """Returns the factor by which "yarn" multiplies queries and keys."""

    def grown(by: Any) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    scale, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    return grown(scale) / grown(of_all) if scale and of_all else grown(1)
