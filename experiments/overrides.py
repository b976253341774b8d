"""``--config.KEY=VALUE`` on the command line: any key that a config may have, in its file or not."""

from collections.abc import Sequence
from typing import Any

from experiments import keys
from experiments.errors import SettingsError

_FIRST = ("task", "model.name", "data.name")  # by which it is known which others there are


def taken_out(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """(the command line without overrides, keys and their texts).

    ``--config.KEY`` alone takes the word after it, or is true where that is another flag.
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


def put(config: Any, texts: dict[str, str]) -> None:
    """Set keys of a config.

    Raises:
      SettingsError: there is no config, no such key, or a value is none that the key takes.
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
            config[parent] = type(config)()
        config = config[parent]
    config[last] = value
