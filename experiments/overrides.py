"""Keys of a config on the command line, beyond those that its file writes down.

``ml_collections`` changes what a config file has. Keys that a config may leave out, such as the columns of
``files:``, are taken from the command line here and put in afterwards; so are those whose values are of
more than one type, and ``none``, which ``ml_collections`` reads as a text or refuses.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from experiments import keys
from experiments.errors import SettingsError
from experiments.keys import Key

_BOOLS = {"true": True, "1": True, "false": False, "0": False}


def taken_out(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """(the command line without them, those keys and their texts).

    Raises:
      SettingsError: one has no value.
    """
    rest, given, words, known = [], {}, iter(argv), keys.every()
    for word in words:
        if word == "--":
            return [*rest, word, *words], given
        name, equals, value = _override(word)
        key = known.get(name)
        if key is not None and (not key.needed or key.none or _of_two_types(key)):
            if not equals:
                value = "true" if _of_two_types(key) else next(words, None)
            if value is None:
                raise SettingsError(f"--config.{name} has no value.")
            given[name] = value
        elif key is None and value is not None and _is_none(value):  # of a task or model elsewhere
            given[name] = value
        else:
            rest.append(word)
    return rest, given


def put(config: Any, texts: dict[str, str]) -> None:
    """Set keys of a config.

    Raises:
      SettingsError: there is no config, or a value is not what the key takes.
    """
    if config is None:
        raise SettingsError(
            f"--config.{next(iter(texts))} changes a config; name one with --config."
        )
    known = keys.every() | keys.of(config.get("task"), config.get("model", {}).get("name"))
    with config.unlocked(), config.ignore_type():
        for name, text in texts.items():
            if name not in known:
                raise SettingsError(_no_key(name))
            *parents, last = name.split(".")
            section = config
            for parent in parents:
                if parent not in section:
                    section[parent] = type(config)()
                section = section[parent]
            section[last] = _value(name, known[name], text)


def _is_none(text: str) -> bool:
    return text.lower() == "none"


def _of_two_types(key: Key) -> bool:
    return key.kind is bool and bool(key.choices)


def unknown_key(argv: Sequence[str], error: Exception) -> str:
    """A sentence on the first override of a key that there is not, or only in others, or nothing.

    Args:
      argv: the command line.
      error: what came of it.
    """
    for name in _overridden(argv):
        if not keys.is_key(name):
            return _no_key(name)
        owners = keys.owners(name)
        if owners and f"'{name.rpartition('.')[2]}'" in str(error):
            others = " or ".join(f"a {owner}" for owner in owners)
            return (
                f"the config has no key {name}, which only {others} has; --help=config lists all."
            )
    return ""


def _no_key(name: str) -> str:
    return f"the config has no key {name}{keys.suggestion(name)} --help=config lists all."


def _overridden(argv: Sequence[str]) -> Iterator[str]:
    for word in argv:
        if word == "--":
            return
        name, _, _ = _override(word)
        if name:
            yield name


def _override(word: str) -> tuple[str, str, str | None]:
    """(key, "=" or "", value) of ``--config.KEY=VALUE`` or ``--config.KEY``; "" for another word."""
    flag, equals, value = word.partition("=")
    name = flag.lstrip("-")
    if not flag.startswith("-") or not name.startswith("config."):
        return "", "", None
    return name.removeprefix("config."), equals, value if equals else None


def _value(name: str, key: Key, text: str) -> Any:
    """What a text says for a key."""
    value: Any = text
    try:
        if key.none and _is_none(text):
            return None
        if key.kind is bool:
            value = text if text in key.choices else _BOOLS[text.lower()]
        elif key.kind in (int, float):
            value = key.kind(text)
        elif key.kind is object:
            value = int(text) if text.isdecimal() else text
    except (KeyError, ValueError):
        value = text
    if not key.takes(value):
        raise SettingsError(f"--config.{name} is {value!r}; expected {key.expected}.")
    return value
