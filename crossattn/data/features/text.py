"""Text as token ids."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int

from crossattn.data.errors import DataError
from crossattn.data.features.base import Feature
from crossattn.data.packing import Batch, Layout, lay
from crossattn.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Text(Feature):
    """Token ids of a text in the frame of its tokenizer; a tokenizer trained here appends EOS.

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
        return max(self.tokenizer.most_id, self.tokenizer.frame.start)

    def lengths(self, values: Sequence[Any]) -> Int[np.ndarray, " values"]:
        return self._sizes(self._encoded(values))

    def prepare_many(
        self, values: Sequence[Any]
    ) -> tuple[list[np.ndarray], Int[np.ndarray, " values"]]:
        """Returns the tokens of texts, cut to the longest, and their lengths before that."""
        ids = self._encoded(values)
        return [np.array(self.framed(each), np.int32) for each in ids], self._sizes(ids)

    def prepare(self, value: Any) -> Int[np.ndarray, " tokens"]:
        """Returns the tokens of a text, cut to the longest; DataError where it is no text."""
        return self.prepare_many([value])[0][0]

    def framed(self, ids: list[int]) -> list[int]:
        """Returns ids in their frame, cut to the longest; BOS begins those that are predicted.

        Cutting a text that is read keeps its EOS; cutting one that is predicted loses it, so that nothing
        learns to stop there.
        """
        frame = self.tokenizer.frame
        framed = frame.predicted if self.predicted else frame.read
        return framed(ids, self.max_length)

    def collate(self, name: str, layout: Layout, values: Sequence[np.ndarray]) -> Batch:
        return lay_text(layout, name, values, self.predicted)

    def _encoded(self, values: Sequence[Any]) -> list[list[int]]:
        for value in values:
            if not isinstance(value, str):
                raise DataError(f"{type(value).__name__} came; expected a text, str")
        return self.tokenizer.encode_batch(values)

    def _sizes(self, ids: Sequence[list[int]]) -> Int[np.ndarray, " values"]:
        return np.array([len(each) + len(self.tokenizer.frame) for each in ids], np.int64)


def lay_text(
    layout: Layout, name: str, values: Sequence[np.ndarray], predicted: bool = False
) -> Batch:
    """Returns the arrays of framed tokens, see `Text`."""
    if not predicted:
        return lay(layout, name, {name: values})
    read, told = [ids[:-1] for ids in values], [ids[1:] for ids in values]
    return lay(layout, name, {f"{name}_in": read, f"{name}_out": told})
