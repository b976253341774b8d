"""T5, T5 v1.1, Flan-T5 and mT5."""

from typing import Any

from crossattn.models.transformer import Transformer, TransformerConfig
from crossattn.nn.inputs import InputConfig
from crossattn.nn.outputs import OutputConfig
from crossattn.nn.sublayers import BlockConfig
from crossattn.weights.rules import Names, Rules, under
from crossattn.weights.settings import Settings

_ATTENTION = {"query": "q", "key": "k", "value": "v", "out": "o"}
_SELF = {
    **under("attention", "0.SelfAttention", _ATTENTION),
    "attention_residual.norm": "0.layer_norm",
}
_CROSS = {
    **under("cross", "1.EncDecAttention", _ATTENTION),
    "cross_residual.norm": "1.layer_norm",
}


def _block(mlp: dict[str, str], last: int) -> dict[str, Any]:
    return {
        **_SELF,
        **under("feedforward", f"{last}.DenseReluDense", mlp),
        "feedforward_residual.norm": f"{last}.layer_norm",
    }


def _rules(gated: bool, tied: bool) -> Rules:
    mlp = {"gate": "wi_0", "up": "wi_1", "down": "wo"} if gated else {"up": "wi", "down": "wo"}
    bias = "block.0.layer.0.SelfAttention.relative_attention_bias"
    return Rules(
        {
            "target_input.embedding": "shared",
            "encoder_bias.relative": f"encoder.{bias}",
            "encoder_norm": "encoder.final_layer_norm",
            "decoder.bias.relative": f"decoder.{bias}",
            "decoder.norm": "decoder.final_layer_norm",
            "output": "lm_head",
            **under("encoder.layers.{}", "encoder.block.{}.layer", _block(mlp, 1)),
            **under("decoder.stack.layers.{}", "decoder.block.{}.layer", _block(mlp, 2) | _CROSS),
        },
        aliases={
            "encoder.embed_tokens.weight": "shared.weight",
            "decoder.embed_tokens.weight": "shared.weight",
            **({"lm_head.weight": "shared.weight"} if tied else {}),
        },
        # Early versions wrote it, and never added it.
        unused=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    )


def _may_be_tied(settings: Settings) -> bool:
    """Returns whether a missing output layer is the embedding, and not lost.

    Tied models scale its input, untied ones (v1.1, mT5) do not; early configs tell no more. Since
    version 5, transformers calls all models tied, and leaves an output layer out that equals the embedding.
    """
    headless = settings.architecture.endswith(("T5Model", "EncoderModel"))
    return not headless and ("scale_decoder_outputs" in settings or settings["model_type"] == "mt5")


def configure(settings: Settings, names: Names, dtype: Any) -> tuple[Any, Any, Rules]:
    """Returns module, config and rules of this checkpoint."""
    mt5 = settings["model_type"] == "mt5"
    usual = "gated-gelu" if mt5 else "relu"
    gate, _, inner = settings.get("feed_forward_proj", usual).rpartition("-")
    gated = gate == "gated"
    # "gelu" is exact elsewhere, but not in the first gated models.
    inner = "gelu_new" if gated and inner == "gelu" else inner
    activation = Settings(feed_forward_proj=inner).activation("feed_forward_proj", gated=gated)
    dim, dropout = settings["d_model"], settings.get("dropout_rate", 0.1)
    block = BlockConfig.of(
        dim,
        settings["num_heads"],
        settings["d_ff"],
        head_dim=settings["d_kv"],
        activation=activation,
        norm="rms",
        norm_epsilon=settings.get("layer_norm_epsilon", 1e-6),
        use_bias=False,
        attention_scale=1.0,
        relative_buckets=settings.get("relative_attention_num_buckets", 32),
        relative_distance=settings.get("relative_attention_max_distance", 128),
        dropout_rate=dropout,
        attention_dropout_rate=dropout,
        mlp_dropout_rate=dropout,
        dtype=dtype,
    )
    tied = settings.get("tie_word_embeddings", True)
    scaled = not mt5 and settings.get("scale_decoder_outputs", tied)
    tied = scaled or ("lm_head.weight" not in names and _may_be_tied(settings))
    config = TransformerConfig(
        vocab_size=settings["vocab_size"],
        block=block,
        encoder_layers=settings["num_layers"],
        decoder_layers=settings.get("num_decoder_layers") or settings["num_layers"],
        positions="relative",
        input=InputConfig(scale=1.0),
        tie_output=tied,
        output=OutputConfig(scale=dim**-0.5 if scaled else 1.0),
    )
    return Transformer, config, _rules(gated, tied)
