"""GPT-2."""

from typing import Any

import numpy as np

from crossattn.models.decoder import Decoder, DecoderConfig
from crossattn.nn.inputs import InputConfig
from crossattn.nn.sublayers import BlockConfig
from crossattn.weights.rules import Names, Part, Rules, Shape, under
from crossattn.weights.settings import Settings

# Queries, keys and values are one layer.
_LAYER = {
    "attention_residual.norm": "ln_1",
    "attention.query": Part("attn.c_attn", 0, 3),
    "attention.key": Part("attn.c_attn", 1, 3),
    "attention.value": Part("attn.c_attn", 2, 3),
    "attention.out": "attn.c_proj",
    "cross_residual.norm": "ln_cross_attn",
    "cross.query": "crossattention.q_attn",
    "cross.key": Part("crossattention.c_attn", 0, 2),
    "cross.value": Part("crossattention.c_attn", 1, 2),
    "cross.out": "crossattention.c_proj",
    "feedforward_residual.norm": "ln_2",
    "feedforward.up": "mlp.c_fc",
    "feedforward.down": "mlp.c_proj",
}
_NAMES = {
    "input.embedding": "transformer.wte",
    "input.learned": "transformer.wpe",
    "decoder.norm": "transformer.ln_f",
    "output": "lm_head",
    **under("decoder.stack.layers.{}", "transformer.h.{}", _LAYER),
}
PREFIX = "transformer."


def configure(settings: Settings, names: Names, dtype: Any) -> tuple[Any, Any, Rules]:
    """Returns module, config and rules of this checkpoint."""
    settings.refuse("scale_attn_by_inverse_layer_idx", False)
    dim = settings["n_embd"]
    block = BlockConfig.of(
        dim,
        settings["n_head"],
        settings.get("n_inner") or 4 * dim,
        activation=settings.activation("activation_function", "gelu_new"),
        norm_epsilon=settings.get("layer_norm_epsilon", 1e-5),
        attention_scale=None if settings.get("scale_attn_weights", True) else 1.0,
        dropout_rate=settings.get("resid_pdrop", 0.1),
        attention_dropout_rate=settings.get("attn_pdrop", 0.1),
        dtype=dtype,
    )
    tied = settings.get("tie_word_embeddings", True)
    config = DecoderConfig(
        vocab_size=settings["vocab_size"],
        block=block,
        layers=settings["n_layer"],
        max_length=settings["n_positions"],
        input=InputConfig(scale=1.0, dropout_rate=settings.get("embd_pdrop", 0.1)),
        tie_output=tied,
        memory_dim=dim if settings.get("add_cross_attention") else None,
    )
    rules = Rules(
        _NAMES,
        aliases={"lm_head.weight": "transformer.wte.weight"} if tied else {},
        # Early files hold the causal mask and its value once a layer.
        constants={r"transformer\.h\.\d+\.(attn|crossattention)\.bias": _causal},
        unused=(r"transformer\.h\.\d+\.(attn|crossattention)\.masked_bias",),
        untransposed=(".*",),
    )
    return Decoder, config, rules


def _causal(shape: Shape) -> np.ndarray:
    return np.broadcast_to(np.tri(shape[-2], shape[-1]), shape)
