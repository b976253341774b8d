"""A database of passages on disk, and the nearest ones to chunks of texts.

    build(folder, chunks, tokenizer, embedder)     embeds each chunk once
    database = Database.open(folder, tokenizer, embedder)
    database.nearest(vectors, chunks, count)       numbers of passages [n K], -1 for none
    database.passages(numbers)                     their tokens [n K R]

Embeddings lie in an index of faiss, which is written once and memory-mapped, and nearness is the product of
vectors of length 1, searched exactly. What a chunk must not see is left out: passages of its own document,
and passages of a paragraph that the chunk or what follows it has too.
"""

import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int

from crossattn.data.documents import Chunks
from crossattn.data.errors import DataError, needs
from crossattn.data.tokenizers import Tokenizer
from crossattn.files import put_folder

_RECORD, _INDEX = "database.json", "embeddings.faiss"
_ARRAYS = ("passages", "document", "paragraphs")
_SPARE = 16  # candidates beyond those that are wanted, some of which are left out
_ROWS = 1024  # chunks that are searched for together


@runtime_checkable
class Embedder(Protocol):
    """Makes vectors [n E] of texts, float32 of length 1 or 0, by a method that its ``name`` tells."""

    name: str

    def __call__(self, texts: Sequence[str]) -> np.ndarray: ...


def build(folder: Path, chunks: Chunks, tokenizer: Tokenizer, embed: Embedder) -> None:
    """Writes the database of these chunks, whole or not at all; one that is there stays.

    Raises:
        DataError: there is no chunk.
        ModuleNotFoundError: faiss is not installed.
    """
    faiss = _faiss()
    if not len(chunks):
        raise DataError("the database would have no passage; expected documents to retrieve from")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".partial-") as temporary:
        partial = Path(temporary) / folder.name
        partial.mkdir()
        for name in _ARRAYS:
            np.save(partial / f"{name}.npy", getattr(chunks, name))
        vectors = _checked(embed(chunks.texts(tokenizer)), len(chunks))
        index = faiss.IndexFlatIP(vectors.shape[1])
        index.add(vectors)
        faiss.write_index(index, str(partial / _INDEX))
        record = _record(tokenizer, embed) | {"chunk": chunks.size, "passages": len(chunks)}
        (partial / _RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        put_folder(partial, folder)


@dataclass(frozen=True)
class Database:
    """Passages and their embeddings.

    Attributes:
        chunks: of the documents that are retrieved from.
        index: faiss's, of the embedding of each chunk.
        embed: makes the embeddings of texts.
        tokenizer: of the passages.
    """

    chunks: Chunks
    index: Any
    embed: Any
    tokenizer: Tokenizer

    @classmethod
    def open(cls, folder: Path, tokenizer: Tokenizer, embed: Embedder) -> "Database":
        """Opens what ``build`` wrote, without reading it into memory.

        Raises:
            DataError: it is no database, or one of another tokenizer or embedder, or it has no passage.
            ModuleNotFoundError: faiss is not installed.
        """
        faiss = _faiss()
        try:
            record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
            arrays = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS]
            # IO_FLAG_MMAP alone would copy the vectors of a flat index into memory.
            index = faiss.read_index(str(folder / _INDEX), faiss.IO_FLAG_MMAP_IFC)
        except (OSError, ValueError, RuntimeError) as error:
            raise DataError(f"{folder} is no database of passages: {error}") from None
        for name, value in _record(tokenizer, embed).items():
            if record.get(name) != value:
                raise DataError(
                    f"{folder} has passages of another {name}, {record.get(name)} and not {value}; "
                    "build it anew"
                )
        passages, document, paragraphs = arrays
        if not len(passages):
            raise DataError(f"{folder} has no passage; expected documents to retrieve from")
        return cls(Chunks(passages, record["chunk"], document, paragraphs), index, embed, tokenizer)

    @property
    def embeddings(self) -> Float32[np.ndarray, "n E"]:
        """The embedding of each chunk, copied from the index."""
        return self.index.reconstruct_n()

    def vectors(self, chunks: Chunks) -> Float32[np.ndarray, "n E"]:
        """Returns the embeddings of other chunks."""
        return _checked(self.embed(chunks.texts(self.tokenizer)), len(chunks))

    def nearest(
        self, vectors: Float32[np.ndarray, "n E"], chunks: Chunks | None, count: int
    ) -> Int[np.ndarray, "n K"]:
        """Returns the numbers of the ``count`` nearest passages that each chunk may see, nearest first.

        Args:
            vectors: embeddings of the chunks.
            chunks: whose documents and paragraphs are left out; None leaves out nothing.
            count: neighbours, K; -1 stands where there are fewer.
        """
        found = np.full((len(vectors), count), -1, np.int64)
        rows, wanted = np.arange(len(vectors)), count + _SPARE
        while len(rows):
            wanted, short = min(wanted, len(self.chunks)), []
            for first in range(0, len(rows), _ROWS):
                some = rows[first : first + _ROWS]
                _, near = self.index.search(vectors[some], wanted)
                seen = self._may_see(some, near, chunks)
                for row, own, ok in zip(some, near, seen, strict=True):
                    best = own[ok][:count]
                    found[row, : len(best)] = best
                    short += [row] if len(best) < count else []
            if wanted == len(self.chunks):
                break
            rows, wanted = np.array(short, np.int64), 4 * wanted
        return found

    def _may_see(self, rows: np.ndarray, near: np.ndarray, chunks: Chunks | None) -> np.ndarray:
        """Returns which of the passages [n c] near to chunks of these rows each may see."""
        if chunks is None:
            return np.ones(near.shape, bool)
        other = self.chunks.document[near] != chunks.document[rows][:, None]
        own, theirs = chunks.paragraphs[rows], self.chunks.paragraphs[near]
        for column in range(own.shape[1]):  # not all pairs at once, which takes much memory
            mark = own[:, column, None, None]
            other &= ~((theirs == mark) & (mark > 0)).any(-1)
        return other

    def passages(self, numbers: Int[np.ndarray, "..."]) -> Int[np.ndarray, "... R"]:
        """Returns the tokens of passages, 0 for number -1."""
        return np.where(numbers[..., None] >= 0, self.chunks.passages[np.maximum(numbers, 0)], 0)


