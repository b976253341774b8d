"""Texts of ``--help`` and ``--help=config``, and the message about an unknown flag."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from types import ModuleType
from typing import Any

from absl import flags

from crossattn.functional import flatten
from experiments import keys

ASKS = ("-h", "--help", "-help", "--h")
_VALUES = {"string": "TEXT", "int": "N", "float": "X", "comma separated list of strings": "A,B,.."}


def asked(arguments: Iterable[str]) -> str | None:
    """Returns the value of ``--help=``, "" for ``--help``, None without it."""
    for argument in arguments:
        if argument == "--":
            return None
        name, _, value = argument.partition("=")
        if name in ASKS:
            return value
    return None


def of_launcher(module: ModuleType, taken: Sequence[Any]) -> str:
    """Returns the docstring of a launcher, and a line for each flag."""
    rows = [_row(flags.FLAGS[holder.name]) for holder in taken]
    if any(holder.name == "config" for holder in taken):
        rows.insert(1, ("--config.KEY=VALUE", "Change one key of the config."))
        rows.append(("--help=config", "The config's keys, with their values and meanings."))
    rows.append(("--help, -h", "This text."))
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {text}" for name, text in rows]
    return "\n".join([(module.__doc__ or "").strip(), "", "flags:", *lines])


def of_config(values: dict[str, Any], title: str) -> str:
    """Returns a line for each key of a config: its value, meaning and values."""
    entries = flatten(values)
    rows = [
        (name, _shown(entries[name]) if name in entries else _default(key), key)
        for name, key in keys.of(values).items()
    ]
    names, shown = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    lines = [
        f"  {name:<{names}}  {value:<{shown}}  {key.meaning} ({key.expected})"
        for name, value, key in rows
    ]
    head = f"{title}; change a key by --config.KEY=VALUE; a value in brackets is a default."
    return "\n".join([head, "", *lines])


def _default(key: keys.Key) -> str:
    return "missing" if key.default is keys.NEEDED else f"({_shown(key.default)})"


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return repr(value) if isinstance(value, str) else f"{value}"


def _row(flag: Any) -> tuple[str, str]:
    if flag.boolean:
        name = f"--[no]{flag.name}"
    elif choices := getattr(flag.parser, "enum_values", None):
        name = f"--{flag.name}={'|'.join(choices)}"
    elif flag.name == "config":
        name = "--config=FILE[:ARGUMENT]"
    else:
        name = f"--{flag.name}={_VALUES[flag.flag_type()]}"
    text = re.sub(r"^<[^>]*>: ", "", " ".join(flag.help.split()))
    if flag.default is not None and not flag.boolean:
        default = flag.default
        text += f" [{','.join(default) if isinstance(default, list) else default}]"
    return name, text


def unknown(name: str, taken: Sequence[Any]) -> str:
    """Returns the message about an unknown flag."""
    head, dot, key = name.partition(".")
    near = get_close_matches(head, [holder.name for holder in taken] + ["help"], n=1)
    meant = f"; did you mean --{near[0]}{dot}{key}?" if near else ";"
    return f"there is no flag --{name}{meant} --help lists all."
