"""A ViT that reads and a decoder that writes: the rules of both, one level down."""

import importlib
from typing import Any

from crossattn.models.vision_encoder_decoder import VisionEncoderDecoder, VisionEncoderDecoderConfig
from crossattn.weights.families import bert, vit
from crossattn.weights.formats.safetensors import CheckpointError
from crossattn.weights.rules import Names, Rules
from crossattn.weights.settings import Settings

OLD_NAMES = bert.OLD_NAMES
_READERS, _WRITERS = ("vit", "deit"), ("gpt2", "bert", "trocr")


def configure(settings: Settings, names: Names, dtype: Any) -> tuple[Any, Any, Rules]:
    """Module, config and rules of this checkpoint."""
    # A half's class is that of the model that it was before it was one of a pair.
    reads, writes = (
        Settings({**settings[half], "architectures": None}) for half in ("encoder", "decoder")
    )
    for half, own, known in (("encoder", reads, _READERS), ("decoder", writes, _WRITERS)):
        if own["model_type"] not in known:
            raise CheckpointError(
                f"config.json has {half} of model_type {own['model_type']!r}; expected one of "
                f"{', '.join(known)}."
            )
    reader, reader_rules = vit.encoder(reads, dtype)
    # Nothing reads what a pooler says of the picture.
    like = {
        f"pooler.dense.{leaf}": f"encoder.layer.0.attention.output.dense.{leaf}"
        for leaf in ("weight", "bias")
    }
    reader_rules |= Rules({}, unused=(r"pooler\.dense\..*",), beside=like)
    family = importlib.import_module(f"crossattn.weights.families.{writes['model_type']}")
    _, writer, writer_rules = family.configure(writes, names.within("decoder"), dtype)
    if writer.memory_dim is None:
        raise CheckpointError(
            "config.json has a decoder that reads nothing; expected add_cross_attention true in it."
        )
    rules = Rules({"bridge": "enc_to_dec_proj"}) | reader_rules.inside("encoder")
    config = VisionEncoderDecoderConfig(reader, writer)
    return VisionEncoderDecoder, config, rules | writer_rules.inside("decoder")
