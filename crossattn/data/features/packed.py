"""Several predicted texts of one example, such as a picture's captions, packed in one row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from crossattn.data.errors import DataError
from crossattn.data.features.base import Feature
from crossattn.data.features.text import Text
from crossattn.data.packing import Batch, Layout, lay


@dataclass(frozen=True)
class PackedTexts(Feature):
    """Texts that a decoder predicts, each from its own beginning, in the row of their example.

    A value is a sequence of values of `text`, one or more. Batches hold NAME_in, NAME_out, NAME_segment_ids
    and NAME_positions, int32 [rows, length], as of a `Text`; but every text is a segment, so that none reads
    another, and has positions from its beginning.

    Attributes:
        text: feature of each, a predicted `Text` or `TaggedText`; texts longer than its `max_length` are cut.
        max_length: tokens; the longest that all texts of an example may be together.
    """

    text: Text
    max_length: int = 128

    def __post_init__(self):
        if not self.text.predicted:
            raise DataError("the texts are not predicted; expected a Text with predicted=True")

    def lengths(self, values: Sequence[Any]) -> Int[np.ndarray, " values"]:
        """Returns the tokens of all texts of each example; DataError for one that is no sequence."""
        counts = [len(_checked(value)) for value in values]
        sizes = self.text.lengths([each for value in values for each in value])
        starts = np.cumsum([0, *counts[:-1]])
        return np.add.reduceat(np.minimum(sizes, self.text.max_length), starts)

    def prepare(self, value: Any) -> Int[np.ndarray, "tokens 4"]:
        """Returns for each token that is read its id, the next id, the number of its text, its place there.

        Raises:
            DataError: the value is no sequence of texts.
        """
        rows = []
        for number, each in enumerate(_checked(value)):
            ids = self.text.prepare(each)
            count = len(ids) - 1
            rows.append(np.stack([ids[:-1], ids[1:], np.full(count, number), np.arange(count)], 1))
        return np.concatenate(rows)[: self.max_length].astype(np.int32)

    def collate(self, name: str, layout: Layout, values: Sequence[np.ndarray]) -> Batch:
        arrays = ("in", "out", "number", "place")
        columns = {f"{name}_{x}": [rows[:, i] for rows in values] for i, x in enumerate(arrays)}
        batch = lay(layout, name, columns)
        number, place = batch.pop(f"{name}_number"), batch.pop(f"{name}_place")
        example, most = batch[f"{name}_segment_ids"], 1 + number.max()
        segment = np.where(example > 0, (example - 1) * most + number + 1, 0).astype(np.int32)
        return batch | {f"{name}_segment_ids": segment, f"{name}_positions": place}


def _checked(value: Any) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise DataError(f"{type(value).__name__} came; expected a sequence of texts, one or more")
    return value
