"""Pairs of a model that reads (BERT, ViT) and one that writes."""

import importlib
from typing import Any

from crossattn.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from crossattn.models.vision_encoder_decoder import VisionEncoderDecoder, VisionEncoderDecoderConfig
from crossattn.weights.families import bert, vit
from crossattn.weights.formats.safetensors import CheckpointError
from crossattn.weights.rules import Names, Rules
from crossattn.weights.settings import Settings

OLD_NAMES = bert.OLD_NAMES
# Kind of pair -> kinds of its halves.
_HALVES = {
    "encoder-decoder": dict(encoder=("bert",), decoder=("bert",)),
    "vision-encoder-decoder": dict(encoder=("vit", "deit"), decoder=("gpt2", "bert", "trocr")),
}


def configure(settings: Settings, names: Names, dtype: Any) -> tuple[Any, Any, Rules]:
    """Returns module, config and rules of this checkpoint."""
    halves = {}
    for half, known in _HALVES[settings["model_type"]].items():
        # The class of a half is that of a model of its own.
        own = halves[half] = Settings({**settings[half], "architectures": None})
        if own["model_type"] not in known:
            raise CheckpointError(
                f"config.json has {half} of model_type {own['model_type']!r}; expected one of "
                f"{', '.join(known)}."
            )
    reads, writes = halves["encoder"], halves["decoder"]
    family = importlib.import_module(f"crossattn.weights.families.{writes['model_type']}")
    _, writer, writer_rules = family.configure(writes, names.within("decoder"), dtype)
    if writer.memory_dim is None:
        raise CheckpointError(
            "config.json has a decoder that reads nothing; expected add_cross_attention true in it."
        )
    rules = Rules({"bridge": "enc_to_dec_proj"}) | writer_rules.inside("decoder")
    if settings["model_type"] == "encoder-decoder":
        reader, own = bert.without_heads(reads, names.within("encoder"), dtype)
        return EncoderDecoder, EncoderDecoderConfig(reader, writer), rules | own.inside("encoder")
    reader, own = vit.encoder(reads, dtype)
    # Nothing reads the pooler.
    like = {
        f"pooler.dense.{leaf}": f"encoder.layer.0.attention.output.dense.{leaf}"
        for leaf in ("weight", "bias")
    }
    own |= Rules({}, unused=(r"pooler\.dense\..*",), beside=like)
    config = VisionEncoderDecoderConfig(reader, writer)
    return VisionEncoderDecoder, config, rules | own.inside("encoder")
