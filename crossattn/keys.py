"""What a key of a config may hold: its type, its range, and what it means in one line.

Models say so in their files, under ``KEYS``; launchers hold configs to it, and print it. Ranges are intervals
as mathematics writes them, "[0, 1)".
"""

from dataclasses import dataclass
from typing import Any

_TEXTS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    object: "a name, or a number from 0",
}


@dataclass(frozen=True)
class ConfigKey:
    """What one key of a config holds.

    Attributes:
      kind: bool, int, float or str; a whole number will do for a float; object is the name or the number
        of a column.
      meaning: one line.
      within: the range of a number.
      choices: the texts that there are; () is any. A bool with choices is true, false or one of them.
      none: None is a value too.
      needed: a config has it; otherwise it may be left out.
    """

    kind: type
    meaning: str
    within: str = "(-inf, inf)"
    choices: tuple[str, ...] = ()
    none: bool = False
    needed: bool = True

    def takes(self, value: Any) -> bool:
        """Whether a value is one of those."""
        if value is None:
            return self.none
        if self.kind is object:
            return isinstance(value, str) or (type(value) is int and value >= 0)
        if self.kind is str:
            return isinstance(value, str) and (value in self.choices or not self.choices)
        if self.kind is bool or isinstance(value, bool):
            return self.kind is bool and (isinstance(value, bool) or value in self.choices)
        if not isinstance(value, int if self.kind is int else (int, float)):
            return False
        low, high = _ends(self.within)
        above = low < value if self.within[0] == "(" else low <= value
        below = value < high if self.within[-1] == ")" else value <= high
        return above and below

    @property
    def expected(self) -> str:
        """Those values in words."""
        if self.choices:
            listed = f"one of {', '.join(self.choices)}"
            text = f"{_TEXTS[bool]}, or {listed}" if self.kind is bool else listed
        elif self.kind in (int, float):
            text = _TEXTS[self.kind] + _range(self.within)
        else:
            text = _TEXTS[self.kind]
        return f"{text}, or none" if self.none else text


def _ends(within: str) -> tuple[float, float]:
    low, high = map(float, within[1:-1].split(","))
    return low, high


def _range(within: str) -> str:
    low, high = _ends(within)
    parts = []
    if low > float("-inf"):
        parts.append(f"above {low:g}" if within[0] == "(" else f"{low:.15g} or more")
    if high < float("inf"):
        parts.append(f"below {high:g}" if within[-1] == ")" else f"at most {high:.15g}")
    return f", {' and '.join(parts)}" if parts else ""
