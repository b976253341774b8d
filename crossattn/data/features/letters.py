"""Text as letters, one id each, and the id of its end."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Int

from crossattn.data.errors import DataError
from crossattn.data.features.base import Feature

FIRST = 2
"""The id of the first letter; 0 is padding, 1 the end."""


@dataclass(frozen=True)
class Letters(Feature):
    """Ids of a text's letters, and its end, int32 [letters + 1]; capitals are written small.

    Batches hold NAME, NAME_segment_ids and NAME_positions, int32 [rows, length].

    Attributes:
        letters: those that a text may have.
        max_length: the longest text, its end included.
    """

    letters: str
    max_length: int = 128

    dtype = np.int32

    def __post_init__(self):
        if len(set(self.letters)) != len(self.letters) or not self.letters:
            raise DataError(f"the letters are {self.letters!r}; expected some, each once")

    @property
    def vocab_size(self) -> int:
        """The number of ids."""
        return FIRST + len(self.letters)

    def length(self, value: Any) -> int:
        return len(self.text(value)) + 1

    def text(self, value: Any) -> str:
        """Returns a text as it is read, in small letters and with single blanks.

        Raises:
            DataError: it is empty or no text.
        """
        if not isinstance(value, str):
            raise DataError(f"{type(value).__name__} came; expected a text, str")
        text = " ".join(value.lower().split())
        if not text:
            raise DataError("the text is empty; expected a sentence")
        return text

    def prepare(self, value: Any) -> Int[np.ndarray, " letters"]:
        """Returns the ids of a text, cut to the longest before its end.

        Raises:
            DataError: it is empty or no text, or has a letter that is none of these.
        """
        text = self.text(value)
        if unknown := sorted(set(text) - self._ids.keys()):
            raise DataError(
                f"the text has {', '.join(map(repr, unknown[:5]))}; expected letters of {self.letters!r}"
            )
        ids = [self._ids[letter] for letter in text][: self.max_length - 1]
        return np.array([*ids, 1], np.int32)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {letter: FIRST + number for number, letter in enumerate(self.letters)}

    def shown(self, value: Any) -> Sequence[str]:
        """Returns what stands at each place: the letters, and "∎" for the end."""
        return [*self.text(value)[: self.max_length - 1], "∎"]
