"""TrOCR's decoder, which is BART's and may read vectors of another size."""

from typing import Any

from crossattn.models.decoder import Decoder, DecoderConfig
from crossattn.nn.inputs import InputConfig
from crossattn.weights.families.bart import DECODER_LAYER
from crossattn.weights.formats.safetensors import CheckpointError
from crossattn.weights.rules import Names, Rules, under
from crossattn.weights.settings import Settings, bart_block

_TABLE, _OUTPUT = "model.decoder.embed_tokens", "output_projection"
_NAMES = {
    "input.embedding": _TABLE,
    "input.learned": "model.decoder.embed_positions",
    "input.norm": "model.decoder.layernorm_embedding",
    "output": _OUTPUT,
    **under("decoder.stack.layers.{}", "model.decoder.layers.{}", DECODER_LAYER),
}


def configure(settings: Settings, names: Names, dtype: Any) -> tuple[Any, Any, Rules]:
    """Returns module, config and rules of this checkpoint."""
    dim, tied = settings["d_model"], settings.get("tie_word_embeddings", True)
    learned = settings.get("use_learned_position_embeddings", True)
    padding = settings.get("pad_token_id", 1)
    if not learned and dim % 2:
        raise CheckpointError(f"config.json has d_model {dim}; expected an even number.")
    config = DecoderConfig(
        vocab_size=settings["vocab_size"],
        block=bart_block(settings, "decoder", norm_first=False, dtype=dtype),
        layers=settings["decoder_layers"],
        positions="learned" if learned else "sinusoidal",
        max_length=settings.get("max_position_embeddings", 512),
        input=InputConfig(
            scale=dim**0.5 if settings.get("scale_embedding") else 1.0,
            position_offset=2,
            norm_epsilon=1e-5 if settings.get("layernorm_embedding", True) else None,
            frozen_id=padding,
            sinusoids_from=padding,
        ),
        tie_output=tied,
        memory_dim=settings.get("cross_attention_hidden_size") or dim,
    )
    aliases = {f"{_OUTPUT}.weight": f"{_TABLE}.weight"} if tied else {}
    # Early files hold a number of the type of sinusoids.
    return Decoder, config, Rules(_NAMES, aliases, unused=(r".*\._float_tensor",))
