"""Decoding of arrays of any size, with one compile for each bucket of sizes; and its stream of tokens."""

import bisect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from crossattn import functional
from crossattn.decode.config import right_aligned
from crossattn.decode.generate import Source, check_source, generate
from crossattn.decode.hypotheses import Hypotheses
from crossattn.decode.search.drafts import Draft
from crossattn.decode.stream import Piece, Stream
from crossattn.types import AnyArray, Array, Float, Int, Key, Params

Limits = Int[AnyArray, "..."] | Sequence[int] | int | None
"""The most tokens of each row, [B], or of all."""

_OF_CALLS = ("max_new_tokens", "limits", "key")


class Bucketed:
    """``generate`` under ``jax.jit``, for sources or prompts of any number and length.

    Rows, lengths of sources or prompts, and target lengths are filled up to the next size that was named,
    or to what the model has positions for; rows that were added are done from the start, and no row gets
    longer than asked. Beyond the largest size, its multiples are taken. Frames, to which silence would be
    something to hear, keep their number: only rows are added to them.

        hypotheses = Bucketed(build)(params, source, (source != pad_id).astype(int), max_new_tokens=60)

    Args:
      build: makes the model.
      batch_sizes, source_lengths, target_lengths: ascending; prompts have the lengths of sources.
      draft: makes what guesses for ``speculative``, of the sources and their segments (or the prompts and
        their lengths) in the bucket's sizes and of the ``draft_params`` of the call:
        ``lambda source, *_: PromptLookup(source)``.
      **options: of ``generate``, the same for every call.

    Raises:
      ValueError: an option is one that calls take: ``max_new_tokens``, ``limits``, ``key``.
    """

    def __init__(
        self,
        build: functional.Build,
        *,
        batch_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128),
        source_lengths: Sequence[int] = (16, 32, 64, 128, 256, 512),
        target_lengths: Sequence[int] = (16, 32, 64, 128, 256, 512),
        draft: Callable[[Array, Array, Any], Draft] | None = None,
        **options: Any,
    ):
        if wrong := [name for name in _OF_CALLS if name in options]:
            raise ValueError(f"{wrong[0]} is an option of Bucketed; give it to each call instead.")
        self.batch_sizes, self.source_lengths = tuple(batch_sizes), tuple(source_lengths)
        self.target_lengths = tuple(target_lengths)
        self._build, self._candidates = build, options.get("candidates", 1)
        self._prefix = options.get("prefix")
        self._known: _Known | None = None

        @partial(jax.jit, static_argnames="max_new_tokens")
        def search(params, inputs, limits, key, draft_params, max_new_tokens):
            model = functional.bind(build, params)
            call: dict[str, Any] = dict(
                max_new_tokens=max_new_tokens, limits=limits, key=key, **options
            )
            if draft is not None:
                read, which, *_ = inputs
                call["draft"] = draft(read, which, draft_params)
            return inputs.search(model, **call)

        self._search = search
        self._stream = Stream(build, options | {"draft": draft})

    def __call__(
        self,
        params: Params,
        source: Source,
        source_segment_ids: Int[AnyArray, "B S"] | None = None,
        *,
        max_new_tokens: int,
        limits: Limits = None,
        key: Key[Array, ""] | None = None,
        draft_params: Params | None = None,
    ) -> Hypotheses:
        """What ``generate`` gives for sources, [B J max_new_tokens], in arrays of numpy.

        Args:
          limits: the most tokens of each row, where they are fewer than ``max_new_tokens``.
          draft_params: for ``draft``.
        """
        call = self._sources(params, source, source_segment_ids, max_new_tokens, limits)
        return self._run(params, call, key, draft_params)

    def generate(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]] | Int[AnyArray, "B P"],
        *,
        max_new_tokens: int,
        memory: Float[AnyArray, "B S M"] | None = None,
        memory_segment_ids: Int[AnyArray, "B S"] | None = None,
        limits: Limits = None,
        key: Key[Array, ""] | None = None,
        draft_params: Params | None = None,
    ) -> Hypotheses:
        """What ``generate`` gives after prompts of any lengths, each as if it were alone; as a call.

        The ``memory`` that a decoder reads is filled up like sources.
        """
        call = self._prompts(params, prompts, max_new_tokens, limits, memory, memory_segment_ids)
        return self._run(params, call, key, draft_params)

    def stream(
        self,
        params: Params,
        source: Source,
        source_segment_ids: Int[AnyArray, "B S"] | None = None,
        *,
        max_new_tokens: int,
        limits: Limits = None,
        key: Key[Array, ""] | None = None,
        every: int = 1,
    ) -> Iterator[Piece]:
        """The tokens [B n] as they come, ``every`` at a time, greedy or drawn; rows that ended give padding.

        With a ``capture``, pairs: tokens, and the weights [B M N n S] of the steps that predicted them.

        Raises:
          ValueError: the options ask for a search that does not go token by token.
        """
        call = self._sources(params, source, source_segment_ids, max_new_tokens, limits)
        return self._pieces(params, call, key, every)

    def stream_generate(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]] | Int[AnyArray, "B P"],
        *,
        max_new_tokens: int,
        memory: Float[AnyArray, "B S M"] | None = None,
        memory_segment_ids: Int[AnyArray, "B S"] | None = None,
        limits: Limits = None,
        key: Key[Array, ""] | None = None,
        every: int = 1,
    ) -> Iterator[Piece]:
        """What ``generate`` gives as it comes, as in ``stream``."""
        call = self._prompts(params, prompts, max_new_tokens, limits, memory, memory_segment_ids)
        return self._pieces(params, call, key, every)

    @property
    def compilations(self) -> int:
        """How many buckets were compiled, of whole searches."""
        return self._search._cache_size()

    def _run(self, params: Params, call: "_Call", key: Any, draft_params: Any) -> Hypotheses:
        # Cut on the host, where another size is no other program.
        hypotheses = jax.device_get(
            self._search(
                params, call.inputs, call.limits, key, draft_params, max_new_tokens=call.size
            )
        )
        B, T, S = call.shape
        weights = None if hypotheses.weights is None else hypotheses.weights[:B, ..., :T, :S]
        return Hypotheses(
            hypotheses.tokens[:B, :, :T], hypotheses.scores[:B], hypotheses.lengths[:B], weights
        )

    def _pieces(self, params: Params, call: "_Call", key: Any, every: int) -> Iterator[Piece]:
        B, _, S = call.shape
        for tokens, weights in self._stream(
            params, call.inputs, call.limits, key, call.size, every
        ):
            yield tokens[:B] if weights is None else (tokens[:B], weights[:B, ..., :S])

    def _sources(self, params, source, segment_ids, max_new_tokens: int, limits: Any) -> "_Call":
        source, known = np.asarray(source), self._ask(params)
        segment_ids = None if segment_ids is None else np.asarray(segment_ids)
        check_source(source, segment_ids)
        B, S = source.shape[:2]
        if np.issubdtype(source.dtype, np.integer):
            source = source.astype(np.int32)
            if segment_ids is None and known.pad_id is not None:
                segment_ids = source != known.pad_id
            source, segment_ids = self._filled(
                source, segment_ids, _size(S, self.source_lengths, known.source)
            )
        else:
            source, segment_ids, S = *self._more_rows(source, segment_ids), None
        start = 1 if self._prefix is None else np.atleast_1d(self._prefix).shape[-1]
        return self._call(
            params, _Sources(source, segment_ids), (B, max_new_tokens, S), start, limits
        )

    def _more_rows(self, frames: Any, segment_ids: Any) -> tuple[Any, Any]:
        """Frames [B F M], with rows filled up, and their segments if there are any."""
        more = (0, _size(len(frames), self.batch_sizes) - len(frames))
        frames = np.pad(frames, (more, *((0, 0),) * (frames.ndim - 1)))
        if segment_ids is not None:
            segment_ids = np.pad(
                np.asarray(segment_ids, np.int32), (more, (0, 0)), constant_values=1
            )
        return frames, segment_ids

    def _prompts(
        self,
        params,
        prompts,
        max_new_tokens: int,
        limits: Any,
        memory: Any,
        memory_segment_ids: Any,
    ) -> "_Call":
        if self._prefix is not None:
            raise ValueError(
                "prefix is an option of this Bucketed; leave it out: prompts are prefixes."
            )
        rows = [np.asarray(row).tolist() for row in prompts]
        B, longest = len(rows), self._ask(params).target
        longest = None if longest is None else longest - max_new_tokens + 1
        width = _size(max(map(len, rows)), self.source_lengths, longest)
        prefix, lengths = right_aligned(rows + [[0]] * (_size(B, self.batch_sizes) - B), width)
        inputs, S = _Prompts(prefix, lengths), None
        if memory is not None:
            if len(memory) != B:
                raise ValueError(
                    f"memory has {len(memory)} rows; expected as many as there are prompts, {B}."
                )
            S = memory.shape[1]
            read = self._filled(
                np.asarray(memory), memory_segment_ids, _size(S, self.source_lengths)
            )
            inputs = _Prompts(prefix, lengths, *read)
        return self._call(params, inputs, (B, max_new_tokens, S), width, limits)

    def _filled(self, x: Any, segment_ids: Any, size: int) -> tuple[Any, Any]:
        """What is read, [B S ...], and its segments [B S], with rows and length filled up."""
        B, S = x.shape[:2]
        segment_ids = (
            np.ones((B, S), np.int32) if segment_ids is None else np.asarray(segment_ids, np.int32)
        )
        more = (0, _size(B, self.batch_sizes) - B), (0, size - S)
        x, segment_ids = np.pad(x, (*more, *((0, 0),) * (x.ndim - 2))), np.pad(segment_ids, more)
        # Nothing but padding would be read as NaN by some kernels of other libraries.
        segment_ids[B:, 0] = 1
        return x, segment_ids

    def _call(self, params, inputs: Any, shape: Any, start: int, limits: Any) -> "_Call":
        B, T, _ = shape
        given = np.minimum(T if limits is None else np.asarray(limits), T)
        if given.shape not in ((), (B,)):
            raise ValueError(f"limits has shape {given.shape}; expected [] or [B] = [{B}].")
        limits = np.pad(np.broadcast_to(given, B).astype(np.int32), (0, len(inputs[0]) - B))
        longest = self._ask(params).target
        longest = None if longest is None else longest - start + 1
        return _Call(inputs, limits, _size(T, self.target_lengths, longest), shape)

    def _ask(self, params: Params) -> "_Known":
        if self._known is None:
            asked: list[Any] = []  # nothing is computed for it

            def ask(params):
                model = functional.bind(self._build, params)
                longest = getattr(model, "longest", (None, None))
                asked.append((*longest, getattr(model, "pad_id", None)))

            jax.eval_shape(ask, params)
            source, target, pad_id = asked[0]
            read_last = self._candidates > 1
            self._known = _Known(source, None if target is None else target - read_last, pad_id)
        return self._known


