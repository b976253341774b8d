"""Decoding of arrays of any size, with one compile for each bucket of sizes; and its stream of tokens."""

import bisect
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from crossattn import functional
from crossattn.decode.config import GenerationConfig, right_aligned
from crossattn.decode.generate import Source, check_source, generate
from crossattn.decode.hypotheses import Hypotheses
from crossattn.decode.search.greedy import OneByOne, Progress
from crossattn.nn.readied import for_decoding, in_compute_dtype
from crossattn.types import AnyArray, Float, Int, Key, Params

Limits = Int[AnyArray, "..."] | Sequence[int] | int | None
"""The most tokens of each row, [B], or of all."""

Prompts = Sequence[Sequence[int]] | Int[AnyArray, "B P"]

NewTokens = Int[np.ndarray, "B n"] | tuple[Int[np.ndarray, "B n"], Float[np.ndarray, "B M N n S"]]
"""Tokens of a stream; where attention is captured, they and their weights."""

_OF_CALLS = ("max_new_tokens", "limits", "key")
_ALONE = {"num_beams": 1, "candidates": 1}


class _Filled(NamedTuple):
    """One call in a bucket's sizes: what ``prefill`` reads, the prompts, limits; and the rows asked for."""

    reads: dict[str, Any]
    prefix: dict[str, Any]
    limits: Int[np.ndarray, " B"]
    max_new_tokens: int
    rows: int


