"""Perceiver: pictures with Fourier or learnt positions, classes of texts, and masked bytes."""

from dataclasses import replace
from typing import Any

from crossattn.models.perceiver_io import PerceiverIO, PerceiverIOConfig
from crossattn.nn.sublayers import BlockConfig
from crossattn.weights.families import bert
from crossattn.weights.formats.safetensors import CheckpointError
from crossattn.weights.rules import Names, Rules, under
from crossattn.weights.settings import Settings

_LAYER = {
    "attention_residual.norm": "attention.self.layernorm1",
    **under("attention", "attention", bert.ATTENTION),
    "feedforward_residual.norm": "layernorm",
    "feedforward.up": "mlp.dense1",
    "feedforward.down": "mlp.dense2",
}
_CROSS = {name.replace("attention", "cross"): theirs for name, theirs in _LAYER.items()} | {
    "cross.memory_norm": "attention.self.layernorm2"
}
_NAMES = {
    "latents": "perceiver.embeddings.latents",
    "tokens.embedding": "perceiver.input_preprocessor.embeddings",
    "tokens.learned": "perceiver.input_preprocessor.position_embeddings",
    "pixels.values": "perceiver.input_preprocessor.convnet_1x1",
    "pixels.positions.table": "perceiver.input_preprocessor.position_embeddings.position_embeddings",
    "pixels.projection": "perceiver.input_preprocessor.positions_projection",
    **under("read", "perceiver.encoder.cross_attention", _CROSS),
    **under("layers.layers.{}", "perceiver.encoder.self_attends.{}", _LAYER),
    "output.bias": "embedding_decoder.bias",
}
# Names in the decoder, which for classes is inside another.
_QUERIES, _WRITE = "output_position_encodings.position_embeddings", "decoding_cross_attention"
# Constants of the classes.
_FOURIER: dict[str, Any] = dict(image_size=(224, 224), bands=64)
_LEARNED_DIM, _TEXT_HEADS, _TEXT_KEYS = 256, 8, 8 * 32
_CLASSES = {
    "PerceiverForImageClassificationFourier": "fourier",
    "PerceiverForImageClassificationLearned": "learned",
    "PerceiverForMaskedLM": "masked",
    "PerceiverForSequenceClassification": "text",
}


def configure(settings: Settings, names: Names, dtype: Any) -> tuple[Any, Any, Rules]:
    """Returns module, config and rules of this checkpoint."""
    settings.refuse("cross_attention_shape_for_attention", "kv", "q")
    kind = _CLASSES.get(settings.architecture)
    if kind is None:
        raise CheckpointError(
            f"config.json has the architecture {settings.architecture!r}; expected one of "
            f"{', '.join(_CLASSES)}."
        )
    options: dict[str, Any] = dict(
        vocab_size=settings["vocab_size"],
        token_dim=settings["d_model"],
        max_length=settings["max_position_embeddings"],
    )
    memory_dim = settings["d_model"]
    if kind == "fourier":
        options, memory_dim = _FOURIER, 3 + 2 * (1 + 2 * _FOURIER["bands"])
    elif kind == "learned":
        size = settings.get("image_size", 56)
        options = dict(image_size=(size, size), pixel_positions="learned", pixel_dim=_LEARNED_DIM)
        memory_dim = 2 * _LEARNED_DIM
    block = _block(settings, dtype)
    config = PerceiverIOConfig(
        block,
        layers=settings["num_self_attends_per_block"],
        latents=settings["num_latents"],
        repeats=settings.get("num_blocks", 1),
        read=_read(settings, block, memory_dim),
        write=_write(settings, block, kind),
        read_skip=settings.get("use_query_residual", True),
        write_skip=kind != "masked",
        num_classes=None if kind == "masked" else settings.num_labels,
        **options,
    )
    decoder = "perceiver.decoder" + ("" if kind == "masked" else ".decoder")
    rules = Rules(
        _NAMES
        | {"queries.table": f"{decoder}.{_QUERIES}", "output.linear": f"{decoder}.final_layer"}
        | under("write", f"{decoder}.{_WRITE}", _CROSS),
        pointwise=("pixels.values.kernel",),
    )
    return PerceiverIO, config, rules


def _block(settings: Settings, dtype: Any) -> BlockConfig:
    """Returns the config of a layer between the latents."""
    dim = settings["d_latents"]
    keys = settings.get("qk_channels") or dim
    block = BlockConfig.of(
        dim,
        settings["num_self_attention_heads"],
        settings.get("self_attention_widening_factor", 1) * dim,
        activation=settings.activation("hidden_act", "gelu"),
        norm_epsilon=1e-5,  # that of torch; no model reads layer_norm_eps
        attention_dropout_rate=settings.get("attention_probs_dropout_prob", 0.1),
        dtype=dtype,
    )
    return _sized(block, block.attention.num_heads, keys, settings.get("v_channels"))


def _read(settings: Settings, block: BlockConfig, memory_dim: int) -> BlockConfig:
    """Returns the config of the block in which latents read inputs; keys have their size by default."""
    keys, hidden = settings.get("qk_channels"), settings.get("cross_attention_widening_factor", 1)
    if keys is None:
        by_query = settings.get("cross_attention_shape_for_attention", "kv") == "q"
        keys = block.dim if by_query else memory_dim
    heads, values = settings["num_cross_attention_heads"], settings.get("v_channels")
    block = replace(block, mlp=replace(block.mlp, hidden=hidden * block.dim))
    return _sized(block, heads, keys, values)


def _write(settings: Settings, block: BlockConfig, kind: str) -> BlockConfig:
    """Returns the config of the block in which queries read latents, which depends on the class."""
    masked = kind == "masked"
    dim = settings["d_model"] if masked else block.dim
    block = replace(block, dim=dim, mlp=replace(block.mlp, hidden=dim))
    return _sized(block, _TEXT_HEADS, _TEXT_KEYS, dim) if masked else _sized(block, 1, dim)


def _sized(block: BlockConfig, heads: int, keys: int, values: int | None = None) -> BlockConfig:
    """Returns the block with these sizes of keys and values, over all heads."""
    values = keys if values is None else values
    if keys % heads or values % heads:
        raise CheckpointError(
            f"config.json has {heads} heads of attention for keys of size {keys} and values of size "
            f"{values}; expected a divisor of both."
        )
    sizes = dict(head_dim=keys // heads, value_dim=values // heads)
    return replace(block, attention=replace(block.attention, num_heads=heads, **sizes))