class _Known(NamedTuple):
    """The longest source and the longest text that a model has positions for, and its padding."""

    source: int | None
    target: int | None
    pad_id: int | None


class _Sources(NamedTuple):
    """Sources and segments, [B S] both, or frames; arrays of numpy, or traced ones."""

    source: Any
    segment_ids: Any

    def search(self, model: Any, **call: Any) -> Hypotheses:
        return generate(model, *self, **call)

    def config(self) -> dict[str, Any]:
        return {}

    def prefill(self, model: Any, cache_length: int) -> Any:
        source, segment_ids = self
        return model.prefill(
            len(source), 1, cache_length, source=source, source_segment_ids=segment_ids
        )


class _Prompts(NamedTuple):
    """What ``generate`` goes on with: prompts [B P] at their right ends, and their lengths [B].

    With it goes the memory that the model reads, [B S M], and its segments [B S], if it reads one.
    """

    prefix: Any
    lengths: Any
    memory: Any = None
    segment_ids: Any = None

    def search(self, model: Any, **call: Any) -> Hypotheses:
        return generate(model, batch=len(self.prefix), inputs=self.reads(), **self.config(), **call)

    def config(self) -> dict[str, Any]:
        return {"prefix": self.prefix, "prefix_lengths": self.lengths}

    def reads(self) -> dict[str, Any]:
        if self.memory is None:
            return {}
        return {"memory": self.memory, "memory_segment_ids": self.segment_ids}

    def prefill(self, model: Any, cache_length: int) -> Any:
        return model.prefill(len(self.prefix), 1, cache_length, **self.reads())


class _Call(NamedTuple):
    """One call, filled up. ``shape``: rows, target length and source length as they were asked for."""

    inputs: _Sources | _Prompts
    limits: Int[np.ndarray, " B"]
    size: int
    shape: tuple[int, int, int | None]


def _size(count: int, sizes: Sequence[int], longest: int | None = None) -> int:
    """The next size, or multiple of the largest; no more than ``longest``, unless there are more already."""
    index = bisect.bisect_left(sizes, count)
    size = sizes[index] if index < len(sizes) else -(-count // sizes[-1]) * sizes[-1]
    return size if longest is None else max(count, min(size, longest))
