"""Trained parameters and their learning rates, by regular expressions on their names.

A frozen parameter has no gradient and no optimiser state; a step returns it as it is. Names are paths such
as "decoder.stack.layers.0.cross.query.kernel".
"""

import re
from collections.abc import Collection
from typing import Any

from crossattn.functional import flatten, nest


def trained_names(logical_axes: Any, pattern: str | None) -> frozenset[str] | None:
    """Returns the names of the trained parameters; None for all of them.

    logical_axes: a tuple of axis names for each parameter, as nested dicts; "constant" among them excludes a
    parameter from training. pattern: a regular expression to search for in each name.

    Raises:
        ValueError: the pattern is no regular expression, or matches no parameter that can be trained.
    """
    axes = flatten(logical_axes)
    free = [name for name, own in axes.items() if "constant" not in own]
    names = _matching(pattern, free, "train") if pattern is not None else free
    return None if len(names) == len(axes) else frozenset(names)


def split(params: Any, trained: Collection[str] | None) -> tuple[Any, Any]:
    """Returns (trained parameters, frozen parameters), both nested as before."""
    if trained is None:
        return params, {}
    flat = flatten(params)
    return (
        nest({name: x for name, x in flat.items() if name in trained}),
        nest({name: x for name, x in flat.items() if name not in trained}),
    )


def join(trained: Any, frozen: Any) -> Any:
    """Inverts ``split``."""
    return nest(flatten(trained) | flatten(frozen)) if frozen else trained


def rate_factors(params: Any, rates: str) -> Any:
    """Returns the factor of each parameter's learning rate, nested as the parameters.

    rates: "PATTERN=FACTOR,PATTERN=FACTOR"; the first pattern that matches a name counts; 1 where none does.

    Raises:
        ValueError: a part is not of that form, or matches no parameter.
    """
    flat = dict.fromkeys(flatten(params), 1.0)
    for pattern, factor in reversed(_parsed(rates)):
        flat.update(dict.fromkeys(_matching(pattern, flat, "rates"), factor))
    return nest(flat)


def _parsed(rates: str) -> list[tuple[str, float]]:
    parts = []
    for part in rates.split(","):
        pattern, _, factor = part.rpartition("=")
        try:
            value = float(factor)
        except ValueError:
            value = -1.0
        if not pattern or not 0.0 <= value < float("inf"):
            raise ValueError(
                f"optim.rates has {part!r}; expected PATTERN=FACTOR with a factor of 0 or more, such as"
                " encoder=0.1"
            )
        parts.append((pattern, value))
    return parts


def _matching(pattern: str, names: Collection[str], option: str) -> list[str]:
    try:
        matching = [name for name in names if re.search(pattern, name)]
    except re.error as error:
        raise ValueError(f"optim.{option} is {pattern!r}, no regular expression: {error}") from None
    if not matching:
        some = ", ".join(list(names)[:: max(1, len(names) // 4)])
        raise ValueError(
            f"optim.{option} is {pattern!r}, which is found in the name of no parameter; names are such as"
            f" {some}"
        )
    return matching
