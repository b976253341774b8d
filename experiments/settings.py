"""Configs, checked against the table of their keys, and the frozen dataclasses that they become.

An unknown key or a wrong value is refused in one sentence, before anything is computed.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, get_type_hints

import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from crossattn import models
from crossattn.functional import flatten, nest
from crossattn.nn import BLOCK_KEYS, BlockConfig
from crossattn.train.config import CheckpointConfig, TrainConfig
from crossattn.train.optim import UNUSED, OptimConfig
from crossattn.train.sharding import MeshConfig, make_mesh
from crossattn.train.storage import Folder
from crossattn.train.workdir import read_settings
from experiments import keys, tasks
from experiments.errors import SettingsError

T = TypeVar("T")

_FIRST = ("task", "model.name", "data.name")  # they determine the other keys


def build(kind: Callable[..., T], name: str, values: Mapping[str, Any], **more: Any) -> T:
    """Returns ``kind(**values)``; errors name the section of the config."""
    try:
        return kind(**values, **more)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"config.{name}: {error}") from None


def train_config(config: ConfigDict, resume: str = "auto") -> TrainConfig:
    """Returns the values of the training loop, from the sections train, optim, mesh and checkpoint."""
    check(config)
    values = build(
        TrainConfig,
        "train",
        section_of(config, "train"),
        seed=config.seed,
        optim=build(OptimConfig, "optim", section_of(config, "optim")),
        mesh=build(MeshConfig, "mesh", section_of(config, "mesh")),
        checkpoint=build(
            CheckpointConfig, "checkpoint", section_of(config, "checkpoint"), resume=resume
        ),
    )
    own = keys.of(config)
    for member in values.members:
        for name, value in member.optim.items():
            if not (key := own[f"optim.{name}"]).takes(value):
                raise SettingsError(
                    f"config.train.sweep has optim.{name} {value:g}; expected {key.expected}."
                )
            if name in UNUSED.get(values.optim.name, ()):
                raise SettingsError(
                    f"config.train.sweep has optim.{name}, which {values.optim.name} does not use; leave it"
                    " out."
                )
    return values


def config_mesh(config: ConfigDict) -> Mesh | None:
    """Returns the mesh of a config, None on one device.

    Raises:
      SettingsError: a key is unknown.
      ValueError: the sizes do not multiply to the number of devices.
    """
    return make_mesh(build(MeshConfig, "mesh", section_of(config, "mesh")))


def section_of(config: ConfigDict, name: str) -> dict[str, Any]:
    """Returns the values of a section; a missing one has none."""
    return config[name].to_dict() if name in config else {}


def check(config: ConfigDict) -> None:
    """Checks the keys and values of a config.

    Raises:
      SettingsError: names the key, its value and the values that it takes.
    """
    own, given = keys.of(config), flatten(config.to_dict())
    for name, value in given.items():
        if name not in own:
            raise SettingsError(keys.no_key(name, config, own))
        if not own[name].takes(value) or not _is_unicode(value):
            raise SettingsError(
                f"config.{name} is {_clipped(value)}; expected {own[name].expected}."
            )
    missing = [
        name for name, key in own.items() if key.default is keys.NEEDED and name not in given
    ]
    if missing:
        raise SettingsError(f"the config lacks {', '.join(missing)}; see --help=config.")
    for section in _shapes(config.model):
        _check_model(*section)
    _check_tokenizers(section_of(config, "tokenizer"), section_of(config, "init"))
    _check_init(section_of(config, "init"), config.model.name == keys.NAME_OF_PRETRAINED)
    tasks.find(config.task).check(config)


def put(config: ConfigDict | None, texts: Mapping[str, str]) -> None:
    """Sets keys of a config, given by the texts of ``--config.KEY=TEXT``.

    Raises:
      SettingsError: there is no config or no such key, or the key takes no such value.
    """
    if config is None:
        raise SettingsError(
            f"--config.{next(iter(texts))} changes a config; name one with --config."
        )
    with config.unlocked(), config.ignore_type():
        for name in (name for name in _FIRST if name in texts):
            _set(config, name, texts[name])
        known = keys.of(config)
        for name, text in texts.items():
            if name not in known:
                if name.startswith(keys.OPTIONS) and text == "None":
                    left_out = name.removeprefix(keys.OPTIONS)
                    options = config.data.get("options", {}).items()
                    config.data.options = {k: x for k, x in options if k != left_out}
                    continue
                raise SettingsError(keys.no_key(name, config, known))
            value = known[name].read(text)
            if not known[name].takes(value):
                raise SettingsError(
                    f"--config.{name} is {value!r}; expected {known[name].expected}."
                )
            _set(config, name, value)


def _set(config: Any, name: str, value: Any) -> None:
    *parents, last = name.split(".")
    for parent in parents:
        if parent not in config:
            config[parent] = ConfigDict()
        config = config[parent]
    config[last] = value


def _is_unicode(value: Any) -> bool:
    """Whether a text has no lone surrogate, which UTF-8 cannot encode."""
    return not isinstance(value, str) or not any("\ud800" <= x <= "\udfff" for x in value)


def _clipped(value: Any) -> str:
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_init(init: Mapping[str, Any], pretrained: bool) -> None:
    """Checks that a run begins with something where its config says that it does.

    The task of a ``pretrained`` model says itself what it lacks.
    """
    rules = [name for name in ("take", "rename", "new", "step") if init.get(name)]
    if rules and not init.get("from"):
        raise SettingsError(
            f"config.init.{rules[0]} is {init[rules[0]]!r}, but init.from is none; name the run or the"
            " weights to begin with."
        )
    if "from" in init and not init["from"] and not pretrained:
        raise SettingsError("config.init.from is none; name the run or the weights to begin with.")


def _check_tokenizers(tokenizer: Mapping[str, Any], init: Mapping[str, Any]) -> None:
    """Checks that a run which makes one of two tokenizers gets the other from somewhere."""
    if (new := tokenizer.get("new")) is None:
        return
    if tokenizer.get("joint"):
        raise SettingsError(
            f"config.tokenizer.new is {new!r}, one side's, and joint is True, one tokenizer for both; take"
            " joint=False."
        )
    if not init.get("from"):
        raise SettingsError(
            f"config.tokenizer.new is {new!r}, but init.from is none; name the run that has the other side's"
            " tokenizer."
        )


def _shapes(model: Any, name: str = "model") -> Iterator[tuple[Any, str]]:
    """Yields the section of a model and those of its parts, each with its name."""
    yield model, name
    for key, value in model.items():
        if isinstance(value, ConfigDict):
            yield from _shapes(value, f"{name}.{key}")


def _check_model(model: Any, name: str) -> None:
    """Checks values that the model's config accepts and its first step fails on."""
    positions = model.get("positions")
    if "dim" not in model or "num_heads" not in model:  # a model of one's own
        return
    if positions == "rope" or model.get("rope_base") is not None:
        head = model.get("head_dim") or model.dim // model.num_heads
        if head % 2:
            raise SettingsError(
                f"config.{name} has heads of size {head}; rotary positions expect an even number."
            )
    if positions == "sinusoidal" and model.dim % 2:
        raise SettingsError(
            f"config.{name}.dim is {model.dim}; sinusoidal positions expect an even number."
        )
    buckets, distance = model.get("relative_buckets", 32), model.get("relative_distance", 128)
    if positions == "relative" and distance <= buckets // 2:
        raise SettingsError(
            f"config.{name}.relative_distance is {distance}; expected more than half of"
            f" relative_buckets, {buckets}."
        )


