"""CLIP."""

import re
from typing import Any

from crossattn.models.clip import CLIP, CLIPConfig
from crossattn.models.decoder import DecoderConfig
from crossattn.models.vit import ViT, ViTConfig
from crossattn.nn.inputs import InputConfig
from crossattn.nn.sublayers import BlockConfig
from crossattn.weights.families.bart import ATTENTION
from crossattn.weights.rules import Names, Rules, under
from crossattn.weights.settings import Settings, pair_of

_LAYER = {
    "attention_residual.norm": "layer_norm1",
    **under("attention", "self_attn", ATTENTION),
    "feedforward_residual.norm": "layer_norm2",
    "feedforward.up": "mlp.fc1",
    "feedforward.down": "mlp.fc2",
}
_VISION = {
    "patches.class_token": "embeddings.class_embedding",
    "patches.projection": "embeddings.patch_embedding",
    "patches.positions": "embeddings.position_embedding",
    "input_norm": "pre_layrnorm",
    "norm": "post_layernorm",
    **under("encoder.layers.{}", "encoder.layers.{}", _LAYER),
}
_TEXT = {
    "input.embedding": "embeddings.token_embedding",
    "input.learned": "embeddings.position_embedding",
    "decoder.norm": "final_layer_norm",
    **under("decoder.stack.layers.{}", "encoder.layers.{}", _LAYER),
}
_COMPARED = {
    "vision_projection": "visual_projection",
    "text_projection": "text_projection",
    "logit_scale": "logit_scale",
}
PREFIX = "vision_model."
# Positions 0, 1, ... of early files.
_UNUSED = (r"embeddings\.position_ids",)
_OWN_END = 2


def configure(settings: Settings, names: Names, dtype: Any) -> tuple[Any, Any, Rules]:
    """Returns module, config and rules of this checkpoint."""
    if settings["model_type"] == "clip_vision_model":
        config, rules = vision(settings, dtype)
        return ViT, config, rules.inside("", PREFIX[:-1])
    reads = _half(settings, "text_config")
    seen, seen_rules = vision(_half(settings, "vision_config"), dtype)
    end = reads.get("eos_token_id", 49407)
    text = DecoderConfig(
        vocab_size=reads.get("vocab_size", 49408),
        block=_block(reads, dim=512, heads=8, mlp_dim=2048, dtype=dtype),
        layers=reads.get("num_hidden_layers", 12),
        max_length=reads.get("max_position_embeddings", 77),
        input=InputConfig(scale=1.0),
    )
    # Early configs name a wrong end; texts end with their highest token.
    config = CLIPConfig(
        seen, text, settings.get("projection_dim", 512), None if end == _OWN_END else end
    )
    rules = Rules(_COMPARED) | seen_rules.inside("vision", "vision_model")
    return CLIP, config, rules | Rules(_TEXT, unused=_UNUSED).inside("text", "text_model")


def _half(settings: Settings, name: str) -> Settings:
    """Returns the config of a tower; an early ``{name}_dict`` replaces it, defaults included."""
    early = settings.get(f"{name}_dict")
    return Settings((settings.get(name) or {}) if early is None else early)


def vision(settings: Settings, dtype: Any, layers: int | None = None) -> tuple[ViTConfig, Rules]:
    """Returns config and rules of the tower of pictures: all of it, or ``layers`` layers without a norm."""
    depth = settings.get("num_hidden_layers", 12)
    config = ViTConfig(
        _block(settings, dim=768, heads=12, mlp_dim=3072, dtype=dtype),
        layers=depth if layers is None else layers,
        patch_size=pair_of(settings.get("patch_size", 32)),
        image_size=pair_of(settings.get("image_size", 224)),
        channels=settings.get("num_channels", 3),
        patch_bias=False,
        input_norm=True,
        output_norm="class" if layers is None else "none",
    )
    like: dict[str, str] = {}
    if layers is not None:
        like = {"post_layernorm": "pre_layrnorm"}
        for layer in range(layers, depth):
            like |= {
                f"encoder.layers.{layer}.{n}": f"encoder.layers.0.{n}" for n in _LAYER.values()
            }
    beside = {f"{n}.{leaf}": f"{o}.{leaf}" for n, o in like.items() for leaf in ("weight", "bias")}
    unused = (*_UNUSED, *map(re.escape, beside))
    beside = beside if layers else {}
    return config, Rules(_VISION, unused=unused, beside=beside, flat=("patches.class_token",))


def _block(settings: Settings, *, dim: int, heads: int, mlp_dim: int, dtype: Any) -> BlockConfig:
    """Returns a block of either tower; ``dim``, ``heads`` and ``mlp_dim`` are transformers' defaults."""
    return BlockConfig.of(
        settings.get("hidden_size", dim),
        settings.get("num_attention_heads", heads),
        settings.get("intermediate_size", mlp_dim),
        activation=settings.activation("hidden_act", "quick_gelu"),
        norm_epsilon=settings.get("layer_norm_eps", 1e-5),
        attention_dropout_rate=settings.get("attention_dropout", 0.0),
        dtype=dtype,
    )
