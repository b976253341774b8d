"""Windows of documents with their neighbours, and texts that retrieve as they are written.

Parts of the task ``retrieval_language_model``.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from crossattn.data import documents
from crossattn.data.neighbours import CharacterNgrams, Database, build
from crossattn.data.prepare import prepared_dir
from crossattn.data.sources import MappedSource
from crossattn.data.tokenizers import BOS, EOS
from experiments import minilm
from experiments.errors import SettingsError


@dataclass(frozen=True)
class Windows:
    """The windows of a split.

    Attributes:
      documents: of the split.
      where: document, number of its first chunk and tokens of each window.
      neighbours: numbers of the passages of all chunks of the split, -1 for none.
    """

    documents: Sequence[documents.Document]
    where: Sequence[tuple[int, int, np.ndarray]]
    neighbours: np.ndarray


class Retrieval:
    """The database of a config, and the windows of its splits.

    Args:
      corpus: the data, with their tokenizer.
      data: ``config.data``.
    """

    def __init__(self, corpus: Any, data: Any):
        self.corpus, self.data = corpus, data
        self._splits: dict[str, Windows] = {}

    @cached_property
    def database(self) -> Database:
        """The passages, embedded once for all starts."""
        tokenizer, embed = self.corpus.tokenizer, self._embedder
        passages = self._cut(self._documents(self.data.passages))
        named = ["faiss", tokenizer.to_json(), embed.name, passages.size, len(passages)]
        key = hashlib.sha256(json.dumps(named).encode() + passages.passages.tobytes()).hexdigest()
        folder = prepared_dir(self.data.get("data_dir")) / "neighbours" / key[:16]
        if not folder.exists():
            build(Path(folder), passages, tokenizer, embed)
        return Database.open(Path(folder), tokenizer, embed)

    @cached_property
    def _embedder(self) -> Any:
        if self.data.embedder == "ngrams":
            return CharacterNgrams()
        return minilm.MiniLM(self.data.get("data_dir"))

    def windows(self, split: str) -> Windows:
        """Returns the windows of a split, for which neighbours are looked up once."""
        if split not in self._splits:
            texts = self._documents(split)
            chunks = self._cut(texts)
            own = split == self.data.passages
            vectors = self.database.embeddings if own else self.database.vectors(chunks)
            found = self.database.nearest(vectors, chunks, self.data.neighbours)
            where, first = [], 0
            for number, each in enumerate(texts):
                for start, tokens in documents.windows(each, self.data.target_len):
                    where.append((number, first + start // self.data.chunk, tokens))
                first += -(-len(each.tokens) // self.data.chunk)
            self._splits[split] = Windows(texts, where, found)
        return self._splits[split]

    def examples(self, split: str) -> Sequence[dict[str, Any]]:
        """Returns {"id", "group", "target", "neighbours"} of each window of a split."""
        windows = self.windows(split)

        def example(place: int) -> dict[str, Any]:
            number, first, tokens = windows.where[place]
            count = (len(tokens) - 1) // self.data.chunk
            near = windows.neighbours[first : first + count]
            name = windows.documents[number].name
            passages = self.database.passages(near)
            return {
                "id": f"{name}#{first}",
                "group": name,
                "target": tokens,
                "neighbours": passages,
            }

        return MappedSource(range(len(windows.where)), example)

    def of_text(self, chunk: np.ndarray) -> np.ndarray:
        """Returns the tokens [K R] of the neighbours of a chunk of a text that is being written."""
        chunks = documents.Chunks(
            chunk[None], len(chunk), np.zeros(1, np.uint64), np.zeros((1, 1), np.uint64)
        )
        numbers = self.database.nearest(self.database.vectors(chunks), None, self.data.neighbours)
        return self.database.passages(numbers)[0]

    def _documents(self, split: str) -> list[documents.Document]:
        found = documents.read_documents(self.corpus.split(split), self.corpus.tokenizer)
        if not found:
            raise SettingsError(f"the split {split!r} of {self.data.name} has no documents.")
        return found

    def _cut(self, texts: Sequence[documents.Document]) -> documents.Chunks:
        return documents.cut(texts, self.data.chunk, self.data.neighbour_len)


class Writer:
    """Writes the likeliest continuation of a text, and retrieves at the end of each of its chunks.

    Args:
      retrieval: the database.
      bind: makes the model of parameters.
      data: ``config.data``.
    """

    def __init__(self, retrieval: Retrieval, bind: Callable[[Any], Any], data: Any):
        self.retrieval, self.data = retrieval, data

        def step(params: Any, tokens: Any, states: Any) -> Any:
            logits, states = bind(params).decode_step(tokens, states)
            return logits[0, 0, 0].argmax(), states

        self._begin = jax.jit(lambda params: bind(params).prefill(1, 1, data.target_len))
        self._step = jax.jit(step)
        self._look_up = jax.jit(lambda params, *given: bind(params).retrieved(*given))

    def __call__(self, params: Any, text: str, count: int | None) -> str:
        """Returns a text with at most ``count`` further tokens, as many as a window has for None.

        Raises:
          SettingsError: the text leaves no room for more.
        """
        tokenizer, most, m = self.retrieval.corpus.tokenizer, self.data.target_len, self.data.chunk
        ids = [BOS, *tokenizer.encode(text)]
        if len(ids) > most:
            raise SettingsError(
                f"a text has {len(ids)} tokens with its beginning; expected at most {most}, "
                "config.data.target_len."
            )
        prompt, states = len(ids), self._begin(params)
        for place in range(min(prompt + (count or most), most + 1) - 1):
            if (place + 1) % m == 0:
                chunk = np.array(ids[place + 1 - m : place + 1], np.int32)
                near = self.retrieval.of_text(chunk)
                states = self._look_up(params, states, place // m, chunk[None], near[None])
            said, states = self._step(params, np.array([[[ids[place]]]], np.int32), states)
            if place + 1 >= prompt:
                if said == EOS:
                    break
                ids.append(int(said))
        return tokenizer.decode(ids)
