"""CLIP: names of its tensors, meaning of its config."""

from typing import Any

from crossattn.models.vit import ViT, ViTConfig
from crossattn.nn.blocks import BlockConfig
from crossattn.weights.rules import Names, Rules, under
from crossattn.weights.settings import Settings

_LAYER = {
    "attention_residual.norm": "layer_norm1",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.out_proj",
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
# A tower was once a module inside of what is the tower now; positions of the table were kept beside it.
OLD_NAMES = {r"^vision_model\.": ""}
_UNUSED = (r"embeddings\.position_ids",)


def configure(settings: Settings, names: Names, dtype: Any) -> tuple[Any, Any, Rules]:
    """Module, config and rules of this checkpoint."""
    config, rules = vision(settings, dtype)
    return ViT, config, rules


def vision(settings: Settings, dtype: Any, layers: int | None = None) -> tuple[ViTConfig, Rules]:
    """Config and rules of the tower that reads pictures.

    Args:
      settings: the tower's.
      dtype: computation dtype.
      layers: how many of its layers are read, without the norm behind the last one; None is all, with it.
    """
    depth = settings.get("num_hidden_layers", 12)
    size, patch = settings.get("image_size", 224), settings.get("patch_size", 32)
    config = ViTConfig(
        _block(settings, dim=768, heads=12, dtype=dtype),
        layers=depth if layers is None else layers,
        patch_size=patch if isinstance(patch, int) else tuple(patch),
        image_size=(size, size) if isinstance(size, int) else tuple(size),
        channels=settings.get("num_channels", 3),
        patch_bias=False,
        input_norm=True,
        output_norm="class" if layers is None else "none",
    )
    unused = _UNUSED
    if layers is not None:
        left = "|".join(map(str, range(layers, depth)))
        unused += (r"post_layernorm\..*", *([rf"encoder\.layers\.({left})\..*"] if left else []))
    return config, Rules(_VISION, unused=unused, flat=("patches.class_token",))


def _block(settings: Settings, *, dim: int, heads: int, dtype: Any) -> BlockConfig:
    """A block of either tower; ``dim`` and ``heads`` are what a config that leaves them out has."""
    dim = settings.get("hidden_size", dim)
    return BlockConfig.of(
        dim,
        settings.get("num_attention_heads", heads),
        settings.get("intermediate_size", 4 * dim),
        activation=settings.activation("hidden_act", "quick_gelu"),
        norm_epsilon=settings.get("layer_norm_eps", 1e-5),
        attention_dropout_rate=settings.get("attention_dropout", 0.0),
        dtype=dtype,
    )
