"""Decoding of arrays of any size, compiled once for each bucket of sizes, and its stream of tokens."""

import bisect
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any

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
"""Largest number of tokens of each row, [B], or of all."""

Prompts = Sequence[Sequence[int]] | Int[AnyArray, "B P"]

NewTokens = Int[np.ndarray, "B n"] | tuple[Int[np.ndarray, "B n"], Float[np.ndarray, "B M N n S"]]
"""Tokens of a stream; with a ``Capture``, they and their weights."""

_OF_CALLS = ("max_new_tokens", "limits", "key")
_NOT_STREAMED = {"num_beams": 1, "candidates": 1, "draft": None}


class Bucketed:
    """``generate`` under ``jax.jit``, for sources or prompts of any number and length.

    Rows, lengths of sources or prompts, and target lengths are padded to the next size, a multiple of the
    largest beyond it, or the model's number of positions. Added rows are done from the start. Frames keep
    their number, since silence is heard: only rows are added to them.

        hypotheses = Bucketed(build)(params, source, (source != pad_id).astype(int), max_new_tokens=60)
        hypotheses = Bucketed(build)(params, prompts=[[5, 7, 9], [4]], max_new_tokens=60)

    Args:
      build: makes the model.
      batch_sizes, source_lengths, target_lengths: ascending; ``source_lengths`` are those of prompts too.
      **options: of ``generate``, the same for every call.

    Raises:
      ValueError: an option belongs to calls: ``max_new_tokens``, ``limits``, ``key``.
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
        """Generates as ``generate`` does, [B J max_new_tokens], into numpy arrays.

        Args:
          source, source_segment_ids: of an encoder-decoder, as in ``generate``.
          prompts: of any lengths, each continued independently.
          limits: largest number of tokens of each row, at most ``max_new_tokens``.
          key: as in ``generate``.

        Raises:
          ValueError: there is neither a source nor a prompt, or as ``generate`` does.
        """
        call = dict(max_new_tokens=max_new_tokens, prompts=prompts, limits=limits)
        arrays, size, (B, S) = self._padded(source, source_segment_ids, **call)
        key = _of_rows(key, B, len(arrays[-1]))
        found = jax.device_get(self._search(params, *arrays, key, max_new_tokens=size))
        T = max_new_tokens  # cut on the host: on the device each size would be another program
        weights = None if found.weights is None else found.weights[:B, ..., :T, :S]
        return Hypotheses(found.tokens[:B, :, :T], found.scores[:B], found.lengths[:B], weights)

    def stream(
        self,
        params: Params,
        *source: Any,
        every: int = 1,
        key: Key[AnyArray, "*#B"] | None = None,
        **call: Any,
    ) -> Iterator[NewTokens]:
        """Yields the tokens [B n] of a call, greedy or drawn; ended rows get padding.

        With a ``capture``, yields pairs: tokens, and the weights [B M N n S] of their steps.

        Args:
          every: number of tokens at a time.
          *source, key, **call: arguments of a call.

        Raises:
          ValueError: the options ask for a search that does not go token by token, or as a call does.
        """
        for name, alone in _NOT_STREAMED.items():
            if self._options.get(name, alone) != alone:
                raise ValueError(f"a stream has no {name}: it goes one token after the other.")
        if every < 1:
            raise ValueError(f"every is {every}; expected 1 or more tokens at a time.")
        arrays, size, (B, S) = self._padded(*source, **call)
        cast, begin, go_on = self._pieces
        key = _of_rows(key, B, len(arrays[-1]))
        # Once a stream, since each call of ``go_on`` would round all weights again.
        params = cast(params)
        loop = begin(params, *arrays, key, max_new_tokens=size)
        start = before = int(loop.length)
        unfinished = bool(np.any(arrays[-1] > 0))
        while unfinished:
            until = jnp.int32(before + every)
            loop, more = go_on(params, loop, *arrays, key, until, max_new_tokens=size)
            unfinished, now = bool(more), int(loop.length)
            tokens = np.asarray(loop.tokens)[:B, 0, before:now]
            weights = _weights(loop, before - start, now - start)
            yield tokens if weights is None else (tokens, weights[:B, ..., :S])
            before = now

    @cached_property
    def _pieces(self) -> tuple[Any, Any, Any]:
        """Compiled parts of a stream: the cast of weights, the beginning, the tokens up to a length."""
        left_out = (*_NOT_STREAMED, "length_penalty", "processors", "rules", "capture")
        options = {name: x for name, x in self._options.items() if name not in left_out}
        processors, rules = (tuple(self._options.get(name, ())) for name in ("processors", "rules"))
        capture = self._options.get("capture")

        def parts(params, prefix, limits, key, max_new_tokens: int) -> tuple[Any, OneByOne]:
            model = for_decoding(functional.bind(self._build, params))
            config = GenerationConfig(len(limits), max_new_tokens, limits, **options, **prefix)
            return model, OneByOne(model.decode_step, config, processors, capture, key, rules)

        @partial(jax.jit, static_argnames="max_new_tokens")
        def begin(params, reads, prefix, limits, key, max_new_tokens):
            model, loop = parts(params, prefix, limits, key, max_new_tokens)
            return loop.begin(model.prefill(len(limits), 1, loop.config.cache_length, **reads))

        @partial(jax.jit, static_argnames="max_new_tokens", donate_argnames="state")
        def go_on(params, state: Progress, reads, prefix, limits, key, until, max_new_tokens):
            _, loop = parts(params, prefix, limits, key, max_new_tokens)
            state = jax.lax.while_loop(
                lambda s: s.unfinished() & (s.length < until), loop.advance, state
            )
            return state, state.unfinished()

        def cast(params):
            return functional.params_of(in_compute_dtype(functional.bind(self._build, params)))

        return jax.jit(cast), begin, go_on

    @cached_property
    def _known(self) -> tuple[int | None, int | None, int | None]:
        """Largest lengths of a source and of a text that the model has positions for, and its ``pad_id``."""
        model: Any = nnx.eval_shape(lambda: self._build(nnx.Rngs(0)))
        source, target = getattr(model, "longest", (None, None))
        read_last = self._options.get("candidates", 1) > 1
        return source, target and target - read_last, getattr(model, "pad_id", None)

    def _padded(
        self, source=None, source_segment_ids=None, *, max_new_tokens, prompts=None, limits=None
    ) -> tuple[tuple[dict[str, Any], dict[str, Any], Int[np.ndarray, " B"]], int, tuple[Any, Any]]:
        """Pads a call to its bucket: inputs of ``prefill``, prefix and limits; target length; own B and S."""
        rows = prompts if source is None else source
        if rows is None:
            raise ValueError("got neither a source nor prompts; expected one of them.")
        B, longest = len(rows), self._known[1]
        shape = () if source is None else np.shape(source)
        S = shape[1] if len(shape) == 2 else None  # frames are not padded
        given = np.minimum(max_new_tokens if limits is None else limits, max_new_tokens)
        if given.shape not in ((), (B,)):
            raise ValueError(f"limits has shape {given.shape}; expected [] or [B] = [{B}].")
        more = _size(B, self.batch_sizes) - B
        reads = {} if source is None else self._source(np.asarray(source), source_segment_ids, more)
        start = np.atleast_1d(self._options.get("prefix", 0)).shape[-1]
        prefix: dict[str, Any] = {}
        if prompts is not None:
            if "prefix" in self._options:
                raise ValueError(
                    "prefix is an option of this Bucketed; leave it out: prompts are prefixes."
                )
            texts = [np.asarray(row).tolist() for row in prompts]
            room = None if longest is None else longest - max_new_tokens + 1
            start = _size(max(map(len, texts)), self.source_lengths, room)
            tokens, lengths = right_aligned(texts + [[0]] * more, start)
            prefix = dict(prefix=tokens, prefix_lengths=lengths)
        room = None if longest is None else longest - start + 1
        own = np.pad(np.broadcast_to(given, B).astype(np.int32), (0, more))
        return (reads, prefix, own), _size(max_new_tokens, self.target_lengths, room), (B, S)

    def _source(self, source: Any, segment_ids: Any, more: int) -> dict[str, Any]:
        """Pads the rows of a source and its segments, and the length of tokens."""
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
        # Some kernels of other libraries give NaN for a row of padding alone.
        segment_ids[B:, 0] = 1
        return dict(source=source, source_segment_ids=segment_ids)


def _of_rows(key: Any, rows: int, padded: int) -> Any:
    """Returns a key for each row of a bucket, whose last rows are not the caller's; or the one of all."""
    if key is None or key.shape != (rows,) or padded == rows:
        return key
    return key[jnp.minimum(jnp.arange(padded), rows - 1)]


def _weights(loop: Progress, begin: int, end: int) -> Float[np.ndarray, "B M N n S"] | None:
    """Returns the captured attention of some of the generated tokens; 0 for padding."""
    if loop.weights is None:
        return None
    own = np.asarray(loop.weights)[:, 0, begin:end]
    real = np.arange(begin, end) < np.asarray(loop.lengths)[:, None]
    return np.moveaxis(np.where(real[..., None, None, None], own, 0), 1, 3)


def _size(count: int, sizes: Sequence[int], longest: int | None = None) -> int:
    """Returns the next size, or multiple of the largest; ``longest`` limits what is added."""
    index = bisect.bisect_left(sizes, count)
    size = sizes[index] if index < len(sizes) else -(-count // sizes[-1]) * sizes[-1]
    return size if longest is None else max(count, min(size, longest))
