"""From a config at the edge to the frozen dataclasses that the library takes.

Configs hold values only; here they meet the table of keys and the types. An unknown key or a wrong value
becomes one sentence that names it, before anything is computed.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
from ml_collections import ConfigDict

from crossattn.data import evaluation
from crossattn.data.corruption import Objective, PrefixLM, SpanCorruption
from crossattn.data.packing import length_buckets
from crossattn.functional import flatten
from crossattn.models import DecoderConfig, TransformerConfig
from crossattn.nn import BLOCK_KEYS, BlockConfig
from crossattn.train.config import CheckpointConfig, TrainConfig
from crossattn.train.errors import MissingPackage
from crossattn.train.evaluate import translation_scores
from crossattn.train.optim import OptimConfig
from crossattn.train.sharding import MeshConfig
from crossattn.train.storage import Folder
from crossattn.train.workdir import read_settings
from experiments.keys import KEYS, TASKS, suggestion

T = TypeVar("T")


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
    check(config)
    return build(
        TrainConfig,
        "train",
        config.train.to_dict(),
        seed=config.seed,
        optim=build(OptimConfig, "optim", config.optim.to_dict()),
        mesh=build(MeshConfig, "mesh", config.mesh.to_dict()),
        checkpoint=build(
            CheckpointConfig, "checkpoint", config.checkpoint.to_dict(), resume=resume
        ),
    )


def check(config: ConfigDict) -> None:
    """Hold a config to the table of keys, and values that concern each other to one another.

    Raises:
      SettingsError: names the key, its value and what was expected.
    """
    values = flatten(config.to_dict())
    task = values.get("task")
    if task not in TASKS:
        raise SettingsError(f"config.task is {task!r}; expected one of {', '.join(TASKS)}.")
    own = {name: key for name, key in KEYS.items() if key.belongs(task)}
    for name, value in values.items():
        if name not in own:
            raise SettingsError(
                f"the config has {name}, which is no key of a {task}{suggestion(name, own)} "
                "--help=config lists all."
            )
        if not own[name].takes(value) or not _is_unicode(value):
            raise SettingsError(
                f"config.{name} is {_clipped(value)}; expected {own[name].expected}."
            )
    missing = [name for name, key in own.items() if key.needed and name not in values]
    if missing:
        raise SettingsError(f"the config lacks {', '.join(missing)}; see --help=config.")
    _check_model(config.model)
    if task == "denoising":
        objective(config.data, config.tokenizer.vocab_size)
    _check_chunks(config)
    _check_metric(config)
    if task == "translation":
        _check_layers(config)
        _check_decoding(config)


def _is_unicode(value: Any) -> bool:
    """Whether a text can be written as UTF-8: bytes of another encoding, or half a character, cannot."""
    return not isinstance(value, str) or not any("\ud800" <= x <= "\udfff" for x in value)


def _clipped(value: Any) -> str:
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_model(model: Any) -> None:
    """What building a model does not look at, and its first step would fail on."""
    head = model.get("head_dim") or model.dim // model.num_heads
    rotary = model.positions == "rope" or model.get("rope_base") is not None
    if rotary and head % 2:
        raise SettingsError(
            f"config.model has heads of size {head}; rotary positions expect an even number."
        )
    if model.positions == "sinusoidal" and model.dim % 2:
        raise SettingsError(
            f"config.model.dim is {model.dim}; sinusoidal positions expect an even number."
        )
    buckets, distance = model.get("relative_buckets", 32), model.get("relative_distance", 128)
    if model.positions == "relative" and distance <= buckets // 2:
        raise SettingsError(
            f"config.model.relative_distance is {distance}; expected more than half of"
            f" relative_buckets, {buckets}."
        )


def _check_chunks(config: ConfigDict) -> None:
    """The loss cuts every length that training and evaluation come in, which are few."""
    data, chunks = config.data, config.loss.chunks
    source = data.source_len if config.task == "translation" else 0
    sizes = (data.rows, source, data.target_len)
    cut = config.task != "denoising"  # whose batches have one length
    buckets = length_buckets(*sizes, fractions=evaluation.FRACTIONS) if cut else []
    if data.get("mode") == "bucket":
        buckets = [*buckets, *length_buckets(*sizes)]
    lengths = sorted({data.target_len, *(bucket.target_len for bucket in buckets)})
    if any(length % chunks for length in lengths):
        listed = ", ".join(map(str, lengths))
        raise SettingsError(
            f"config.loss.chunks is {chunks}; expected a divisor of every length that data.target_len "
            f"makes in training and evaluation: {listed}."
        )


def _check_metric(config: ConfigDict) -> None:
    metric = config.checkpoint.best_metric
    if metric not in ("bleu", "chrf"):
        return
    if config.task != "translation" or not config.evaluate.examples:
        raise SettingsError(
            f"config.checkpoint.best_metric is {metric!r}, which only a translation with "
            "evaluate.examples of 1 or more measures; take 'loss'."
        )


def _check_layers(config: ConfigDict) -> None:
    recipe, model = config.evaluate.alignment, config.model
    for name, given, size, what in (
        ("loss.alignment_layer", config.loss.alignment_layer, model.decoder_layers, "layers"),
        ("evaluate.alignment.layer", recipe.layer, model.decoder_layers, "layers"),
        ("evaluate.alignment.head", recipe.head, model.num_heads, "heads"),
    ):
        if given is not None and not -size <= given < size:
            raise SettingsError(f"config.{name} is {given}; the decoder has {size} {what}, from 0.")


def _check_decoding(config: ConfigDict) -> None:
    data, asked = config.data, config.evaluate.decoding.max_new_tokens
    longest = max(data.source_len, data.target_len)
    if asked is not None and asked > longest and config.model.positions == "learned":
        raise SettingsError(
            f"config.evaluate.decoding.max_new_tokens is {asked}; the table of learned positions has "
            f"{longest}, of data.source_len and data.target_len."
        )


def check_scores(config: ConfigDict) -> None:
    """Score one sentence, so that a package or tokenizer that is missing shows before hours of work.

    Raises:
      SettingsError: sacreBLEU does not take ``evaluate.bleu_tokenize``.
      MissingPackage: sacreBLEU is not installed.
    """
    tokenize = config.evaluate.bleu_tokenize
    try:
        translation_scores(["a"], ["a"], tokenize=tokenize)
    except Exception as error:
        if isinstance(error, MissingPackage):
            raise
        raise SettingsError(
            f"config.evaluate.bleu_tokenize is {tokenize!r}, which sacreBLEU does not take here: "
            f"{type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


def transformer_config(
    model: ConfigDict,
    vocab_size: int,
    source_vocab_size: int | None,
    max_length: int,
) -> TransformerConfig:
    """The encoder-decoder that the section ``model`` describes."""
    return _model(
        TransformerConfig,
        model,
        vocab_size=vocab_size,
        source_vocab_size=source_vocab_size,
        max_length=max_length,
    )


def decoder_config(model: ConfigDict, vocab_size: int, max_length: int) -> DecoderConfig:
    """The decoder-only model that the section ``model`` describes."""
    return _model(DecoderConfig, model, vocab_size=vocab_size, max_length=max_length)


def objective(data: Any, vocab_size: int) -> Objective:
    """What the section ``data`` of a denoising makes of text, with so many tokens in the tokenizer.

    Raises:
      SettingsError: lengths or sentinels do not suffice.
    """
    lengths = {"source_len": data.source_len, "target_len": data.target_len}
    if data.objective == "prefix_lm":
        return build(PrefixLM, "data", lengths)
    noise = {name: data[name] for name in ("sentinels", "density", "span")}
    return build(SpanCorruption, "data", lengths | noise, vocab_size=vocab_size)


def _model(kind: Callable[..., T], model: ConfigDict, **sizes: Any) -> T:
    values = model.to_dict()
    block = {key: values.pop(key) for key in list(values) if key in BLOCK_KEYS}
    try:
        block["dtype"] = jnp.dtype(block.pop("dtype", "float32"))
    except TypeError as error:
        raise SettingsError(f"config.model.dtype: {error}.") from None
    return build(kind, "model", values, block=_block(block), **sizes)


def _block(values: Mapping[str, Any]) -> BlockConfig:
    """The parts of a block, from the flat keys of the section ``model``."""
    try:
        return BlockConfig.of(**values)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"config.model: {error}") from None


def saved_config(workdir: Folder) -> ConfigDict:
    """The config that a run was started with.

    Raises:
      SettingsError: there is no run in ``workdir``, or its config.json is damaged.
    """
    path = workdir / "config.json"
    try:
        flat = read_settings(path)
    except FileNotFoundError:
        raise SettingsError(f"there is no run in {workdir}: {path} does not exist.") from None
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path} cannot be read ({error}); restore it or train anew.") from None
    config: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        section = config
        for parent in parents:
            section = section.setdefault(parent, {}) if isinstance(section, dict) else None
        if not isinstance(section, dict) or not all(name.split(".")):
            raise SettingsError(f"{path} is damaged (at {name!r}); restore it or train anew.")
        section[last] = value
    try:
        found = ConfigDict(config)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{path} is damaged ({error}); restore it or train anew.") from None
    try:
        check(found)
    except SettingsError as error:
        raise SettingsError(f"{path} does not fit: {error}") from None
    return found
