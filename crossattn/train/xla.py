"""Flags of XLA for one program: a setting of a run for its step, and those that compile in less time."""

import re

import jax

# XLA's messages about an unknown name or value.
_UNKNOWN = re.compile(
    r"No such compile option: .*|While setting option .*|Failed to parse '.*' into flag \w+"
)


def quickly() -> str | None:
    """Returns flags that compile small programs in less time, to code that is hardly slower; None off CPU."""
    return "xla_backend_optimization_level=1" if jax.default_backend() == "cpu" else None


def flags(text: str | None) -> dict[str, bool | str] | None:
    """Parses "NAME=VALUE,..." into compiler options; a name alone is on.

    Raises:
        ValueError: a name has no value after its =, or a value has no name.
    """
    if not text:
        return None
    options: dict[str, bool | str] = {}
    for word in text.split(","):
        name, equals, value = (
            part.strip() for part in word.strip().removeprefix("--").partition("=")
        )
        if not name or (equals and not value):
            raise ValueError(f"xla_flags has {word!r}; expected NAME=VALUE,...")
        switch = {"": True, "true": True, "false": False}
        options[name] = switch.get(value.lower(), value)
    return options


def refuse_unknown(text: str | None) -> None:
    """Checks flags by the compiler of the devices here.

    Raises:
        ValueError: there is no such flag, or the flag has no such value.
    """
    if options := flags(text):
        try:
            jax.jit(lambda: 0, compiler_options=options).lower().compile()
        except jax.errors.JaxRuntimeError as error:
            if said := refusal(error):
                raise ValueError(said) from None
            raise


def refusal(error: Exception) -> str | None:
    """Returns the compiler's complaint about a flag; None for another error."""
    found = _UNKNOWN.search(str(error))
    return f"xla_flags: {found.group(0).rstrip('. :')}" if found else None
