"""Tokenizers of published checkpoints, with the methods of those trained here.

Padding, beginning and end have ids of the publisher, so a tokenizer has a `Frame` of its own, which
`frame_of` finds by encoding a text.
"""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer as _Backend

from crossattn.data.errors import DataError
from crossattn.data.tokenizers import Frame, Tokenizer

_MASKS = ("[MASK]", "<mask>")


class PublishedTokenizer(Tokenizer):
    """A `tokenizers.Tokenizer` of any kind, and the frame of its texts."""

    def __init__(self, backend: _Backend, frame: Frame):
        self._backend = _Backend.from_str(backend.to_str())
        self._backend.no_padding()
        self._backend.no_truncation()
        self.frame = frame

    @property
    def mask_id(self) -> int:
        """The id of its mask, [MASK] or <mask>.

        Raises:
            DataError: it has none.
        """
        for token in _MASKS:
            if (id := self._backend.token_to_id(token)) is not None:
                return id
        raise DataError(
            f"this tokenizer has no {' or '.join(_MASKS)}; expected that of a model of masked tokens"
        )

    def encode_with_spans(self, text: str) -> tuple[list[int], Int[np.ndarray, "tokens 2"]]:
        """Returns ids and the span of each in characters of `text`, white space trimmed."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        spans = []
        for start, end in encoding.offsets:
            piece = text[start:end]
            start += len(piece) - len(piece.lstrip())
            spans.append((start, start + len(piece.strip())))
        return encoding.ids, np.array(spans, np.int32).reshape(-1, 2)

    def decode(self, ids: Iterable) -> str:
        """Returns the text of ids up to the end; specials are skipped."""
        known = [int(i) for i in ids]
        if self.frame.after[0] in known:
            known = known[: known.index(self.frame.after[0])]
        return self._backend.decode(known, skip_special_tokens=True).strip()

    def to_json(self) -> str:
        """Returns the whole tokenizer, frame included."""
        return json.dumps({"frame": vars(self.frame), "published": self._backend.to_str()})

    @classmethod
    def from_json(cls, text: str) -> "PublishedTokenizer":
        """Returns the tokenizer of a text of `to_json`."""
        content = json.loads(text)
        frame = content["frame"]
        frame = Frame(frame["start"], tuple(frame["before"]), tuple(frame["after"]))
        return cls(_Backend.from_str(content["published"]), frame)

    def _readable(self, id: int) -> str:
        token = self._backend.id_to_token(id)
        if token is None or "▁" in token:
            return token or f"<{id}>"
        text = self._backend.decode([id], skip_special_tokens=False)
        return token if "\ufffd" in text or not text else text.replace(" ", "▁")


def frame_of(backend: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the tokens that a tokenizer puts before and after a text, without padding."""
    encoding = backend.encode("a")
    own = [i for i, special in enumerate(encoding.special_tokens_mask) if not special]
    marked = list(zip(encoding.ids, encoding.attention_mask, strict=True))
    before, after = marked[: own[0]], marked[own[-1] + 1 :]
    return tuple(i for i, read in before if read), tuple(i for i, read in after if read)
