"""ANNalog, which rewrites molecules as their analogues (SMILES to SMILES).

A Transformer of Trevett's pytorch-seq2seq tutorial: post-norm, learned positions, separate tables of source,
target and output. Its package has no ``config.json``; ours is like BART's.
"""

from typing import Any

from crossattn.models.transformer import Transformer, TransformerConfig
from crossattn.nn.inputs import InputConfig
from crossattn.nn.outputs import OutputConfig
from crossattn.weights.rules import Names, Rules, under
from crossattn.weights.settings import Settings, bart_block

_ATTENTION = {"query": "fc_q", "key": "fc_k", "value": "fc_v", "out": "fc_o"}
_ENCODER = {
    **under("attention", "self_attention", _ATTENTION),
    "attention_residual.norm": "self_attn_layer_norm",
    "feedforward.up": "positionwise_feedforward.fc_1",
    "feedforward.down": "positionwise_feedforward.fc_2",
    "feedforward_residual.norm": "ff_layer_norm",
}
_DECODER = {
    **_ENCODER,
    **under("cross", "encoder_attention", _ATTENTION),
    "cross_residual.norm": "enc_attn_layer_norm",
}
_NAMES = {
    "source_input.embedding": "encoder.tok_embedding",
    "source_input.learned": "encoder.pos_embedding",
    "target_input.embedding": "decoder.tok_embedding",
    "target_input.learned": "decoder.pos_embedding",
    "output": "decoder.fc_out",
    **under("encoder.layers.{}", "encoder.layers.{}", _ENCODER),
    **under("decoder.stack.layers.{}", "decoder.layers.{}", _DECODER),
}


def configure(settings: Settings, names: Names, dtype: Any) -> tuple[Any, Any, Rules]:
    """Returns module, config and rules of this checkpoint."""
    config = TransformerConfig(
        vocab_size=settings["vocab_size"],
        block=bart_block(settings, "decoder", norm_first=False, dtype=dtype),
        encoder_block=bart_block(settings, "encoder", norm_first=False, dtype=dtype),
        encoder_layers=settings["encoder_layers"],
        decoder_layers=settings["decoder_layers"],
        source_vocab_size=settings["vocab_size"],
        positions="learned",
        max_length=settings["max_position_embeddings"],
        input=InputConfig(scale=settings["d_model"] ** 0.5),
        tie_output=False,
        output=OutputConfig(bias=True),
    )
    return Transformer, config, Rules(_NAMES)
