"""Keys of a config: the fields of frozen dataclasses.

A field's annotation has its values (``Annotated[int, "[1, inf)"]`` a range, ``Literal`` texts, ``| None``
none), the docstring of its class the meaning. A key without a default must be given.
"""

import inspect
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from crossattn import models
from crossattn.data import sources
from crossattn.data.errors import DataError
from crossattn.nn import BLOCK_KEYS, BlockConfig
from crossattn.train.config import CheckpointConfig, TrainConfig
from crossattn.train.optim import OptimConfig
from crossattn.train.sharding import MeshConfig
from experiments import tasks
from experiments.errors import SettingsError
from experiments.tasks import sections

NAME_OF_PRETRAINED = "pretrained"
"""``config.model.name`` of the model and tokenizer of the checkpoint ``config.init.from``."""

NEEDED: Any = object()
"""The default of a key that must be given."""

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_BOOLS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class Key:
    """A key and its values.

    Attributes:
      kinds: types, each with its interval, "[0, 1)"; "" is any.
      choices: further texts.
      none: whether None is a value.
      meaning: one line.
      default: value of a missing key; NEEDED if it must be given.
    """

    kinds: Mapping[type, str]
    choices: tuple[str, ...] = ()
    none: bool = False
    meaning: str = ""
    default: Any = NEEDED

    def takes(self, value: Any) -> bool:
        """Whether the key takes a value."""
        if value is None:
            return self.none
        if isinstance(value, str) and value in self.choices:
            return True
        kinds = (int, float) if type(value) is int else (type(value),)
        return any(kind in self.kinds and _within(value, self.kinds[kind]) for kind in kinds)

    def read(self, text: str) -> Any:
        """Returns the value of a text of the command line, or the text itself if it is none."""
        if self.none and text.lower() == "none":
            return None
        if text in self.choices:
            return text
        for kind in self.kinds:
            try:
                return _BOOLS[text.lower()] if kind is bool else kind(text)
            except (KeyError, ValueError):
                continue
        return text

    @property
    def expected(self) -> str:
        """The values in words."""
        parts = [_KINDS[kind] + _range(within) for kind, within in self.kinds.items()]
        parts += [f"one of {', '.join(self.choices)}"] if self.choices else []
        return ", or ".join(parts + ["none"] * self.none)


def read_type(hint: Any) -> Key | None:
    """Returns the key of an annotation; None for types without a key."""
    if hint is type(None):
        return Key({}, none=True)
    if hint in _KINDS:
        return Key({hint: ""})
    if get_origin(hint) is Annotated:
        kind, within = get_args(hint)
        return Key({kind: within})
    if get_origin(hint) is Literal:
        return Key({}, choices=get_args(hint))
    if get_origin(hint) not in (typing.Union, types.UnionType):
        return None
    found = [key for key in map(read_type, get_args(hint)) if key is not None]
    kinds = {kind: key.kinds[kind] for kind in _KINDS for key in found if kind in key.kinds}
    choices = tuple(text for key in found for text in key.choices)
    none = any(key.none for key in found)
    return Key(kinds, choices, none) if kinds or choices else None


def of_class(kind: type, without: Iterable[str] = ()) -> dict[str, Key]:
    """Returns the keys of a dataclass; those of its parts are sections."""
    keys: dict[str, Key] = {}
    hints, meanings = get_type_hints(kind, include_extras=True), _meanings(kind)
    parts = parts_of(kind)
    for each in fields(kind):
        hint = hints[each.name]
        if each.name in without:
            continue
        if hint is BlockConfig and each.name == "block":
            keys |= _of_block(without)
        elif each.name in parts:
            keys |= under(each.name, of_class(parts[each.name], without))
        elif key := read_type(sections.Dtype if each.name == "dtype" else hint):
            name = each.metadata.get("name", each.name)
            keys[name] = replace(key, meaning=meanings.get(each.name, ""), default=_default(each))
    return keys


def parts_of(kind: type) -> dict[str, type]:
    """Returns the fields of a dataclass that are dataclasses without a default."""
    hints = get_type_hints(kind)
    return {
        each.name: hints[each.name]
        for each in fields(kind)
        if is_dataclass(hints[each.name])
        and hints[each.name] is not BlockConfig
        and _default(each) is NEEDED
    }


def _of_block(without: Iterable[str]) -> dict[str, Key]:
    """Returns the flat keys of ``BlockConfig.of``."""
    read = {kind: of_class(kind) for kind in {kind for kind, _ in BLOCK_KEYS.values()}}
    keys = {}
    for name, (kind, part) in BLOCK_KEYS.items():
        if name in without:
            continue
        keys[name] = read[kind][part]
        if name.startswith("cross_"):
            of = f"of cross-attention where it differs: {keys[name].meaning}"
            keys[name] = replace(keys[name], meaning=of, default=None)
    return keys


def under(section: str, keys: Mapping[str, Key]) -> dict[str, Key]:
    """Returns keys with the name of their section."""
    return {f"{section}.{name}": key for name, key in keys.items()}


