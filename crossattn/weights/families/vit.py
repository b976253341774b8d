"""ViT and DeiT."""

from dataclasses import replace
from typing import Any

from crossattn.models.vit import ViT, ViTConfig
from crossattn.weights.rules import Names, Rules, under
from crossattn.weights.settings import Settings, bert_block, pair_of

_LAYER = {
    "attention_residual.norm": "layernorm_before",
    **under("attention", "attention.attention", {n: n for n in ("query", "key", "value")}),
    "attention.out": "attention.output.dense",
    "feedforward_residual.norm": "layernorm_after",
    "feedforward.up": "intermediate.dense",
    "feedforward.down": "output.dense",
}
_TABLES = {
    "patches.class_token": "embeddings.cls_token",
    "patches.distillation_token": "embeddings.distillation_token",
    "patches.positions.table": "embeddings.position_embeddings",
}
_NAMES = {
    **_TABLES,
    "patches.projection": "embeddings.patch_embeddings.projection",
    "norm": "layernorm",
    "pooler": "pooler.dense",
    **under("encoder.layers.{}", "encoder.layer.{}", _LAYER),
}
_HEADS = {"output.linear": "classifier"}
_TWO_HEADS = {
    "output.linear": "cls_classifier",
    "distillation_output.linear": "distillation_classifier",
}


def configure(settings: Settings, names: Names, dtype: Any) -> tuple[Any, Any, Rules]:
    """Returns module, config and rules of this checkpoint."""
    kind = settings.architecture
    heads = _TWO_HEADS if kind.endswith("WithTeacher") else _HEADS
    if not kind.endswith(("ForImageClassification", "WithTeacher")):
        config, rules = encoder(
            settings, dtype, pooler=names.has("pooler", kind, (), may=("ViTModel", "DeiTModel"))
        )
        return ViT, config, rules
    options = dict(num_classes=settings.num_labels, distillation_output=heads is _TWO_HEADS)
    config, rules = encoder(settings, dtype, **options)
    return ViT, config, rules.inside("", settings["model_type"]) | Rules(heads)


def encoder(settings: Settings, dtype: Any, **options: Any) -> tuple[ViTConfig, Rules]:
    """Returns config and rules of the model without heads; options are of its config."""
    settings.refuse("pooler_act", "tanh")
    dim = settings["hidden_size"]
    settings.refuse("pooler_output_size", dim, None)
    block = bert_block(settings, dtype=dtype)
    attention = replace(block.attention, use_bias=settings.get("qkv_bias", True), out_bias=True)
    config = ViTConfig(
        replace(block, attention=attention),
        layers=settings["num_hidden_layers"],
        patch_size=pair_of(settings["patch_size"]),
        image_size=pair_of(settings["image_size"]),
        channels=settings.get("num_channels", 3),
        distillation_token=settings["model_type"] == "deit",
        **options,
    )
    return config, Rules(_NAMES, rows=tuple(_TABLES))
