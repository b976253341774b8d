"""LLaVA: a CLIP that reads, a Llama that writes, and the projector between them."""

from dataclasses import fields
from typing import Any

from crossattn.models.llava import Llava, LlavaConfig
from crossattn.weights.families import clip, llama
from crossattn.weights.formats.safetensors import CheckpointError
from crossattn.weights.rules import Names, Rules
from crossattn.weights.settings import Settings

_PROJECTOR = {
    "projector.first": "multi_modal_projector.linear_1",
    "projector.second": "multi_modal_projector.linear_2",
}
# Other versions save the model inside another, or a module around its tower.
OLD_NAMES = {
    r"^lm_head\.": "language_model.lm_head.",
    r"^model\.language_model\.": "language_model.model.",
    r"^model\.(vision_tower|multi_modal_projector)\.": r"\1.",
    r"^vision_tower\.vision_model\.": "vision_tower.",
}


def configure(settings: Settings, names: Names, dtype: Any) -> tuple[Any, Any, Rules]:
    """Returns module, config and rules of this checkpoint."""
    parts = {}
    for part, wanted in (("vision_config", "clip_vision_model"), ("text_config", "llama")):
        parts[part] = Settings(settings.get(part) or {})
        if (kind := parts[part].get("model_type", wanted)) != wanted:
            raise CheckpointError(
                f"config.json has a {part} of model_type {kind!r}, which is not supported; expected "
                f"{wanted!r}."
            )
    reads, writes = parts["vision_config"], parts["text_config"]
    writes["tie_word_embeddings"] = any(
        own.get("tie_word_embeddings", False) for own in (settings, writes)
    )
    settings.refuse("vision_feature_select_strategy", "default", "full")
    tower, tower_rules = clip.vision(reads, dtype, _depth(settings, reads))
    _, writer, rules = llama.configure(writes, names.within("language_model"), dtype)
    config = LlavaConfig(
        **{field.name: getattr(writer, field.name) for field in fields(writer)},
        vision=tower,
        keep_class_token=settings.get("vision_feature_select_strategy") == "full",
        projector_activation=settings.activation("projector_hidden_act", "gelu"),
        projector_bias=settings.get("multimodal_projector_bias", True),
        image_id=settings.get("image_token_index", settings.get("image_token_id", 32000)),
    )
    rules = rules.inside("", "language_model") | Rules(_PROJECTOR)
    rules |= tower_rules.inside("vision", "vision_tower")
    return Llava, config, rules


def _depth(settings: Settings, reads: Settings) -> int:
    """Returns the number of layers of the tower that are read.

    Raises:
      CheckpointError: the config names several layers, or one that the tower lacks.
    """
    layers, chosen = reads.get("num_hidden_layers", 12), settings.get("vision_feature_layer", -2)
    if type(chosen) is not int:
        raise CheckpointError(
            f"config.json has vision_feature_layer {chosen!r}, which is not supported; expected one number."
        )
    depth = chosen if chosen >= 0 else layers + 1 + chosen
    if not 0 <= depth <= layers:
        raise CheckpointError(
            f"config.json has vision_feature_layer {chosen!r} of a tower of {layers} layers; expected "
            f"{-layers - 1} to {layers}."
        )
    return depth
