"""Text as token ids."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int

from crossattn.data.errors import DataError
from crossattn.data.packing import Batch, Layout, lay
from crossattn.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Text:
    """A text, which becomes token ids in the frame of its tokenizer: of ours, ids and EOS.

    Batches hold NAME, NAME_segment_ids and NAME_positions, int32 [rows, length]; of a text that a decoder
    predicts, NAME_in, which begins with BOS, and NAME_out, which ends with EOS, in the place of NAME.

    Attributes:
        tokenizer: of the text.
        max_length: tokens; the longest that it may be, EOS included.
        predicted: whether a decoder reads all but the last token and predicts all but the first.
    """

    tokenizer: Tokenizer = field(repr=False)
    max_length: int = 128
    predicted: bool = False

    @property
    def extra(self) -> int:
        """Tokens that a prepared text has beyond its length: a predicted one has both its ends."""
        return int(self.predicted)

    @property
    def largest(self) -> int:
        """The greatest id."""
        return self.tokenizer.vocab_size - 1

    def lengths(self, values: Sequence[Any]) -> Int[np.ndarray, " values"]:
        """Tokens of each text, before it is cut."""
        ids = self.tokenizer.encode_batch([_checked(value) for value in values])
        around = len(self.tokenizer.frame)
        return np.array([len(each) + around for each in ids], np.int64)

    def prepare_many(
        self, values: Sequence[Any]
    ) -> tuple[list[np.ndarray], Int[np.ndarray, " values"]]:
        """The tokens of texts, cut to the longest, and their lengths before that."""
        ids = self.tokenizer.encode_batch([_checked(value) for value in values])
        around = len(self.tokenizer.frame)
        arrays = [np.array(self.framed(each), np.int32) for each in ids]
        return arrays, np.array([len(each) + around for each in ids], np.int64)

    def prepare(self, value: Any) -> Int[np.ndarray, " tokens"]:
        """The tokens of a text, cut to the longest.

        Raises:
            DataError: it is no text.
        """
        return np.array(self.framed(self.tokenizer.encode(_checked(value))), np.int32)

    def framed(self, ids: list[int]) -> list[int]:
        """Ids in their frame, EOS behind and BOS before where they are predicted, cut to the longest.

        Cutting a text that is read keeps its EOS; cutting one that is predicted loses it, so that nothing
        learns to stop there.
        """
        frame = self.tokenizer.frame
        framed = frame.predicted if self.predicted else frame.read
        return framed(ids, self.max_length)

    def collate(self, name: str, layout: Layout, values: Sequence[np.ndarray]) -> Batch:
        """The arrays of the texts of a layout."""
        return lay_text(layout, name, values, self.predicted)


def lay_text(
    layout: Layout, name: str, values: Sequence[np.ndarray], predicted: bool = False
) -> Batch:
    """The arrays of tokens that are framed, see `Text`."""
    if not predicted:
        return lay(layout, name, {name: values})
    read, told = [ids[:-1] for ids in values], [ids[1:] for ids in values]
    return lay(layout, name, {f"{name}_in": read, f"{name}_out": told})


def _checked(value: Any) -> str:
    if not isinstance(value, str):
        raise DataError(f"{type(value).__name__} came; expected a text, str")
    return value
