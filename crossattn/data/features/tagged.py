"""Text behind a tag, such as the token of its language."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int

from crossattn.data.errors import DataError
from crossattn.data.features.text import Text
from crossattn.data.tokenizers import Frame


@dataclass(frozen=True)
class TaggedText(Text):
    """Token ids of a text, see `Text`, behind the token of its tag.

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
        """Returns the frame of a text of that tag; DataError where there is no such tag."""
        if tag not in self.tags:
            raise DataError(f"the tag is {tag!r}; expected one of {', '.join(self.tags)}")
        own, id = self.tokenizer.frame, self.tokenizer.vocab_size + self.tags.index(tag)
        return replace(own, before=(id, *own.before))

    def lengths(self, values: Sequence[Any]) -> Int[np.ndarray, " values"]:
        return super().lengths([_parts(value)[1] for value in values]) + 1

    def prepare(self, value: Any) -> Int[np.ndarray, " tokens"]:
        """Returns the tokens of the tag and of the text, cut to the longest.

        Raises:
            DataError: it is no pair of texts, or there is no such tag.
        """
        tag, text = _parts(value)
        frame, ids = self.frame(tag), self.tokenizer.encode(text)
        framed = frame.predicted if self.predicted else frame.read
        return np.array(framed(ids, self.max_length), np.int32)


def _parts(value: Any) -> tuple[str, str]:
    if not isinstance(value, tuple | list) or [type(each) for each in value] != [str, str]:
        raise DataError(f"{type(value).__name__} came; expected a tag and a text, (str, str)")
    return value[0], value[1]
