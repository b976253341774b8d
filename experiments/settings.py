"""From a config at the edge to the frozen dataclasses that the library takes.

Configs hold values only; here they meet the types. An unknown key or a wrong value becomes one
sentence that names it.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
from ml_collections import ConfigDict

from crossattn.models import DecoderConfig, TransformerConfig
from crossattn.nn import BlockConfig
from crossattn.train.config import CheckpointConfig, TrainConfig
from crossattn.train.optim import OptimConfig
from crossattn.train.sharding import MeshConfig

T = TypeVar("T")
ALIGNMENTS = ("none", "diagonal", "latent", "gold")
_BLOCK_FIELDS = {field.name for field in dataclasses.fields(BlockConfig)}


class SettingsError(ValueError):
    """A config holds a key or a value that does not fit."""


def build(kind: Callable[..., T], name: str, values: Mapping[str, Any], **more: Any) -> T:
    """``kind(**values)``, with errors that name the config's section."""
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    if unknown := [key for key in values if key not in known]:
        raise SettingsError(
            f"config.{name} has {', '.join(unknown)}; expected only {', '.join(known)}."
        )
    try:
        return kind(**values, **more)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"config.{name}: {error}") from None


def train_config(config: ConfigDict, resume: str = "auto") -> TrainConfig:
    """What the loop needs, from the sections train, optim, mesh and checkpoint."""
    train = config.train.to_dict()
    _check_loss(config)
    return build(
        TrainConfig,
        "train",
        train,
        seed=config.seed,
        optim=build(OptimConfig, "optim", config.optim.to_dict()),
        mesh=build(MeshConfig, "mesh", config.mesh.to_dict()),
        checkpoint=build(
            CheckpointConfig, "checkpoint", config.checkpoint.to_dict(), resume=resume
        ),
    )


def _check_loss(config: ConfigDict) -> None:
    smoothing, chunks, length = (
        config.loss.label_smoothing,
        config.loss.chunks,
        config.data.target_len,
    )
    if not 0.0 <= smoothing < 1.0:
        raise SettingsError(f"config.loss.label_smoothing is {smoothing}; expected 0 to below 1.")
    if chunks < 1 or (config.data.mode == "pack" and length % chunks):
        raise SettingsError(
            f"config.loss.chunks is {chunks}; expected a divisor of data.target_len, {length}."
        )
    if "alignment" in config.loss.to_dict():
        _check_alignment(config.loss, config.model.decoder_layers)
        _check_recipe(config.evaluate.alignment, config.model)


def _check_alignment(loss: Any, layers: int) -> None:
    kind, share = loss.alignment, loss.alignment_share
    if kind not in ALIGNMENTS:
        raise SettingsError(
            f"config.loss.alignment is {kind!r}; expected one of {', '.join(ALIGNMENTS)}."
        )
    layer = loss.alignment_layer
    if layer is not None and not -layers <= layer < layers:
        raise SettingsError(
            f"config.loss.alignment_layer is {layer}; the decoder has {layers} layers, from 0."
        )
    for name in ("alignment_weight", "alignment_coverage"):
        if not 0.0 <= loss[name] < float("inf"):
            raise SettingsError(f"config.loss.{name} is {loss[name]}; expected 0 or more.")
    if not 0.0 < share <= 1.0:
        raise SettingsError(
            f"config.loss.alignment_share is {share}; expected above 0 and at most 1."
        )


def _check_recipe(recipe: Any, model: Any) -> None:
    for name, size in (("layer", model.decoder_layers), ("head", model.num_heads)):
        given = recipe[name]
        if given is not None and not -size <= given < size:
            raise SettingsError(
                f"config.evaluate.alignment.{name} is {given}; the decoder has {size} {name}s, from 0."
            )


def transformer_config(
    model: ConfigDict,
    vocab_size: int,
    source_vocab_size: int | None,
    max_length: int,
    lexicon: bool = False,
) -> TransformerConfig:
    """The encoder-decoder that the section ``model`` describes."""
    return _model(
        TransformerConfig,
        model,
        vocab_size=vocab_size,
        source_vocab_size=source_vocab_size,
        max_length=max_length,
        lexicon=lexicon,
    )


def decoder_config(model: ConfigDict, vocab_size: int, max_length: int) -> DecoderConfig:
    """The decoder-only model that the section ``model`` describes."""
    return _model(DecoderConfig, model, vocab_size=vocab_size, max_length=max_length)


def _model(kind: Callable[..., T], model: ConfigDict, **sizes: Any) -> T:
    values = model.to_dict()
    block = {key: values.pop(key) for key in list(values) if key in _BLOCK_FIELDS}
    try:
        block["dtype"] = jnp.dtype(block.pop("dtype", "float32"))
    except TypeError as error:
        raise SettingsError(f"config.model.dtype: {error}.") from None
    return build(kind, "model", values, block=build(BlockConfig, "model", block), **sizes)


def saved_config(workdir: Path) -> ConfigDict:
    """The config that a run was started with.

    Raises:
      SettingsError: there is no run in ``workdir``.
    """
    path = workdir / "config.json"
    try:
        flat = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"there is no run in {workdir}: {path} does not exist.") from None
    except ValueError as error:
        raise SettingsError(f"{path} is damaged ({error}); restore it or train anew.") from None
    config: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        section = config
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return ConfigDict(config)
