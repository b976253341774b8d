"""A BERT that reads and a BERT that writes: the rules of both, one level down."""

from typing import Any

from crossattn.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from crossattn.weights.families import bert
from crossattn.weights.formats.safetensors import CheckpointError
from crossattn.weights.rules import Names, Rules
from crossattn.weights.settings import Settings

OLD_NAMES = bert.OLD_NAMES


def configure(settings: Settings, names: Names, dtype: Any) -> tuple[Any, Any, Rules]:
    """Module, config and rules of this checkpoint."""
    # The writer's class is that of the model that it was before it was one of a pair.
    reads, writes = (
        Settings({**settings[half], "architectures": None}) for half in ("encoder", "decoder")
    )
    for half, own in (("encoder", reads), ("decoder", writes)):
        if own["model_type"] != "bert":
            raise CheckpointError(
                f"config.json has a {half} of model_type {own['model_type']!r}; expected 'bert'."
            )
    reader, reader_rules = bert.without_heads(reads, names.within("encoder"), dtype)
    _, writer, writer_rules = bert.configure(writes, names.within("decoder"), dtype)
    rules = Rules({"bridge": "enc_to_dec_proj"}) | reader_rules.inside("encoder")
    config = EncoderDecoderConfig(reader, writer)
    return EncoderDecoder, config, rules | writer_rules.inside("decoder")
