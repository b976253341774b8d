"""Text that is tokens already, and the tokens of the passages that were retrieved for its chunks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from crossattn.data.errors import DataError
from crossattn.data.features.base import Feature
from crossattn.data.features.text import lay_text
from crossattn.data.packing import Batch, Layout


@dataclass(frozen=True)
class Window(Feature):
    """Ids of a text that a decoder predicts, each from those before it, with no beginning or end added.

    A value is ids [n + 1], of which n are predicted. Batches hold NAME_in, NAME_out, NAME_segment_ids and
    NAME_positions, int32 [rows, length].

    Attributes:
        max_length: the most ids that are predicted.
    """

    max_length: int = 128

    def length(self, value: Any) -> int:
        return len(_ids(value)) - 1

    def prepare(self, value: Any) -> Int[np.ndarray, " tokens"]:
        """Returns the ids, cut to the most; DataError where they are none, or fewer than two."""
        return _ids(value)[: self.max_length + 1]

    def collate(self, name: str, layout: Layout, values: Sequence[np.ndarray]) -> Batch:
        return lay_text(layout, name, values, predicted=True)


@dataclass(frozen=True)
class Neighbours(Feature):
    """Tokens of K passages of R for each chunk of a text: int32 [rows C K R], 0 for padding and no passage.

    A value is an array [c K R] of at most C chunks.

    Attributes:
        chunks, neighbours, tokens: C, K and R.
    """

    chunks: int
    neighbours: int
    tokens: int

    dtype = np.int32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.chunks, self.neighbours, self.tokens

    def prepare(self, value: Any) -> Int[np.ndarray, "C K R"]:
        """Returns the passages, 0 for chunks that have none; DataError where they have another shape."""
        shape = np.shape(value)
        if len(shape) != 3 or shape[1:] != self.shape[1:] or shape[0] > self.chunks:
            raise DataError(
                f"neighbours have shape {shape}; expected {self.shape}, or fewer chunks"
            )
        return np.pad(value, [(0, self.chunks - shape[0]), (0, 0), (0, 0)]).astype(np.int32)


def _ids(value: Any) -> Int[np.ndarray, " tokens"]:
    ids = np.asarray(value)
    if ids.ndim != 1 or len(ids) < 2 or not np.issubdtype(ids.dtype, np.integer):
        raise DataError(
            f"{type(value).__name__} of shape {ids.shape} came; expected two ids or more"
        )
    return ids.astype(np.int32)
