"""Several texts of one example, such as those of the regions of a page."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int

from crossattn.data.errors import DataError
from crossattn.data.features.text import Text
from crossattn.data.packing import Batch, Layout, lay
from crossattn.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Texts:
    """Texts, which become rows of token ids, each with its EOS, int32 [texts, tokens], 0 where it has ended.

    A value is a sequence of str. Batches hold NAME [batch_size, length, tokens], NAME_segment_ids and
    NAME_positions.

    Attributes:
        tokenizer: of the texts.
        tokens: of each text, its EOS included; what is longer is cut.
        max_length: the most texts of an example.
    """

    tokenizer: Tokenizer = field(repr=False)
    tokens: int = 32
    max_length: int = 512

    def lengths(self, values: Sequence[Any]) -> Int[np.ndarray, " values"]:
        """Texts of each value.

        Raises:
            DataError: one is no sequence of texts.
        """
        return np.array([len(_checked(value)) for value in values], np.int64)

    def prepare(self, value: Any) -> Int[np.ndarray, "texts tokens"]:
        """The tokens of the texts, cut to the most texts and tokens.

        Raises:
            DataError: it is no sequence of texts.
        """
        text, chosen = Text(self.tokenizer, self.tokens), _checked(value)[: self.max_length]
        rows = np.zeros((len(chosen), self.tokens), np.int32)
        for row, ids in zip(rows, self.tokenizer.encode_batch(chosen), strict=True):
            framed = text.framed(ids)
            row[: len(framed)] = framed
        return rows

    def collate(self, name: str, layout: Layout, values: Sequence[np.ndarray]) -> Batch:
        """The arrays of the texts of a layout."""
        return lay(layout, name, {name: values}, np.int32, (self.tokens,))


def _checked(value: Any) -> Sequence[str]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise DataError(f"{type(value).__name__} came; expected a sequence of texts")
    for each in value:
        if not isinstance(each, str):
            raise DataError(f"{type(each).__name__} is among the texts; expected str")
    return value
