"""g2p-en, which pronounces English words: letters to phonemes, by GRUs without attention.

The decoder begins with the encoder's last state. Its package has no ``config.json``; ours has its sizes and
the phonemes, tokens of the target, in order.

Source: Park and Kim 2019, github.com/Kyubyong/g2p.
"""

from typing import Any

from crossattn.models.rnn_encoder_decoder import RNNEncoderDecoder, RNNEncoderDecoderConfig
from crossattn.nn.inputs import InputConfig
from crossattn.nn.outputs import OutputConfig
from crossattn.weights.rules import Names, Rules
from crossattn.weights.settings import Settings

_NAMES = {
    "source_input.embedding.table": "enc_emb",
    "target_input.embedding.table": "dec_emb",
    "output.table": "fc_w",
    "output.bias": "fc_b",
}
for _cell, _side in (("encoder.layers.{}.0", "enc"), ("decoder.cells.{}", "dec")):
    for _layer, _end in (("input", "ih"), ("state", "hh")):
        _NAMES[f"{_cell}.{_layer}.kernel"] = f"{_side}_w_{_end}"
        _NAMES[f"{_cell}.{_layer}.bias"] = f"{_side}_b_{_end}"


def configure(settings: Settings, names: Names, dtype: Any) -> tuple[Any, Any, Rules]:
    """Returns module, config and rules of this checkpoint."""
    config = RNNEncoderDecoderConfig(
        vocab_size=settings["vocab_size"],
        source_vocab_size=settings["source_vocab_size"],
        dim=settings["hidden_size"],
        encoder_layers=1,
        decoder_layers=1,
        attention=None,
        bidirectional=False,
        bridge=False,
        input=InputConfig(scale=1.0),
        tie_output=False,
        output=OutputConfig(bias=True),
        dtype=dtype,
    )
    return RNNEncoderDecoder, config, Rules(_NAMES)
