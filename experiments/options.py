"""Help and errors of flags: of launchers, whose flags are absl's, and of benchmarks.

A launcher lists its flags in ``FLAGS``.
"""

import argparse
import importlib.util
import re
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

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


def overrides(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Returns the command line without ``--config.KEY=TEXT``, and the texts of the keys.

    ``--config.KEY`` alone takes the next word, or is true before another flag.
    """
    rest, given = [], {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            return [*rest, word, *words], given
        flag, equals, value = word.partition("=")
        if not flag.startswith("-") or not flag.lstrip("-").startswith("config."):
            rest.append(word)
            continue
        if not equals:
            value = words.pop(0) if words and not words[0].startswith("--") else "true"
        given[flag.lstrip("-").removeprefix("config.")] = value
    return rest, given


def config_path(argv: Sequence[str]) -> str:
    """Returns the path of --config=PATH:ARGUMENT or --config PATH:ARGUMENT, or ""."""
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        name, equals, value = argument.partition("=")
        if name in ("--config", "-config"):
            return (value if equals else following).partition(":")[0]
    return ""


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
        name = f"--{flag.name}={_VALUES[flag.flag_type().removeprefix('multi ')]}"
    text = re.sub(r"^<[^>]*>: ", "", " ".join(flag.help.split()))
    if flag.default is not None and not flag.boolean:
        default = flag.default
        text += f" [{','.join(map(str, default)) if isinstance(default, list) else default}]"
    return name, text


def unknown(name: str, taken: Sequence[Any]) -> str:
    """Returns the message about an unknown flag."""
    head, dot, key = name.partition(".")
    near = get_close_matches(head, [holder.name for holder in taken] + ["help"], n=1)
    meant = f"; did you mean --{near[0]}{dot}{key}?" if near else ";"
    return f"there is no flag --{name}{meant} --help lists all."


class Options(argparse.ArgumentParser):
    """A parser with the help and the errors of launchers; ``doc`` is the docstring of the script."""

    def __init__(self, doc: str | None):
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(_command(), description=doc, formatter_class=raw, allow_abbrev=False)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses flags; the error about an unknown one names the most similar."""
        parsed, extra = self.parse_known_args(args, namespace)
        if extra:
            known = [option for action in self._actions for option in action.option_strings]
            near = get_close_matches(extra[0].partition("=")[0], known, n=1)
            meant = f"; did you mean {near[0]}?" if near else ";"
            self.error(f"got {extra[0]}, which it does not take{meant} --help lists what it does.")
        return parsed

    def needs(self, *modules: str, install: str) -> None:
        """Ends the script with a line where modules are missing."""
        if lack := lacking(*modules, install=install):
            self.error(lack)

    def error(self, message: str) -> NoReturn:
        """Prints one line, and ends with exit code 2."""
        print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
        sys.exit(2)


def lacking(*modules: str, install: str) -> str:
    """Returns a line on modules that are missing, which ``pip install`` of ``install`` brings, or ""."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    verb = "is" if len(missing) == 1 else "are"
    quoted = f"'{install}'" if "[" in install else install
    return f"{' and '.join(missing)} {verb} not installed: pip install {quoted}" if missing else ""


def _command() -> str:
    parts = Path(sys.argv[0]).with_suffix("").parts
    if "experiments" not in parts:
        return Path(sys.argv[0]).name
    start = len(parts) - 1 - parts[::-1].index("experiments")
    return f"python -m {'.'.join(part for part in parts[start:] if part != '__main__')}"
