"""Flags of XLA as a setting of a run, so that what a step was compiled with is kept with it.

They are the compiler's options of the step alone. XLA_FLAGS in the environment are
those of the whole process.
"""

import re

import jax

# What XLA says of a name that it has not, and of a value that is none.
_UNKNOWN = re.compile(
    r"No such compile option: .*|While setting option .*|Failed to parse '.*' into flag \w+"
)


def flags(text: str | None) -> dict[str, bool | str] | None:
    """Compiler options from "NAME=VALUE,..."; a name alone is on, and none are None.

    Raises:
        ValueError: a name stands there without a value after its =, or a value without a name.
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
    """Holds flags to what the compiler of the devices here knows.

    Raises:
        ValueError: it has no such flag, or the flag no such value.
    """
    if options := flags(text):
        try:
            jax.jit(lambda: 0, compiler_options=options).lower().compile()
        except jax.errors.JaxRuntimeError as error:
            if said := refusal(error):
                raise ValueError(said) from None
            raise


def refusal(error: Exception) -> str | None:
    """One sentence of what the compiler said of a flag; None where it said something else."""
    found = _UNKNOWN.search(str(error))
    return f"xla_flags: {found.group(0).rstrip('. :')}" if found else None
