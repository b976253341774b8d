"""Next-token prediction in documents, by a model that reads passages retrieved from other documents.

Passages are those of one split, of other documents than the text's, and of no paragraph that a chunk or what
follows it has too. A model whose ``hidden`` takes no ``neighbours``, such as a ``Decoder``, learns the same
texts alone.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from crossattn import models
from crossattn.analysis.scores import passage_slopes
from crossattn.data.features import Neighbours, Window
from crossattn.data.neighbours import overlap
from crossattn.data.tokenizers import BOS
from crossattn.train.sharding import mesh_of, spread_batch
from crossattn.types import Count
from experiments.errors import SettingsError
from experiments.tasks import base, protocols, sections
from experiments.tasks.language_model import LanguageModelTask
from experiments.tasks.retrieval import Retrieval, Writer
from experiments.tasks.written import tokens_of_words

BINS = (0.0, 0.125, 0.25, 0.5, 1.0)
"""Bounds of the overlap of neighbours with the chunk that follows, see ``neighbours.overlap``."""


@dataclass(frozen=True, kw_only=True)
class RetrievalData(sections.Data):
    """Documents, and the passages that are retrieved for them.

    Attributes:
      target_len: the most tokens of a window of a document, which the model reads at once.
      chunk: tokens of a chunk, for which neighbours are retrieved.
      neighbours: passages retrieved for a chunk.
      neighbour_len: tokens of a passage, a chunk and what follows it.
      passages: the split whose documents are retrieved from.
      embedder: hashed runs of characters, or the vectors of a MiniLM that is fetched.
    """

    target_len: sections.Length
    chunk: Count
    neighbours: Count
    neighbour_len: Count
    passages: str = "train"
    embedder: Literal["ngrams", "minilm"] = "ngrams"


@dataclass(frozen=True)
class Passage:
    """A passage, and what tokens read of it.

    Attributes:
      words: of the passage.
      read: attention to each word [S], the mean over tokens, heads and blocks.
      mass: the share of attention on the whole, with what marks its beginning and end.
      slope: nats of the tokens' log-likelihood that rest on it, see ``passage_slopes``.
    """

    words: list[str]
    read: np.ndarray
    mass: float
    slope: float


class RetrievalLanguageModelTask(LanguageModelTask):
    """A ``Retro``, or a ``Decoder`` that reads no neighbours, and documents.

    ``nll_without`` is the loss of the same model without neighbours.
    """

    sections = {
        "data": RetrievalData,
        "tokenizer": sections.Tokenizer,
        "loss": sections.CrossEntropy,
    }
    gives = ("vocab_size", "max_length", "chunk", "neighbours", "neighbour_len")
    metrics = ("loss", "nll", "nll_without")
    takes_pretrained = False
    mode, truncation = "pad", "cut"

    @property
    def memory(self) -> tuple[str, ...]:
        """The neighbours, if the model reads any."""
        return ("neighbours",) if self._reads else ()

    def corpus_options(self) -> dict[str, Any]:
        return dict(side="paragraphs")

    @classmethod
    def check(cls, config: Any) -> None:
        """Raises SettingsError also for lengths that do not fit one another."""
        data = config.data
        if data.target_len % data.chunk:
            raise SettingsError(
                f"config.data.target_len is {data.target_len}; expected a multiple of data.chunk, "
                f"{data.chunk}."
            )
        if data.neighbour_len < data.chunk:
            raise SettingsError(
                f"config.data.neighbour_len is {data.neighbour_len}; expected data.chunk, {data.chunk}, or "
                "more."
            )
        super().check(config)

    @classmethod
    def asks_of(cls, config: Any) -> tuple[type, ...]:
        """Returns the protocol of a model that reads neighbours, or of one that does not."""
        return (protocols.RetrievalLanguageModel if _reads(config) else protocols.LanguageModel,)

    @cached_property
    def _reads(self) -> bool:
        return _reads(self.config)

    def sizes(self) -> dict[str, Any]:
        names = ("chunk", "neighbours", "neighbour_len") if self._reads else ()
        return super().sizes() | {name: self.config.data[name] for name in names}

    def refuse_unready(self) -> None:
        """Raises DataError where there are no documents."""
        self.corpus.refuse_lacking("paragraphs")

    @cached_property
    def retrieval(self) -> Retrieval:
        """The database, and the windows of the splits."""
        return Retrieval(self.corpus, self.config.data)

    @cached_property
    def features(self) -> Mapping[str, Any]:
        data = self.config.data
        chunks = data.target_len // data.chunk
        return {
            "target": Window(data.target_len),
            "neighbours": Neighbours(chunks, data.neighbours, data.neighbour_len),
        }

    def examples(self, split: str, count: int | None = None) -> Sequence[Any]:
        return self.retrieval.examples(split)

    # Those of a feature, not of packed texts.
    train_iterator = base.Task.train_iterator
    numbered_batches = base.Task.numbered_batches

    def batch_shapes(self, multiple: int) -> dict[str, jax.ShapeDtypeStruct]:
        return base.shapes_of(base.feature_batch(self.features, self.config.data.batch_size))

    def loss(self, params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, base.Sums]:
        model = self.bind(params)
        loss, sums = self.cross_entropy(model, self._hidden(model, batch, key), batch)
        if key is None:
            _, blind = self.cross_entropy(model, self._hidden(model, _without(batch)), batch)
            sums |= {"nll_without": blind["nll"]}
        return loss, sums

    def _hidden(self, model: Any, batch: Any, key: Any = None) -> jax.Array:
        batch = self.seen(batch)
        given = {"positions": batch["target_positions"]}
        if self._reads:
            given = {"neighbours": batch["neighbours"]}
        segments = batch["target_segment_ids"]
        return model.hidden(batch["target_in"], segment_ids=segments, **given, key=key)

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        return super().scores(sums) | {"nll_without": sums["nll_without"] / (sums["weight"] or 1.0)}

    def report(self, params: Any, split: str, **options: Any) -> dict[str, Any]:
        """Returns the losses of a split, bits a byte, and what neighbours change by their overlap.

        ``bits_per_byte``, ``_without`` neighbours and with ``_random`` passages of the database;
        ``tokens_A_to_B`` and ``nll_A_to_B`` are those of the chunks with which their neighbours overlap as
        much, see ``BINS``, and "chunks" has those of each, for ``experiments.compare``.
        """
        results = base.Task.report(self, params, split, **options)
        found = results["examples"]
        size = sum(document.bytes for document in self.retrieval.windows(split).documents)
        kinds = [name for name in found if name.startswith("nll")]
        for name in kinds:
            results[f"bits_per_byte{name[3:]}"] = float(sum(found[name]) / np.log(2) / size)
        chunks = self._chunks(params, split)
        return (
            results | {"chunks": chunks} | (_by_overlap(chunks) if self._reads and chunks else {})
        )

    def outcomes(self, params: Any, split: str) -> dict[str, list[Any]]:
        """Returns losses of windows, with their neighbours, without, with random ones; a group is a file."""
        examples, told = self.examples(split), {}
        for index, row in self._told(params, split):
            told[index] = {name: float(x.sum()) for name, x in row.items()}
        names = list(told[0])
        table = {name: [told[i][name] for i in range(len(examples))] for name in names}
        return table | {"group": [examples[i]["group"] for i in range(len(examples))]}

    def _told(self, params: Any, split: str) -> Any:
        """Yields the index and the losses [T] of each window, by the neighbours that it is given."""
        mesh, rng = mesh_of(params), np.random.default_rng(0)
        call = jax.jit(self._nll)
        for item in self.numbered_batches(split, mesh):
            given = {"nll": item.batch}
            if self._reads:
                given["nll_without"] = _without(item.batch)
                given["nll_random"] = self._random(item.batch, rng)
            losses = {k: np.asarray(call(params, spread_batch(x, mesh))) for k, x in given.items()}
            losses["weight"] = np.asarray(item.batch["target_segment_ids"] > 0, np.float32)
            for row in np.flatnonzero(item.indices >= 0):
                yield int(item.indices[row]), {name: x[row] for name, x in losses.items()}

    def _nll(self, params: Any, batch: Any) -> jax.Array:
        model = self.bind(params)
        log_p = jax.nn.log_softmax(model.logits(self._hidden(model, batch)))
        nll = -jnp.take_along_axis(log_p, batch["target_out"][..., None], axis=-1)[..., 0]
        return jnp.where(self.told(batch), nll, 0)

    def _random(self, batch: Any, rng: np.random.Generator) -> dict[str, Any]:
        """Returns a batch with random passages in the place of each neighbour that is there."""
        there = batch["neighbours"].any(-1)
        drawn = self.retrieval.database.passages(
            rng.integers(len(self.retrieval.database.chunks), size=there.shape)
        )
        return {**batch, "neighbours": np.where(there[..., None], drawn, 0)}

    def _chunks(self, params: Any, split: str) -> dict[str, list[Any]]:
        """Returns overlaps, tokens and losses of all chunks that follow one with neighbours."""
        m, examples, found = self.config.data.chunk, self.examples(split), defaultdict(list)
        for index, row in sorted(self._told(params, split), key=itemgetter(0)):
            example = examples[index]
            truths, near = example["target"][m:], example["neighbours"]
            for u in range(len(near)):
                truth = truths[u * m : (u + 1) * m]
                if not near[u].any() or not len(truth):
                    continue
                part = slice((u + 1) * m - 1, (u + 1) * m - 1 + len(truth))
                found["overlap"].append(max(overlap(truth, passage) for passage in near[u]))
                found["group"].append(example["group"])
                for name, x in row.items():
                    found[name].append(float(x[part].sum()))
        return dict(found)

    def continued(
        self, params: Any, texts: Sequence[str], max_new_tokens: int | None = None, **search: Any
    ) -> list[str]:
        """Returns texts, each with the likeliest continuation; every whole chunk retrieves its neighbours.

        Raises:
          SettingsError: a text leaves no room for more, or another search is asked for.
        """
        if not self._reads:
            return super().continued(params, texts, max_new_tokens, **search)
        asked = [
            name for name, value in search.items() if value and (name, value) != ("num_beams", 1)
        ]
        if asked:
            raise SettingsError(
                f"a {self.config.task} writes the likeliest token after the other; leave {asked[0]} out."
            )
        return [self._writer(params, text, max_new_tokens) for text in texts]

    def passages(self, params: Any, text: str) -> tuple[str, str, list[Passage]]:
        """Returns the last whole chunk of a text, what follows it, and the passages that this reads.

        Raises:
          SettingsError: the model reads no passages, no chunk is whole, or the text is longer than a window.
        """
        if not self._reads:
            raise SettingsError(f"a {self.config.model.name} reads no passages.")
        tokenizer, m, most = (
            self.corpus.tokenizer,
            self.config.data.chunk,
            self.config.data.target_len,
        )
        ids = np.array([BOS, *tokenizer.encode(text)], np.int32)
        end = (len(ids) - 1) // m * m
        if not end or len(ids) - 1 > most:
            raise SettingsError(
                f"a text has {len(ids)} tokens with its beginning; expected {m + 1} to {most + 1}, a chunk "
                "and what follows it."
            )
        near = np.stack([self.retrieval.of_text(chunk) for chunk in ids[:end].reshape(-1, m)])
        window = {
            "target_in": ids[None, :-1],
            "target_out": ids[None, 1:],
            "target_segment_ids": np.ones((1, len(ids) - 1), np.int32),
            "neighbours": near[None],
        }
        weights, slopes = self._passages_read(params, window)
        read = np.asarray(weights)[end - 1 :].mean(0).reshape(near.shape[1:])
        slopes = np.asarray(slopes)[end - 1 :].sum(0)
        found = []
        for tokens, own, slope in zip(near[-1], read, slopes, strict=True):
            rows = tokens_of_words(tokenizer.decode, tokens[tokens > 0].tolist())
            words = [tokenizer.decode(tokens[row].tolist()).strip() for row in rows]
            parts = np.array([own[row].sum() for row in rows])
            found.append(Passage(words, parts, float(own.sum()), float(slope)))
        chunk, rest = (tokenizer.decode(part.tolist()) for part in (ids[end - m : end], ids[end:]))
        return chunk, rest, found

    @cached_property
    def _passages_read(self) -> Any:
        """The function from a window of one row to attention [T (K R)] and slopes [T K]."""

        def read(params: Any, window: Any) -> tuple[jax.Array, jax.Array]:
            model, given = self.bind(params), {"neighbours": window["neighbours"]}
            _, weights = model.hidden(window["target_in"], **given, return_weights=True)
            return weights.mean((0, 2))[0], passage_slopes(model, window)[0]

        return jax.jit(read)

    @cached_property
    def _writer(self) -> Writer:
        return Writer(self.retrieval, self.bind, self.config.data)


def _by_overlap(chunks: Mapping[str, list[Any]]) -> dict[str, float]:
    """Returns tokens and losses of chunks, by ``BINS``."""
    found, places = {}, np.searchsorted(BINS[1:-1], chunks["overlap"], side="right")
    for place, (low, high) in enumerate(pairwise(BINS)):
        own = {k: x for k, x in chunks.items() if k not in ("overlap", "group")}
        sums = {k: np.array(x)[places == place].sum() for k, x in own.items()}
        if count := sums.pop("weight"):
            bounds = f"{low:g}_to_{high:g}"
            found[f"tokens_{bounds}"] = float(count)
            found |= {f"{name}_{bounds}": float(x / count) for name, x in sums.items()}
    return found


def _without(batch: Any) -> dict[str, Any]:
    return {**batch, "neighbours": batch["neighbours"] * 0}


def _reads(config: Any) -> bool:
    module = models.find(config.model.name).module
    return not protocols.lacking(module, protocols.RetrievalLanguageModel)
