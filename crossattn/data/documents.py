"""Documents as tokens, in windows to learn from and in chunks with passages to retrieve.

    tokens    <s> p p p </s> q q q q q </s> ..      paragraphs p, q, each with its end
    chunks    0 0 0 0 1 1 1 1 2 2 2 2 ..            of m tokens; a passage, R tokens, begins with one
    windows   T + 1 tokens, which T predicts        the next one begins at its last; T is a multiple of m

So the chunks of a window, counted from its first token, are chunks of its document.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int, UInt64

from crossattn.data.errors import DataError
from crossattn.data.tokenizers import BOS, EOS, Tokenizer


@dataclass(frozen=True)
class Document:
    """A document.

    Attributes:
        name: of its file.
        tokens: all of it.
        paragraphs: of each token, a hash of its paragraph; 0 for the beginning.
        bytes: of its text in UTF-8, a line end after each paragraph.
    """

    name: str
    tokens: Int[np.ndarray, " n"]
    paragraphs: UInt64[np.ndarray, " n"]
    bytes: int


@dataclass(frozen=True)
class Chunks:
    """Chunks of documents, one after the other.

    Attributes:
        passages: tokens of each chunk and of what follows it, 0 after the document's end.
        size: tokens of a chunk; the last one of a document may have fewer.
        document: a hash of the name of each chunk's file.
        paragraphs: hashes of the paragraphs that a passage is of, 0 for none.
    """

    passages: Int[np.ndarray, "n R"]
    size: int
    document: UInt64[np.ndarray, " n"]
    paragraphs: UInt64[np.ndarray, "n P"]

    def __len__(self) -> int:
        return len(self.passages)

    def texts(self, tokenizer: Tokenizer) -> list[str]:
        """Returns the text of each chunk, without what follows it."""
        return tokenizer.decode_batch(self.passages[:, : self.size].tolist())


def read_documents(examples: Sequence[Any], tokenizer: Tokenizer) -> list[Document]:
    """Returns the documents of examples, dicts of "id" and "paragraphs", texts.

    Raises:
        DataError: an example has no paragraphs.
    """
    found = []
    for example in examples:
        texts = example.get("paragraphs")
        if not texts or isinstance(texts, str):
            raise DataError(f"{example.get('id')} has no paragraphs; expected a list of texts")
        ids = [[*each, EOS] for each in tokenizer.encode_batch(texts)]
        marks = [digest(text) for text in texts]
        counts = [len(each) for each in ids]
        found.append(
            Document(
                example["id"],
                np.array([BOS, *(i for each in ids for i in each)], np.int32),
                np.concatenate([[0], np.repeat(np.array(marks, np.uint64), counts)]).astype(
                    np.uint64
                ),
                sum(len(text.encode()) + 1 for text in texts),
            )
        )
    return found


def cut(documents: Sequence[Document], size: int, length: int) -> Chunks:
    """Returns all chunks of documents, of ``size`` tokens with passages of ``length``.

    Raises:
        DataError: a passage is shorter than its chunk.
    """
    if length < size:
        raise DataError(
            f"passages have {length} tokens; expected at least those of a chunk, {size}"
        )
    passages, names, marks = [], [], []
    for document in documents:
        name = digest(document.name)
        for start in range(0, len(document.tokens), size):
            part = document.tokens[start : start + length]
            passages.append(np.pad(part, (0, length - len(part))))
            own = np.unique(document.paragraphs[start : start + length])
            marks.append(own[own > 0])
            names.append(name)
    widest = max(map(len, marks), default=1)
    paragraphs = np.zeros((len(marks), widest), np.uint64)
    for row, own in zip(paragraphs, marks, strict=True):
        row[: len(own)] = own
    tokens = np.array(passages, np.int32).reshape(-1, length)
    return Chunks(tokens, size, np.array(names, np.uint64), paragraphs)


def windows(document: Document, length: int) -> list[tuple[int, Int[np.ndarray, " n"]]]:
    """Returns the start and the tokens of each window that predicts at most ``length`` tokens."""
    last = len(document.tokens) - 1
    return [(at, document.tokens[at : at + length + 1]) for at in range(0, last, length)]


def digest(text: str) -> int:
    """Returns a hash of 64 bits, not 0; white space at the ends and the case of letters change nothing."""
    raw = hashlib.blake2b(" ".join(text.casefold().split()).encode(), digest_size=8).digest()
    return int.from_bytes(raw, "little") or 1