def overlap(truth: Int[np.ndarray, " m"], passage: Int[np.ndarray, " R"]) -> float:
    """Returns the longest run of tokens that a passage has in common with the truth, as a share of the truth.

    Source: Borgeaud et al. 2022, section 2.6. Padding is no token.
    """
    real = truth > 0
    same = (truth[:, None] == passage) & real[:, None]
    runs, longest = np.zeros(len(passage) + 1, np.int64), 0
    for row in same:
        runs[1:] = np.where(row, runs[:-1] + 1, 0)
        longest = max(longest, int(runs.max()))
    return longest / max(int(real.sum()), 1)


class CharacterNgrams:
    """Counts of runs of three to five bytes, hashed into a vector: nearness of spelling, without weights.

    Args:
        dim: size of the vectors.
    """

    def __init__(self, dim: int = 512):
        self.dim, self.name = dim, f"ngrams-{dim}"

    def __call__(self, texts: Sequence[str]) -> Float32[np.ndarray, "n E"]:
        """Returns the vectors of texts, each count as its square root."""
        found = np.zeros((len(texts), self.dim), np.float32)
        for row, text in zip(found, texts, strict=True):
            raw = np.frombuffer(f" {text.casefold()} ".encode(), np.uint8).astype(np.uint32)
            for size in (3, 4, 5):
                code = np.full(max(len(raw) - size + 1, 0), size, np.uint32)
                for place in range(size):
                    code = (code ^ raw[place : place + len(code)]) * np.uint32(16777619)  # FNV-1a
                code ^= code >> np.uint32(15)
                row += np.bincount(code % self.dim, minlength=self.dim)
        found = np.sqrt(found)
        return found / np.maximum(np.linalg.norm(found, axis=-1, keepdims=True), 1e-9)


def _faiss() -> Any:
    with needs("passages are searched with faiss", "retrieval"):
        import faiss
    return faiss


def _record(tokenizer: Tokenizer, embed: Embedder) -> dict[str, str]:
    digest = hashlib.sha256(tokenizer.to_json().encode()).hexdigest()
    return {"tokenizer": digest[:16], "embedder": embed.name}


def _checked(vectors: np.ndarray, count: int) -> np.ndarray:
    if vectors.shape[:1] != (count,) or vectors.ndim != 2 or not np.isfinite(vectors).all():
        raise DataError(
            f"the embedder gave {vectors.shape} for {count} texts; expected finite [n E]"
        )
    return np.asarray(vectors, np.float32)
