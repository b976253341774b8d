"""Text behind a token that says what it is, such as its language; and several in one row."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Int

from crossattn.data.errors import DataError
from crossattn.data.features.text import Text
from crossattn.data.packing import Batch, Layout, lay
from crossattn.data.tokenizers import Frame


@dataclass(frozen=True)
class TaggedText(Text):
    """A text, `Text`, which begins with the token of its tag.

    A value is (tag, text). The tokens of the tags stand behind those of the tokenizer, in their order, so a
    model has `vocab_size` tokens.

    Attributes:
        tags: their names.
        max_length: tokens; the longest that a text may be, tag and EOS included.
    """

    tags: tuple[str, ...] = ()

    def __post_init__(self):
        if not self.tags or len(set(self.tags)) < len(self.tags):
            raise DataError(
                f"the tags are {', '.join(self.tags) or 'none'}; expected distinct ones"
            )

    @property
    def vocab_size(self) -> int:
        """Tokens, those of the tags included."""
        return self.tokenizer.vocab_size + len(self.tags)

    def frame(self, tag: str) -> Frame:
        """What stands around a text of that tag.

        Raises:
            DataError: there is no such tag.
        """
        if tag not in self.tags:
            raise DataError(f"the tag is {tag!r}; expected one of {', '.join(self.tags)}")
        own, id = self.tokenizer.frame, self.tokenizer.vocab_size + self.tags.index(tag)
        return replace(own, before=(id, *own.before))

    def lengths(self, values: Sequence[Any]) -> Int[np.ndarray, " values"]:
        """Tokens of each text and its tag, before it is cut."""
        return super().lengths([_parts(value)[1] for value in values]) + 1

    def prepare(self, value: Any) -> Int[np.ndarray, " tokens"]:
        """The tokens of the tag and of the text, cut to the longest.

        Raises:
            DataError: it is no pair of texts, or there is no such tag.
        """
        tag, text = _parts(value)
        frame, ids = self.frame(tag), self.tokenizer.encode(text)
        framed = frame.predicted if self.predicted else frame.read
        return np.array(framed(ids, self.max_length), np.int32)


@dataclass(frozen=True)
class TaggedTexts(TaggedText):
    """Several texts of one example that a decoder predicts, such as captions of a picture, packed in one row.

    A value is a sequence of (tag, text). Batches hold what those of a predicted `Text` do; every text has a
    segment of its own, and positions from its beginning, so none reads another.

    Attributes:
        max_length: tokens; the longest that all texts of an example may be together.
        each: the longest that one of them may be, tag and EOS included; what is longer is cut.
    """

    predicted: bool = True
    each: int = 128

    def lengths(self, values: Sequence[Any]) -> Int[np.ndarray, " values"]:
        """Tokens of all texts and tags of each example."""
        counts = [len(_several(value)) for value in values]
        sizes = super().lengths([each for value in values for each in value])
        ends = np.cumsum(np.minimum(sizes, self.each))[np.cumsum(counts) - 1]
        return np.diff(ends, prepend=0)

    def prepare(self, value: Any) -> Int[np.ndarray, "tokens 4"]:
        """Of each token that is read: it, the one after it, the number of its text, and its place there.

        Raises:
            DataError: it is no sequence of pairs of texts, or there is no such tag.
        """
        rows = []
        for number, each in enumerate(_several(value)):
            ids = self._one.prepare(each)
            count = len(ids) - 1
            rows.append(np.stack([ids[:-1], ids[1:], np.full(count, number), np.arange(count)], 1))
        return np.concatenate(rows)[: self.max_length].astype(np.int32)

    def collate(self, name: str, layout: Layout, values: Sequence[np.ndarray]) -> Batch:
        """The arrays of the texts of a layout."""
        arrays = ("in", "out", "number", "place")
        parts = {f"{name}_{x}": [rows[:, i] for rows in values] for i, x in enumerate(arrays)}
        batch = lay(layout, name, parts)
        there, most = batch[f"{name}_segment_ids"], 1 + max(rows[:, 2].max() for rows in values)
        number, place = batch.pop(f"{name}_number"), batch.pop(f"{name}_place")
        segment = np.where(there > 0, (there - 1) * most + number + 1, 0).astype(np.int32)
        return batch | {f"{name}_segment_ids": segment, f"{name}_positions": place}

    @cached_property
    def _one(self) -> TaggedText:
        return TaggedText(self.tokenizer, self.each, self.predicted, self.tags)


def _several(value: Any) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise DataError(
            f"{type(value).__name__} came; expected texts behind their tags, one or more"
        )
    return value


def _parts(value: Any) -> tuple[str, str]:
    if not isinstance(value, tuple | list) or [type(each) for each in value] != [str, str]:
        raise DataError(f"{type(value).__name__} came; expected a tag and a text, (str, str)")
    return value[0], value[1]
