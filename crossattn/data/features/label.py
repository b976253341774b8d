"""Names of classes as numbers."""

from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Int

from crossattn.data.errors import DataError
from crossattn.data.features.base import Feature


@dataclass(frozen=True)
class Label(Feature):
    """The number of a class, int32, from its name or its number.

    Batches hold NAME [rows]; of several labels, such as those of the words of a page, NAME, NAME_segment_ids
    and NAME_positions [rows, length].

    Attributes:
        classes: their names, in the order of their numbers.
        max_length: the most labels of a value that is a sequence of them; None is a single label.
    """

    classes: tuple[str, ...]
    max_length: int | None = None

    dtype = np.int32

    def __post_init__(self):
        if len(set(self.classes)) != len(self.classes) or not self.classes:
            raise DataError("the names of the classes are not distinct, or there are none")

    def prepare(self, value: Any) -> Int[np.ndarray, "..."]:
        """Returns the number of a label, or those of several.

        Raises:
            DataError: there is no such class.
        """
        if self.max_length is None:
            return np.array(self._number(value), np.int32)
        if isinstance(value, str) or np.ndim(value) != 1:
            raise DataError(f"the label is {value!r}; expected a sequence of labels")
        return np.array([self._number(each) for each in value[: self.max_length]], np.int32)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.classes)}

    def _number(self, value: Any) -> int:
        if isinstance(value, str) and value in self._numbers:
            return self._numbers[value]
        if isinstance(value, int | np.integer) and not isinstance(value, bool):
            if 0 <= value < len(self.classes):
                return int(value)
            raise DataError(f"the label is {value}; expected 0 to {len(self.classes) - 1}")
        near = get_close_matches(str(value), self.classes, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        few = ", ".join(self.classes[:10]) + (", ..." if len(self.classes) > 10 else "")
        raise DataError(f"the label is {value!r}; expected one of {few}{hint}")
