"""A BERT that reads and a BERT that writes: the rules of both, one level down."""

from typing import Any

from crossattn.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from crossattn.weights.families import bert
from crossattn.weights.formats.safetensors import CheckpointError
from crossattn.weights.rules import Names, Rules
from crossattn.weights.settings import Settings

# The encoder was saved without a head, so its names lack a prefix which the decoder's have.
OLD_NAMES = {**bert.OLD_NAMES, r"^encoder\.(?!bert\.)": f"encoder.{bert.PREFIX}"}


def configure(settings: Settings, names: Names, dtype: Any) -> tuple[Any, Any, Rules]:
    """Module, config and rules of this checkpoint."""
    reader, reader_rules = _half(settings, names, "encoder", dtype)
    writer, writer_rules = _half(settings, names, "decoder", dtype)
    bridge = Rules({"bridge": "enc_to_dec_proj"})
    config = EncoderDecoderConfig(reader, writer)
    return EncoderDecoder, config, bridge | reader_rules | writer_rules


def _half(settings: Settings, names: Names, half: str, dtype: Any) -> tuple[Any, Rules]:
    # The half's class is that of the model that it was before it was one of a pair.
    own = Settings({**settings[half], "architectures": None})
    if own["model_type"] != "bert":
        raise CheckpointError(
            f"config.json has a {half} of model_type {own['model_type']!r}; expected 'bert'."
        )
    _, config, rules = bert.configure(own, names.within(half), dtype)
    return config, rules.inside(half)
