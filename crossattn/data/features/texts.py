"""Several texts of one example, such as those of the regions of a page."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int

from crossattn.data.errors import DataError
from crossattn.data.features.base import Feature
from crossattn.data.features.text import Text
from crossattn.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Texts(Feature):
    """Rows of token ids, one a text, each with its EOS, int32 [texts, tokens], 0 after the end.

    A value is a sequence of str. Batches hold NAME [batch_size, length, tokens], NAME_segment_ids and
    NAME_positions.

    Attributes:
        tokenizer: of the texts.
        tokens: of each text, its EOS included; longer texts are cut.
        max_length: the most texts of an example.
    """

    tokenizer: Tokenizer = field(repr=False)
    tokens: int = 32
    max_length: int = 512

    dtype = np.int32

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.tokens,)

    def length(self, value: Any) -> int:
        return len(_checked(value))

    def prepare(self, value: Any) -> Int[np.ndarray, "texts tokens"]:
        """Returns the tokens of the texts, cut to the most texts and tokens.

        Raises:
            DataError: it is no sequence of texts.
        """
        ids, _ = Text(self.tokenizer, self.tokens).prepare_many(_checked(value)[: self.max_length])
        rows = np.zeros((len(ids), self.tokens), np.int32)
        for row, framed in zip(rows, ids, strict=True):
            row[: len(framed)] = framed
        return rows


def _checked(value: Any) -> Sequence[str]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise DataError(f"{type(value).__name__} came; expected a sequence of texts")
    for each in value:
        if not isinstance(each, str):
            raise DataError(f"{type(each).__name__} is among the texts; expected str")
    return value
