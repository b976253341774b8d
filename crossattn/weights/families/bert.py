"""BERT, as encoder or decoder."""

import re
from typing import Any

import numpy as np

from crossattn.models.bert import Bert, BertConfig
from crossattn.models.decoder import Decoder, DecoderConfig
from crossattn.nn.inputs import InputConfig
from crossattn.nn.outputs import OutputConfig
from crossattn.weights.rules import Names, Rules, Shape, under
from crossattn.weights.settings import Settings, bert_block

ATTENTION = {n: f"self.{n}" for n in ("query", "key", "value")} | {"out": "output.dense"}
_LAYER = {
    **under("attention", "attention", ATTENTION),
    "attention_residual.norm": "attention.output.LayerNorm",
    **under("cross", "crossattention", ATTENTION),
    "cross_residual.norm": "crossattention.output.LayerNorm",
    "feedforward.up": "intermediate.dense",
    "feedforward.down": "output.dense",
    "feedforward_residual.norm": "output.LayerNorm",
}
_NAMES = {
    "input.embedding": "embeddings.word_embeddings",
    "input.learned": "embeddings.position_embeddings",
    "input.types": "embeddings.token_type_embeddings",
    "input.norm": "embeddings.LayerNorm",
    **under("encoder.layers.{}", "encoder.layer.{}", _LAYER),
    **under("decoder.stack.layers.{}", "encoder.layer.{}", _LAYER),
    "pooler": "pooler.dense",
}
_HEADS = {
    "next_sentence": "cls.seq_relationship",
    "output.dense": "cls.predictions.transform.dense",
    "output.norm": "cls.predictions.transform.LayerNorm",
    "output.bias": "cls.predictions.bias",
    "output": "cls.predictions.decoder",
}
_HEAD, _OUTPUT_BIAS = "cls.predictions.bias", "cls.predictions.decoder.bias"
# Classes that have more than the encoder.
_WITH_HEAD = ("BertForMaskedLM", "BertForPreTraining")
_WITH_PAIRS = ("BertForNextSentencePrediction", "BertForPreTraining")
PREFIX = "bert."
OLD_NAMES = {r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"}


def configure(settings: Settings, names: Names, dtype: Any) -> tuple[Any, Any, Rules]:
    """Returns module, config and rules of this checkpoint."""
    settings.refuse("position_embedding_type", "absolute")
    tied = settings.get("tie_word_embeddings", True)
    reads_on = settings.get("is_decoder", False)
    kind = settings.architecture
    head = reads_on or names.has("cls.predictions", kind, _WITH_HEAD)
    shared: dict[str, Any] = dict(
        vocab_size=settings["vocab_size"],
        block=bert_block(settings, dropout_rate=0.1, norm_first=False, dtype=dtype),
        layers=settings["num_hidden_layers"],
        max_length=settings["max_position_embeddings"],
        input=InputConfig(
            scale=1.0,
            token_types=settings["type_vocab_size"],
            norm_epsilon=settings.get("layer_norm_eps", 1e-12),
            frozen_id=settings.get("pad_token_id", 0),
        ),
        tie_output=tied or not head,
    )
    if reads_on:
        reads = settings.get("add_cross_attention", False)
        config = DecoderConfig(
            **shared,
            memory_dim=settings["hidden_size"] if reads else None,
            output=OutputConfig(transform=True, bias=True),
        )
        return Decoder, config, _rules(tied, names)
    follows = names.has("cls.seq_relationship", kind, _WITH_PAIRS)
    config = BertConfig(
        **shared,
        masked_lm=head,
        pooler=follows
        or any(names.has(f"{part}pooler", kind, (), may=("BertModel",)) for part in ("", PREFIX)),
        next_sentence=follows,
    )
    return Bert, config, _rules(tied, names)


def without_heads(settings: Settings, names: Names, dtype: Any) -> tuple[BertConfig, Rules]:
    """Returns config and rules of an encoder that is a module of another model."""
    own = Settings({**settings, "architectures": ["BertModel"]})
    return configure(own, names, dtype)[1], _BARE


def _rules(tied: bool, names: Names) -> Rules:
    whole = _BARE.inside("", PREFIX[:-1])
    if tied:
        aliases = {
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            _OUTPUT_BIAS: _HEAD,
        }
        return whole | Rules(_HEADS, aliases)
    # Not tied, the layer has a bias of its own, and nothing adds the head's.
    if _OUTPUT_BIAS not in names:
        return whole | Rules(_HEADS)
    own, unused = {"output.bias": _OUTPUT_BIAS}, (re.escape(_HEAD),)
    return whole | Rules(_HEADS | own, unused=unused, beside={_HEAD: _OUTPUT_BIAS})


def _position_ids(shape: Shape) -> np.ndarray:
    return np.broadcast_to(np.arange(shape[-1]), shape)


_BARE = Rules(_NAMES, constants={r"embeddings\.position_ids": _position_ids})
