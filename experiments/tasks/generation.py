"""A trained model as a translator of texts, and the attention between their tokens."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from crossattn import decode, interventions
from crossattn.data.pipeline import eval_batches
from crossattn.decode import constraints
from crossattn.interventions import Intervention
from crossattn.train.sharding import everywhere, mesh_of, row_shares, rows_on, spread_batch
from experiments.errors import SettingsError

_HEADS = "decoder.cross.heads"


@dataclass(frozen=True)
class Attention:
    """Cross-attention of a sentence pair.

    Attributes:
      weights: [L N T S]; row t is the step that predicts target token t, end-of-sentence last.
      source_tokens, target_tokens: readable pieces, S and T of them.
      source_spans, target_spans: characters of each token in its text, [S 2] and [T 2]; (0, 0) for the
        end-of-sentence token.
    """

    weights: Float[np.ndarray, "L N T S"]
    source_tokens: list[str]
    target_tokens: list[str]
    source_spans: Int[np.ndarray, "S 2"]
    target_spans: Int[np.ndarray, "T 2"]


@dataclass(frozen=True)
class KnockedOut:
    """Probabilities of a target text, first with all heads, then without each of L layers times N.

    Attributes:
      probabilities: [1 + L N, T], end-of-sentence last.
      likeliest: the likeliest token at each place, as readable pieces.
      heads: L and N.
    """

    probabilities: Float[np.ndarray, "heads T"]
    likeliest: list[list[str]]
    heads: tuple[int, int]


class Translator:
    """A decoder of sentences in batches of similar length, with few compiled shapes.

    Args:
      task: a ``TranslationTask``.
      params: its parameters; on a mesh, every process gets all texts.
      num_beams: 1 is greedy.
      length_penalty: of beam search.
      no_repeat_ngram: no sequence of so many tokens is written twice; None allows it.
      max_new_tokens: the most target tokens, at most twice the bucket's source length and 16; None is the
        config's target length.
      batch_size: sentences of the longest bucket decoded together; batches of shorter ones are larger.
      key: samples tokens instead of choosing the likeliest.
      processors: processors of logits, see ``crossattn.decode``.
      capture: layers and heads whose attention ``attended`` returns.
    """

    def __init__(
        self,
        task: Any,
        params: Any,
        *,
        num_beams: int = 1,
        length_penalty: float = 0.6,
        no_repeat_ngram: int | None = None,
        max_new_tokens: int | None = None,
        batch_size: int = 32,
        key: Any = None,
        processors: Sequence[Any] = (),
        capture: decode.Capture | None = None,
    ):
        if num_beams < 1 or batch_size < 1:
            raise SettingsError(
                f"num_beams ({num_beams}) and batch_size ({batch_size}) must be 1 or more."
            )
        data = task.config.data
        self.task, self.params = task, params
        self._mesh = mesh_of(params)
        self.batch_size = rows_on(self._mesh, batch_size)
        self.max_new_tokens = max_new_tokens or data.target_len
        self.source_len = data.source_len
        self.cut_sources = 0
        self._key = key
        if no_repeat_ngram is not None:
            processors = (*processors, constraints.no_repeat_ngram(no_repeat_ngram))
        self._search = jax.jit(
            lambda params, source, segment_ids, key: decode.generate(
                task.bind(params),
                source,
                segment_ids,
                **task.search(
                    min(self.max_new_tokens, 2 * source.shape[1] + 16),
                    num_beams=num_beams,
                    length_penalty=length_penalty,
                    key=key,
                    processors=processors,
                    **({} if capture is None else {"capture": capture}),
                ),
            ),
            out_shardings=everywhere(self._mesh),
        )
        self._attend = jax.jit(
            lambda params, source, tokens, segment_ids, lengths: decode.attention_of(
                task.bind(params),
                source,
                tokens,
                segment_ids,
                lengths=lengths,
                bos_id=task.corpus.output_tokenizer.frame.start,
            ),
            out_shardings=everywhere(self._mesh),
        )

    def texts(self, sources: Sequence[str]) -> list[str]:
        """Returns translations in order; ``cut_sources`` counts the sources that were cut."""
        return [hypotheses[0][1] for hypotheses in self.best(sources, 1)]

    def best(self, sources: Sequence[str], count: int) -> list[list[tuple[float, str]]]:
        """Returns the ``count`` best translations of each source with their scores, or fewer."""
        corpus = self.task.corpus
        hypotheses: list[Any] = [None] * len(sources)
        for index, found, row, _ in self._searched(sources, count):
            texts = corpus.output_tokenizer.decode_batch(found.tokens[row].tolist())
            scored = zip(found.scores[row].tolist(), texts, strict=True)
            hypotheses[index] = [(score, text) for score, text in scored if score > -math.inf]
        return hypotheses

    def attended(self, sources: Sequence[str]) -> list[tuple[str, Attention]]:
        """Returns the best translation of each source, and the attention by which the search wrote it.

        ``capture`` says of which layers and heads; the last row is that of the end, where it was reached.
        """
        reader, tokenizer = self.task.corpus.tokenizer, self.task.corpus.output_tokenizer
        found: list[Any] = [None] * len(sources)
        for index, best, row, S in self._searched(sources, 1):
            if best.weights is None:
                raise ValueError("the translator has no capture; expected capture=Capture().")
            ids = best.tokens[row, 0, : best.lengths[row, 0]].tolist()
            source, spans = _pieces(reader, sources[index], S, len(reader.frame.after))
            text, own = tokenizer.decode(ids), _decoded_spans(tokenizer, ids)
            weights = np.asarray(best.weights[row, 0, :, :, : len(ids), :S])
            found[index] = text, Attention(weights, source, tokenizer.tokens(ids), spans, own)
        return found

    def _searched(
        self, sources: Sequence[str], count: int
    ) -> Iterator[tuple[int, decode.Hypotheses, int, int]]:
        """Yields of each source its number, the best hypotheses of its batch, its row there, its length."""
        pairs = [{"id": str(i), "source": text, "target": ""} for i, text in enumerate(sources)]
        batches = self._batches(pairs)
        self.cut_sources = batches.cut["source"]
        for number, item in enumerate(batches):
            batch = spread_batch(self.task.seen(item.batch), self._mesh)
            arrays = batch["source"], batch["source_segment_ids"]
            key = None if self._key is None else jax.random.fold_in(self._key, number)
            best = jax.device_get(self._search(self.params, *arrays, key)).best(count)
            for row, index in enumerate(item.indices):
                if index >= 0:
                    yield (
                        int(index),
                        best,
                        row,
                        int((item.batch["source_segment_ids"][row] > 0).sum()),
                    )

    def attention(self, pairs: Sequence[tuple[str, str]]) -> list[Attention]:
        """Returns the attention of each pair (source, target)."""
        examples = [{"id": str(i), "source": s, "target": t} for i, (s, t) in enumerate(pairs)]
        attention: list[Any] = [None] * len(pairs)
        for item in self._batches(examples):
            batch = item.batch
            spread = spread_batch(self.task.seen(batch), self._mesh)
            weights = np.asarray(
                self._attend(
                    self.params,
                    spread["source"],
                    spread["target_out"],
                    spread["source_segment_ids"],
                    (spread["target_segment_ids"] > 0).sum(axis=1),
                )
            )
            for row, index in enumerate(item.indices):
                if index >= 0:
                    T = int((batch["target_segment_ids"][row] > 0).sum())
                    S = int((batch["source_segment_ids"][row] > 0).sum())
                    attention[index] = self._described(weights[:, row, :, :T, :S], pairs[index])
        return attention

    def _described(self, weights: Float[np.ndarray, "L N T S"], pair) -> Attention:
        corpus = self.task.corpus
        T, S = weights.shape[-2:]
        frame = corpus.tokenizer.frame
        source, source_spans = _pieces(corpus.tokenizer, pair[0], S, len(frame.after))
        target, target_spans = _pieces(corpus.output_tokenizer, pair[1], T, 0)
        return Attention(weights, source, target, source_spans, target_spans)

    def knockouts(self, pairs: Sequence[tuple[str, str]]) -> list["KnockedOut"] | None:
        """Returns what the model says of each pair (source, target) without each head of cross-attention.

        One compiled program does all heads, one after the other. None where the decoder's cross-attention has
        no heads to knock out.
        """
        site = interventions.sites(self.task.bind(self.params)).get(_HEADS)
        if site is None or site.heads is None:
            return None
        shape = site.layers, site.heads
        tokenizer = self.task.corpus.output_tokenizer
        examples = [{"id": str(i), "source": s, "target": t} for i, (s, t) in enumerate(pairs)]
        found: list[Any] = [None] * len(pairs)
        for item in self._batches(examples):
            batch = spread_batch(self.task.seen(item.batch), self._mesh)
            own, likeliest = jax.device_get(self._without(self.params, batch))
            for row, index in enumerate(item.indices):
                if index >= 0:
                    T = int((item.batch["target_segment_ids"][row] > 0).sum())
                    texts = [tokenizer.tokens(ids.tolist()) for ids in likeliest[:, row, :T]]
                    found[index] = KnockedOut(own[:, row, :T], texts, shape)
        return found

    @cached_property
    def _without(self) -> Any:
        """The program of ``without_each_head``."""

        def without(params: Any, batch: Any) -> Any:
            logits = lambda model: model.logits(self.task.read_source(model, batch, None)[0])  # noqa: E731
            return without_each_head(self.task.bind(params), _HEADS, logits, batch["target_out"])

        return jax.jit(without, out_shardings=everywhere(self._mesh))

    @property
    def _batches(self):
        corpus = self.task.corpus
        return partial(
            eval_batches,
            tokenizer=corpus.tokenizer,
            target_tokenizer=corpus.target_tokenizer,
            batch_size=self.batch_size,
            batch_multiple=row_shares(self._mesh),
            source_len=self.source_len,
            target_len=self.max_new_tokens,
        )


def without_each_head(
    model: Any, site: str, logits: Callable[[Any], Any], told: Int[Array, "*B T"]
) -> tuple[Float[Array, "heads *B T"], Int[Array, "heads *B T"]]:
    """Computes probabilities of the tokens told, and the likeliest tokens, by a loop inside the program.

    Args:
      model: the model, whole.
      site: of the heads, L layers of N.
      logits: from a model to its logits [*B T V].
      told: tokens.

    Returns:
      With all heads, then without each, [1 + L N *B T]; probabilities are float32.
    """
    off = jnp.asarray(interventions.knockouts(model, site)[site].scale)
    scales = jnp.concatenate([jnp.ones_like(off[:1]), off])

    def said(scale: Any) -> tuple[Any, Any]:
        edited = interventions.intervene(model, {site: Intervention(scale=scale)})
        p = jax.nn.softmax(logits(edited).astype(jnp.float32))
        return jnp.take_along_axis(p, told[..., None], axis=-1)[..., 0], p.argmax(-1)

    return jax.lax.map(said, scales)


def _pieces(
    tokenizer: Any, text: str, length: int, end: int
) -> tuple[list[str], Int[np.ndarray, "n 2"]]:
    """Returns tokens and spans of a text in its frame, cut to a length that keeps ``end`` last tokens."""
    (ids, spans), frame = tokenizer.encode_with_spans(text), tokenizer.frame
    first = len(frame.before)
    kept = min(len(ids), length - end - first)
    around = np.zeros((length, 2), np.int32)
    around[first : first + kept] = spans[:kept]
    after = frame.after[: length - first - kept]
    return tokenizer.tokens([*frame.before, *ids[:kept], *after]), around


def _decoded_spans(tokenizer: Any, ids: Sequence[int]) -> Int[np.ndarray, "n 2"]:
    """Returns the span of each token in the text of all; the first byte of a character has its span."""
    text = tokenizer.decode(ids)
    ends = [min(len(tokenizer.decode(ids[: n + 1])), len(text)) for n in range(len(ids))]
    spans, start = np.zeros((len(ids), 2), np.int32), 0
    for n, end in enumerate(ends):
        while start < end and text[start].isspace():
            start += 1
        spans[n] = start, max(start, end)
        start = max(start, end)
    return spans