class Bucketed:
    """``generate`` under ``jax.jit``, for sources or prompts of any number and length.

    Rows, lengths of sources or prompts, and target lengths are filled up to the next size that was named,
    or to what the model has positions for; rows that were added are done from the start, and no row gets
    longer than asked. Beyond the largest size, its multiples are taken. Frames, to which silence would be
    something to hear, keep their number: only rows are added to them.

        hypotheses = Bucketed(build)(params, source, (source != pad_id).astype(int), max_new_tokens=60)
        hypotheses = Bucketed(build)(params, prompts=[[5, 7, 9], [4]], max_new_tokens=60)

    Args:
      build: makes the model.
      batch_sizes, source_lengths, target_lengths: ascending; prompts have the lengths of sources.
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
        **options: Any,
    ):
        if wrong := [name for name in _OF_CALLS if name in options]:
            raise ValueError(f"{wrong[0]} is an option of Bucketed; give it to each call instead.")
        self.batch_sizes, self.source_lengths = tuple(batch_sizes), tuple(source_lengths)
        self.target_lengths = tuple(target_lengths)
        self._build, self._options = build, options

        @partial(jax.jit, static_argnames="max_new_tokens")
        def search(params, reads, prefix, limits, key, max_new_tokens):
            call = dict(batch=len(limits), max_new_tokens=max_new_tokens, limits=limits, key=key)
            model = functional.bind(build, params)
            return generate(model, inputs=reads, **call, **prefix, **options)

        self._search = search

    def __call__(
        self,
        params: Params,
        source: Source | None = None,
        source_segment_ids: Int[AnyArray, "B S"] | None = None,
        *,
        max_new_tokens: int,
        prompts: Prompts | None = None,
        limits: Limits = None,
        key: Key[AnyArray, "*#B"] | None = None,
    ) -> Hypotheses:
        """What ``generate`` gives, [B J max_new_tokens], in arrays of numpy.

        Args:
          source, source_segment_ids: of an encoder-decoder, as in ``generate``.
          prompts: of any lengths, each continued as if it were alone.
          limits: the most tokens of each row, where they are fewer than ``max_new_tokens``.

        Raises:
          ValueError: there is neither a source nor a prompt, or as ``generate`` does.
        """
        filled = self._filled(source, source_segment_ids, prompts, max_new_tokens, limits)
        arrays, size = filled[:3], filled.max_new_tokens
        found = jax.device_get(self._search(params, *arrays, key, max_new_tokens=size))
        # Cut on the host, where another size is no other program.
        B, T = filled.rows, max_new_tokens
        weights = None if found.weights is None else found.weights[:B, ..., :T, :]
        weights = _of_source(weights, source)
        return Hypotheses(found.tokens[:B, :, :T], found.scores[:B], found.lengths[:B], weights)

    def stream(
        self,
        params: Params,
        source: Source | None = None,
        source_segment_ids: Int[AnyArray, "B S"] | None = None,
        *,
        max_new_tokens: int,
        prompts: Prompts | None = None,
        limits: Limits = None,
        key: Key[AnyArray, "*#B"] | None = None,
        every: int = 1,
    ) -> Iterator[NewTokens]:
        """The tokens [B n] as they come, ``every`` at a time, greedy or drawn; rows that ended give padding.

        With a ``capture``, pairs: tokens, and the weights [B M N n S] of the steps that predicted them.

        Raises:
          ValueError: the options ask for a search that does not go token by token.
        """
        if others := [name for name, one in _ALONE.items() if self._options.get(name, one) != one]:
            raise ValueError(f"a stream has no {others[0]}: it goes one token after the other.")
        if self._options.get("draft") is not None:
            raise ValueError("a stream has no draft: it goes one token after the other.")
        if every < 1:
            raise ValueError(f"every is {every}; expected 1 or more tokens at a time.")
        filled = self._filled(source, source_segment_ids, prompts, max_new_tokens, limits)
        arrays, size = filled[:3], filled.max_new_tokens
        cast, begin, go_on = self._pieces
        # Once a stream: each piece is a program of its own, which would read and round all weights again.
        params = cast(params)
        loop = begin(params, *arrays, key, max_new_tokens=size)
        start = before = int(loop.length)
        unfinished = bool(np.any(filled.limits > 0))
        while unfinished:
            until = jnp.int32(before + every)
            loop, more = go_on(params, loop, *arrays, key, until, max_new_tokens=size)
            unfinished, now = bool(more), int(loop.length)
            tokens = np.asarray(loop.tokens)[: filled.rows, 0, before:now]
            weights = _of_source(_weights(loop, before - start, now - start), source)
            yield tokens if weights is None else (tokens, weights[: filled.rows])
            before = now

    @cached_property
    def _pieces(self) -> tuple[Any, Any, Any]:
        """The programs of a stream: weights made ready, the beginning, and the tokens up to a length."""
        left_out = (*_ALONE, "length_penalty", "processors", "capture", "draft")
        options = {name: x for name, x in self._options.items() if name not in left_out}
        own = tuple(self._options.get("processors", ())), self._options.get("capture")

        def parts(params, prefix, limits, key, max_new_tokens: int) -> tuple[Any, OneByOne]:
            model = for_decoding(functional.bind(self._build, params))
            config = GenerationConfig(len(limits), max_new_tokens, limits, **options, **prefix)
            return model, OneByOne(model.decode_step, config, *own, key)

        @partial(jax.jit, static_argnames="max_new_tokens")
        def begin(params, reads, prefix, limits, key, max_new_tokens):
            model, loop = parts(params, prefix, limits, key, max_new_tokens)
            return loop.begin(model.prefill(len(limits), 1, loop.config.cache_length, **reads))

        @partial(jax.jit, static_argnames="max_new_tokens", donate_argnames="state")
        def go_on(params, state: Progress, reads, prefix, limits, key, until, max_new_tokens):
            _, loop = parts(params, prefix, limits, key, max_new_tokens)
            state = jax.lax.while_loop(
                lambda s: loop.unfinished(s) & (s.length < until), loop.advance, state
            )
            return state, loop.unfinished(state)

        def cast(params):
            return functional.params_of(in_compute_dtype(functional.bind(self._build, params)))

        return jax.jit(cast), begin, go_on

    @cached_property
    def _known(self) -> tuple[int | None, int | None, int | None]:
        """The longest source and the longest text that the model has positions for, and its padding."""
        model: Any = nnx.eval_shape(lambda: self._build(nnx.Rngs(0)))
        source, target = getattr(model, "longest", (None, None))
        read_last = self._options.get("candidates", 1) > 1
        return source, target and target - read_last, getattr(model, "pad_id", None)

    def _filled(
        self, source: Any, segment_ids: Any, prompts: Any, max_new_tokens: int, limits: Any
    ) -> _Filled:
        if source is None and prompts is None:
            raise ValueError("got neither a source nor prompts; expected one of them.")
        B, longest = len(prompts if source is None else source), self._known[1]
        given = np.minimum(max_new_tokens if limits is None else limits, max_new_tokens)
        if given.shape not in ((), (B,)):
            raise ValueError(f"limits has shape {given.shape}; expected [] or [B] = [{B}].")
        more = _size(B, self.batch_sizes) - B
        reads = {} if source is None else self._source(np.asarray(source), segment_ids, more)
        start = np.atleast_1d(self._options.get("prefix", 0)).shape[-1]
        prefix: dict[str, Any] = {}
        if prompts is not None:
            if "prefix" in self._options:
                raise ValueError(
                    "prefix is an option of this Bucketed; leave it out: prompts are prefixes."
                )
            rows = [np.asarray(row).tolist() for row in prompts]
            room = None if longest is None else longest - max_new_tokens + 1
            start = _size(max(map(len, rows)), self.source_lengths, room)
            tokens, lengths = right_aligned(rows + [[0]] * more, start)
            prefix = dict(prefix=tokens, prefix_lengths=lengths)
        room = None if longest is None else longest - start + 1
        own = np.pad(np.broadcast_to(given, B).astype(np.int32), (0, more))
        size = _size(max_new_tokens, self.target_lengths, room)
        return _Filled(reads, prefix, own, size, B)

    def _source(self, source: Any, segment_ids: Any, more: int) -> dict[str, Any]:
        """A source and its segments with rows, and of tokens the length, filled up."""
        segment_ids = None if segment_ids is None else np.asarray(segment_ids)
        check_source(source, segment_ids)
        longest, _, pad_id = self._known
        (B, S), added = source.shape[:2], 0
        if np.issubdtype(source.dtype, np.integer):
            source, added = source.astype(np.int32), _size(S, self.source_lengths, longest) - S
            if segment_ids is None:
                segment_ids = np.ones((B, S)) if pad_id is None else source != pad_id
        source = np.pad(source, ((0, more), (0, added), *((0, 0),) * (source.ndim - 2)))
        if segment_ids is None:
            return dict(source=source)
        segment_ids = np.pad(segment_ids.astype(np.int32), ((0, more), (0, added)))
        # Nothing but padding would be read as NaN by some kernels of other libraries.
        segment_ids[B:, 0] = 1
        return dict(source=source, source_segment_ids=segment_ids)


def _of_source(weights: Any, source: Any) -> Any:
    """Attention [... S] to the tokens of a source alone, without those that fill it up."""
    if weights is None or source is None or np.ndim(source) != 2:
        return weights
    return weights[..., : np.shape(source)[1]]


def _weights(loop: Progress, begin: int, end: int) -> Float[np.ndarray, "B M N n S"] | None:
    """Captured attention of some of the generated tokens; 0 for padding."""
    if loop.weights is None:
        return None
    own = np.asarray(loop.weights)[:, 0, begin:end]
    real = np.arange(begin, end) < np.asarray(loop.lengths)[:, None]
    return np.moveaxis(np.where(real[..., None, None, None], own, 0), 1, 3)


def _size(count: int, sizes: Sequence[int], longest: int | None = None) -> int:
    """The next size, or multiple of the largest; no more than ``longest``, unless there are more already."""
    index = bisect.bisect_left(sizes, count)
    size = sizes[index] if index < len(sizes) else -(-count // sizes[-1]) * sizes[-1]
    return size if longest is None else max(count, min(size, longest))