def model_config(model: ConfigDict, **sizes: Any) -> Any:
    """Returns the config of the architecture that ``model.name`` names.

    Args:
      model: the section; keys of blocks are fields of ``block``, and parts have sections of their own.
      sizes: fields that the data determine, for every part that has such a field; no part needs to have
        those that are None or False.

    Raises:
      SettingsError: a value or a size does not fit.
    """
    values = model.to_dict()
    kind = models.find(values.pop("name")).config
    known = _field_names(kind)
    sizes = {name: x for name, x in sizes.items() if name in known or x not in (None, False)}
    if unknown := [name for name in sizes if name not in known]:
        raise SettingsError(
            f"config.model.name is {model.name!r}, whose {kind.__name__} has no {', '.join(unknown)},"
            " which the task gives it."
        )
    return _shape(kind, "model", values, sizes)


def _field_names(kind: Any) -> set[str]:
    """Returns the fields of a model's config and of its parts."""
    parts = keys.parts_of(kind)
    own = {field.name for field in dataclasses.fields(kind)} - parts.keys()
    return own.union(*(_field_names(part) for part in parts.values()))


def _shape(kind: Any, name: str, values: dict[str, Any], sizes: Mapping[str, Any]) -> Any:
    hints, parts = get_type_hints(kind), keys.parts_of(kind)
    sections = {part: values.pop(part, {}) for part in parts}
    if "dtype" in values:
        values["dtype"] = jnp.dtype(values["dtype"])
    if hints.get("block") is BlockConfig:
        flat = {key: values.pop(key) for key in list(values) if key in BLOCK_KEYS}
        values["block"] = build(BlockConfig.of, name, flat)
    own = {key: x for key, x in sizes.items() if key in hints and key not in parts}
    built = {
        part: _shape(parts[part], f"{name}.{part}", section, sizes)
        for part, section in sections.items()
    }
    return build(kind, name, values, **own, **built)


def saved_config(workdir: Folder) -> ConfigDict:
    """Returns the config of a run.

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
    if clash := [x for x in flat if any(other.startswith(f"{x}.") for other in flat)]:
        raise SettingsError(f"{path} is damaged (at {clash[0]!r}); restore it or train anew.")
    try:
        config = ConfigDict(nest(flat))
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{path} is damaged ({error}); restore it or train anew.") from None
    try:
        check(config)
    except SettingsError as error:
        raise SettingsError(f"{path} does not fit: {error}") from None
    return config
