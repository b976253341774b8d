"""From a config at the edge to the frozen dataclasses that the library takes.

Configs hold values only; here they meet the table of keys and the types. An unknown key or a wrong value
becomes one sentence that names it, before anything is computed.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, get_type_hints

import jax.numpy as jnp
from ml_collections import ConfigDict

from crossattn import models
from crossattn.functional import flatten, nest
from crossattn.nn import BLOCK_KEYS, BlockConfig
from crossattn.train.config import CheckpointConfig, TrainConfig
from crossattn.train.optim import OptimConfig
from crossattn.train.sharding import MeshConfig
from crossattn.train.storage import Folder
from crossattn.train.workdir import read_settings
from experiments import keys, tasks
from experiments.errors import SettingsError

T = TypeVar("T")


def build(kind: Callable[..., T], name: str, values: Mapping[str, Any], **more: Any) -> T:
    """``kind(**values)``, with errors that name the config's section."""
    try:
        return kind(**values, **more)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"config.{name}: {error}") from None


def train_config(config: ConfigDict, resume: str = "auto") -> TrainConfig:
    """Values of the training loop, from the sections train, optim, mesh and checkpoint."""
    check(config)
    return build(
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


def section_of(config: ConfigDict, name: str) -> dict[str, Any]:
    """Values of a section; one that is left out has none."""
    return config[name].to_dict() if name in config else {}


def check(config: ConfigDict) -> None:
    """Hold a config to its keys, and values that concern each other to one another.

    Raises:
      SettingsError: names the key, its value and what was expected.
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
    _check_init(section_of(config, "init"))
    tasks.find(config.task).check(config)


def _is_unicode(value: Any) -> bool:
    """Whether a text can be written as UTF-8: bytes of another encoding, or half a character, cannot."""
    return not isinstance(value, str) or not any("\ud800" <= x <= "\udfff" for x in value)


def _clipped(value: Any) -> str:
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_init(init: Mapping[str, Any]) -> None:
    """Rules on what is taken want something to take it from."""
    rules = [name for name in ("take", "rename", "new", "step") if init.get(name)]
    if rules and not init.get("from"):
        raise SettingsError(
            f"config.init.{rules[0]} is {init[rules[0]]!r}, but init.from is none; name the run or the"
            " weights to begin with."
        )


def _shapes(model: Any, name: str = "model") -> Iterator[tuple[Any, str]]:
    """The section of a model and those of its parts, each with its name."""
    yield model, name
    for key, value in model.items():
        if isinstance(value, ConfigDict):
            yield from _shapes(value, f"{name}.{key}")


def _check_model(model: Any, name: str) -> None:
    """Values that building a model accepts and its first step would fail on."""
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
    """The config of the architecture that ``model.name`` names, from the section ``model``.

    Args:
      model: the section; fields of blocks go into the config's ``block`` where it has one, and a config that
        is made of others has a section for each.
      sizes: what the data give, each to whatever part has such a field; those that are None or False are
        left out where none has.

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
    """Fields of a model's config and of its parts."""
    parts = _parts(kind)
    own = {field.name for field in dataclasses.fields(kind)} - parts.keys()
    return own.union(*(_field_names(part) for part in parts.values()))


def _parts(kind: type) -> dict[str, type]:
    """The configs of other architectures that an architecture's config is made of, by their fields."""
    hints = get_type_hints(kind)
    return {
        each.name: hints[each.name]
        for each in dataclasses.fields(kind)
        if dataclasses.is_dataclass(hints[each.name])
        and hints[each.name] is not BlockConfig
        and each.default is dataclasses.MISSING
        and each.default_factory is dataclasses.MISSING
    }


def _shape(kind: Any, name: str, values: dict[str, Any], sizes: Mapping[str, Any]) -> Any:
    """A config of that kind from its section, and of the sizes those that are its fields."""
    hints, parts = get_type_hints(kind), _parts(kind)
    sections = {part: values.pop(part, {}) for part in parts}
    if "dtype" in values:
        values["dtype"] = jnp.dtype(values["dtype"])
    if hints.get("block") is BlockConfig:
        flat = {key: values.pop(key) for key in list(values) if key in BLOCK_KEYS}
        values["block"] = _block(name, flat)
    own = {key: x for key, x in sizes.items() if key in hints and key not in parts}
    built = {
        part: _shape(parts[part], f"{name}.{part}", section, sizes)
        for part, section in sections.items()
    }
    return build(kind, name, values, **own, **built)


def _block(name: str, values: Mapping[str, Any]) -> BlockConfig:
    """The parts of a block, from the flat keys of a section of a model."""
    try:
        return BlockConfig.of(**values)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"config.{name}: {error}") from None


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
