"""Decoding of arrays of any size, with one compile for each bucket of sizes; and its stream of tokens."""

import bisect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossattn import functional
from crossattn.decode.drafts import Draft
from crossattn.decode.generate import translate
from crossattn.decode.greedy import OneByOne, Run
from crossattn.decode.hypotheses import Hypotheses
from crossattn.decode.target import Target
from crossattn.types import AnyArray, Array, Int, Key, Params


class Bucketed:
    """``translate`` under ``jax.jit``, for sources of any number and length.

    Rows, source lengths and target lengths are filled up to the next size that was named; rows that
    were added are done from the start, and no row gets longer than asked. Beyond the largest size, its
    multiples are taken.

    Args:
      build: makes the model.
      rows, sources, targets: sizes, ascending.
      draft: makes what guesses for ``speculative``, of the sources and their segments in the bucket's
        sizes and of the ``draft_params`` of the call: ``lambda source, *_: PromptLookup(source)``.
      **options: of ``translate``, the same for every call. ``limits`` belongs to the call.
    """

    def __init__(
        self,
        build: functional.Build,
        *,
        rows: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128),
        sources: Sequence[int] = (16, 32, 64, 128, 256, 512),
        targets: Sequence[int] = (16, 32, 64, 128, 256, 512),
        draft: Callable[[Array, Array, Any], Draft] | None = None,
        **options: Any,
    ):
        self.rows, self.sources, self.targets = tuple(rows), tuple(sources), tuple(targets)

        @partial(jax.jit, static_argnames="max_length")
        def search(params, source, segments, limits, key, draft_params, max_length):
            model = functional.bind(build, params)
            call: dict[str, Any] = dict(max_length=max_length, limits=limits, key=key, **options)
            if draft is not None:
                call["draft"] = draft(source, segments, draft_params)
            return translate(model, source, segments, **call)

        self._search = search
        self._stream = _Stream(build, options if draft is None else {**options, "draft": draft})

    def __call__(
        self,
        params: Params,
        source: Int[AnyArray, "B S"],
        source_segments: Int[AnyArray, "B S"] | None = None,
        *,
        max_length: int,
        key: Key[Array, ""] | None = None,
        draft_params: Params | None = None,
    ) -> Hypotheses:
        """What ``translate`` gives, [B J max_length], in arrays of numpy."""
        arrays, size = self._fill(source, source_segments, max_length)
        # Cut on the host, where another size is no other program.
        found = jax.device_get(self._search(params, *arrays, key, draft_params, max_length=size))
        B, S = source.shape
        weights = found.weights
        if weights is not None:
            weights = weights[:B, ..., :max_length, :S]
        tokens = found.tokens[:B, :, :max_length]
        return Hypotheses(tokens, found.scores[:B], found.lengths[:B], weights)

    def stream(
        self,
        params: Params,
        source: Int[AnyArray, "B S"],
        source_segments: Int[AnyArray, "B S"] | None = None,
        *,
        max_length: int,
        key: Key[Array, ""] | None = None,
        every: int = 1,
    ) -> Iterator[Int[np.ndarray, "B n"]]:
        """The tokens as they come, ``every`` at a time, greedy or drawn; rows that ended give padding.

        Raises:
          ValueError: the options ask for a search that does not go token by token.
        """
        arrays, size = self._fill(source, source_segments, max_length)
        for tokens in self._stream(params, *arrays, key, size, every):
            yield tokens[: source.shape[0]]

    @property
    def compilations(self) -> int:
        """How many buckets were compiled, of whole searches."""
        return self._search._cache_size()

    def _fill(self, source, segments, max_length: int):
        B, S = source.shape
        source, size = np.asarray(source), _size(max_length, self.targets)
        segments = np.ones((B, S), np.int32) if segments is None else np.asarray(segments)
        more = ((0, _size(B, self.rows) - B), (0, _size(S, self.sources) - S))
        limits = np.pad(np.full(B, max_length, np.int32), more[0])
        source, segments = (np.pad(x.astype(np.int32), more) for x in (source, segments))
        # A source of nothing but padding would be read as NaN by some kernels of other libraries.
        segments[B:, 0] = 1
        return (source, segments, limits), size


class _Stream:
    """The loop of ``OneByOne`` in pieces, each a call of one compiled function."""

    def __init__(self, build: functional.Build, options: dict[str, Any]):
        self.options = options
        steering = tuple(options.get("processors", ()))
        ids = {n: v for n, v in options.items() if n not in ("processors", "capture")}

        def loop(params, limits, key, max_length: int) -> tuple[Any, OneByOne]:
            model = functional.bind(build, params)
            target = Target(len(limits), max_length, limits, **ids)
            return model, OneByOne(model.step, target, steering, key=key)

        @partial(jax.jit, static_argnames="max_length")
        def begin(params, source, segments, limits, key, max_length):
            model, parts = loop(params, limits, key, max_length)
            return parts.begin(model.start(source, segments, 1, parts.target.room))

        @partial(jax.jit, static_argnames="max_length", donate_argnames="run")
        def go_on(params, run: Run, limits, key, until, max_length):
            _, parts = loop(params, limits, key, max_length)
            run = jax.lax.while_loop(
                lambda r: parts.unfinished(r) & (r.length < until), parts.advance, run
            )
            return run, parts.unfinished(run)

        self._begin, self._go_on = begin, go_on

    def __call__(self, params, source, segments, limits, key, max_length, every) -> Iterator:
        if others := self.options.keys() & {"beams", "candidates", "draft"}:
            raise ValueError(f"a stream has no {others.pop()}: it goes one token after the other.")
        if every < 1:
            raise ValueError(f"every is {every}; expected 1 or more tokens at a time.")
        run = self._begin(params, source, segments, limits, key, max_length=max_length)
        unfinished = bool(np.any(limits > 0))
        while unfinished:
            before = int(run.length)
            until = jnp.int32(before + every)
            run, more = self._go_on(params, run, limits, key, until, max_length=max_length)
            unfinished = bool(more)
            yield np.asarray(run.tokens)[:, 0, before : int(run.length)]


def _size(count: int, sizes: Sequence[int]) -> int:
    """The next size, or multiple of the largest."""
    place = bisect.bisect_left(sizes, count)
    return sizes[place] if place < len(sizes) else -(-count // sizes[-1]) * sizes[-1]