def of(config: Any) -> dict[str, Key]:
    """Returns the keys that a config with its names of a task, a model and data may have, by sections.

    Raises:
      SettingsError: there is no such task or model.
    """
    task, name = tasks.find(config.get("task")), (config.get("model") or {}).get("name")
    own = {section: of_class(kind) for section, kind in task.sections.items()}
    data = (config.get("data") or {}).get("name")
    if "name" in own.get("data", {}) and isinstance(data, str):
        own["data"] |= under("options", _of_source(data))
    if name == NAME_OF_PRETRAINED:
        own["tokenizer"], shape = (
            of_class(sections.PretrainedTokenizer),
            of_class(sections.PretrainedModel),
        )
    else:
        shape = of_class(_architecture(name).config, task.gives)
    run = of_class(TrainConfig)
    checkpoint = of_class(CheckpointConfig, ["resume"])
    best = checkpoint["best_metric"]
    checkpoint["best_metric"] = replace(best, kinds={}, choices=tuple(task.metrics))
    about = "name of a file of {}, or a module of your own, a.b"
    names = {
        "task": Key({str: ""}, meaning=about.format("experiments/tasks")),
        "seed": replace(run.pop("seed"), default=NEEDED),
    }
    ordered = {
        "data": own.pop("data", {}),
        "tokenizer": own.pop("tokenizer", {}),
        "model": {"name": Key({str: ""}, meaning=about.format("crossattn/models"))} | shape,
        "init": of_class(sections.Init),
        "loss": own.pop("loss", {}),
        "optim": of_class(OptimConfig),
        "mesh": of_class(MeshConfig),
        "train": run,
        "checkpoint": checkpoint,
        **own,
    }
    return names | {k: x for name, keys in ordered.items() for k, x in under(name, keys).items()}


def _architecture(name: Any) -> models.Architecture:
    if not isinstance(name, str):
        given = "missing" if name is None else repr(name)[:80]
        raise SettingsError(
            f"config.model.name is {given}; expected one of {', '.join(models.known())}."
        )
    try:
        return models.find(name)
    except ValueError as error:
        raise SettingsError(f"config.model.name: {error}") from None


def _of_source(name: str) -> dict[str, Key]:
    """Returns the options of a data source; opening an unknown source refuses it later."""
    try:
        options = sources.options_of(name)
    except (DataError, ImportError):
        return {}
    keys = {}
    for option, said in options.items():
        within = said.within if said.kind in (int, float) else ""
        kinds = {said.kind: within} if said.kind in _KINDS else {int: "[0, inf)", str: ""}
        kinds = {} if said.choices else kinds
        keys[option] = Key(kinds, said.choices, meaning=said.meaning, default=None)
    return keys


OPTIONS = "data.options."
"""Of these a config file may set some that another data source does not have."""


def no_key(name: str, config: Any, known: Iterable[str]) -> str:
    """Returns the message about an unknown key."""
    near = suggestion(name, known)
    if name.startswith(OPTIONS) and near == ";":
        taken = [key.removeprefix(OPTIONS) for key in known if key.startswith(OPTIONS)]
        return (
            f"the config has no key {name}: the data source {config.data.get('name')} takes "
            f"{', '.join(taken) or 'no options'}. Leave it out; what the config file sets for other data, by "
            f"--config.{name}=None."
        )
    what = f"a {config.get('task')} by a {config.get('model', {}).get('name')}"
    return f"the config has no key {name}{near} --help=config lists those of {what}."


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns ``; did you mean ...?`` with the most similar known name, or a semicolon."""
    section, _, last = name.rpartition(".")
    parts = {key: key.rpartition(".") for key in known}
    alike = get_close_matches(last, {own for _, _, own in parts.values()}, n=3, cutoff=0.75)
    # A similar name in its section, its own name in another, then a similar name anywhere.
    near = [key for own in alike for key in parts if parts[key][::2] == (section, own)]
    near += [key for key in parts if parts[key][2] == last]
    near += get_close_matches(name, parts, n=1, cutoff=0.8)
    near += [key for own in alike for key in parts if parts[key][2] == own]
    return f"; did you mean {near[0]}?" if near else ";"


def _meanings(kind: type) -> dict[str, str]:
    """Returns the first sentences of ``Attributes:`` in the docstrings of a class and its parents."""
    found: dict[str, str] = {}
    for each in kind.__mro__[::-1]:
        attributes = inspect.cleandoc(each.__doc__ or "").partition("\nAttributes:\n")[2]
        lines = re.sub(r"\n    +", " ", attributes.partition("\n\n")[0])
        for names, meaning in re.findall(r"^  ([\w, ]+): (.*)$", lines, re.MULTILINE):
            found |= dict.fromkeys(names.split(", "), re.split(r"\.(?= |$)", meaning)[0])
    return found


def _default(each: Any) -> Any:
    if each.default_factory is not MISSING:
        return each.default_factory
    return NEEDED if each.default is MISSING else each.default


def _within(value: Any, within: str) -> bool:
    if not within:
        return value == value and abs(value) != float("inf") if type(value) is float else True
    low, high = _ends(within)
    above = low < value if within[0] == "(" else low <= value
    return above and (value < high if within[-1] == ")" else value <= high)


def _ends(within: str) -> tuple[float, float]:
    low, high = map(float, within[1:-1].split(","))
    return low, high


def _range(within: str) -> str:
    if not within:
        return ""
    low, high = _ends(within)
    parts = []
    if low > float("-inf"):
        parts.append(f"above {low:g}" if within[0] == "(" else f"{low:.15g} or more")
    if high < float("inf"):
        parts.append(f"below {high:g}" if within[-1] == ")" else f"at most {high:.15g}")
    return f", {' and '.join(parts)}"
