"""BART, mBART, PLBart, MVP, Blenderbot, Marian and Pegasus."""

from typing import Any

import numpy as np

from crossattn.models.transformer import Transformer, TransformerConfig
from crossattn.nn.inputs import InputConfig, PositionScheme
from crossattn.nn.outputs import OutputConfig
from crossattn.ops.positions.sinusoids import sinusoid_table
from crossattn.weights.formats.safetensors import CheckpointError
from crossattn.weights.rules import Names, Rules, Shape, under
from crossattn.weights.settings import Settings, bart_block

ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
_ENCODER = {
    **under("attention", "self_attn", ATTENTION),
    "attention_residual.norm": "self_attn_layer_norm",
    "feedforward.up": "fc1",
    "feedforward.down": "fc2",
    "feedforward_residual.norm": "final_layer_norm",
}
DECODER_LAYER = {
    **_ENCODER,
    **under("cross", "encoder_attn", ATTENTION),
    "cross_residual.norm": "encoder_attn_layer_norm",
}
LAYERS = {
    **under("encoder.layers.{}", "model.encoder.layers.{}", _ENCODER),
    **under("decoder.stack.layers.{}", "model.decoder.layers.{}", DECODER_LAYER),
}
_NAMES = {
    "target_input.embedding": "model.shared",
    "source_input.learned": "model.encoder.embed_positions",
    "source_input.norm": "model.encoder.layernorm_embedding",
    "target_input.learned": "model.decoder.embed_positions",
    "target_input.norm": "model.decoder.layernorm_embedding",
    "encoder_norm": "model.encoder.layer_norm",
    "decoder.norm": "model.decoder.layer_norm",
    "output": "lm_head",
    "output.bias": "final_logits_bias",
    **LAYERS,
}
PREFIX = "model."
_HALVES = ("encoder", "decoder")
_PRE_NORM = ("mbart", "blenderbot", "pegasus")
_SINUSOIDAL = ("marian", "pegasus")
_NORMED_INPUT = ("bart", "mbart", "mvp", "plbart")
# Default padding tokens; 1 for the others.
_PADDING = {"blenderbot": 0, "marian": 58100, "pegasus": 0}
_SEPARATE = {
    "source_input.embedding": "model.encoder.embed_tokens",
    "target_input.embedding": "model.decoder.embed_tokens",
}
_SHARED, _SOURCE, _TARGET, _OUTPUT = (
    f"{module}.weight" for module in ("model.shared", *_SEPARATE.values(), "lm_head")
)


def configure(settings: Settings, names: Names, dtype: Any) -> tuple[Any, Any, Rules]:
    """Returns module, config and rules of this checkpoint.

    A missing ``final_logits_bias`` is zeros, as in transformers; but a Marian that was saved without its
    head has lost a learnt one.
    """
    settings.refuse("use_prompt", False)
    kind = settings["model_type"]
    needs_bias = settings.get("architectures") == ["MarianModel"]
    positions: PositionScheme = "sinusoidal" if kind in _SINUSOIDAL else "learned"
    options: dict[str, Any] = dict(norm_first=kind in _PRE_NORM, dtype=dtype)
    tied = settings.get("tie_word_embeddings", True)
    vocab = settings["vocab_size"]
    separate = _separate_tables(settings, names)
    config = TransformerConfig(
        vocab_size=settings.get("decoder_vocab_size") or vocab,
        block=bart_block(settings, "decoder", **options),
        encoder_block=bart_block(settings, "encoder", **options),
        encoder_layers=settings["encoder_layers"],
        decoder_layers=settings["decoder_layers"],
        source_vocab_size=vocab if separate else None,
        separate_inputs=positions == "learned",
        positions=positions,
        max_length=settings["max_position_embeddings"],
        input=InputConfig(
            scale=settings["d_model"] ** 0.5
            if settings.get("scale_embedding", kind == "plbart")
            else 1.0,
            position_offset=2 if positions == "learned" and kind != "blenderbot" else 0,
            norm_epsilon=1e-5 if kind in _NORMED_INPUT else None,
            frozen_id=settings.get("pad_token_id", _PADDING.get(kind, 1)),
            sinusoid_dtype=_stored_sinusoids(names) if positions == "sinusoidal" else None,
        ),
        tie_output=tied,
        output=OutputConfig(bias=needs_bias or "final_logits_bias" in names),
    )
    beside: dict[str, Any] = {}
    if separate and settings.get("share_encoder_decoder_embeddings", True):
        beside = {_SHARED: _TARGET}
    if positions == "sinusoidal":
        shape = settings["max_position_embeddings"], settings["d_model"]
        beside = beside | {f"model.{half}.embed_positions.weight": shape for half in _HALVES}
    return Transformer, config, _rules(separate, tied) | Rules({}, beside=beside)


def _separate_tables(settings: Settings, names: Names) -> bool:
    """Returns whether source and target have tables of their own, as Marian's may and untied models do."""
    shared = settings.get("share_encoder_decoder_embeddings", True)
    return not shared or (not settings.get("tie_word_embeddings", True) and _SOURCE in names)


def _rules(separate: bool, tied: bool) -> Rules:
    aliases = {} if separate else {_SOURCE: _SHARED, _TARGET: _SHARED}
    if tied:
        aliases[_OUTPUT] = _TARGET if separate else _SHARED
    return Rules(
        _NAMES | _SEPARATE if separate else _NAMES,
        aliases=aliases,
        constants={r"model\.(encoder|decoder)\.embed_positions\.weight": _sinusoids},
        # An untied model still has this table.
        unused=(r"model\.shared\.weight",) if separate else (),
        rows=("output.bias",),
    )


def _sinusoids(shape: Shape) -> np.ndarray:
    return sinusoid_table(*shape)


def _stored_sinusoids(names: Names) -> str | None:
    """Returns the half precision of a checkpoint's tables of positions; None for float32 or no tables."""
    types = names.dtypes or {}
    tables = {f"model.{half}.embed_positions.weight" for half in _HALVES}
    dtypes = {types[table] for table in tables & types.keys()}
    if len(dtypes) > 1:
        raise CheckpointError(
            f"the tables of positions are of types {' and '.join(sorted(dtypes))}."
        )
    return {"BF16": "bfloat16", "F16": "float16"}.get("".join(dtypes))
