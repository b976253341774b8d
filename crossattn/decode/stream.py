"""Tokens as they come: the loop of ``OneByOne`` in pieces, each a call of one compiled function."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossattn import functional
from crossattn.decode.config import GenerationConfig
from crossattn.decode.search.greedy import OneByOne, Run
from crossattn.nn.readied import for_decoding, in_compute_dtype
from crossattn.types import Array, Float, Int, Key, Params

Tokens = Int[np.ndarray, "B n"]
Weights = Float[np.ndarray, "B M N n S"]
Piece = Tokens | tuple[Tokens, Weights]
"""New tokens; or, where attention is captured, they and their weights."""

_ALONE = {"num_beams": 1, "candidates": 1, "draft": None}


class Stream:
    """Greedy decoding or sampling, a piece at a time.

    Args:
      build: makes the model.
      options: of ``generate``, the same for every call.
    """

    def __init__(self, build: functional.Build, options: dict[str, Any]):
        options = {name: x for name, x in options.items() if name != "length_penalty"}
        self.others = [name for name, one in _ALONE.items() if options.pop(name, one) != one]
        processors, capture = tuple(options.pop("processors", ())), options.pop("capture", None)

        def loop(params, inputs, limits, key, max_new_tokens: int) -> tuple[Any, OneByOne]:
            model = for_decoding(functional.bind(build, params))
            config = GenerationConfig(
                len(limits), max_new_tokens, limits, **options, **inputs.config()
            )
            return model, OneByOne(model.decode_step, config, processors, capture, key)

        @partial(jax.jit, static_argnames="max_new_tokens")
        def begin(params, inputs, limits, key, max_new_tokens):
            model, parts = loop(params, inputs, limits, key, max_new_tokens)
            return parts.begin(inputs.prefill(model, parts.config.cache_length))

        @partial(jax.jit, static_argnames="max_new_tokens", donate_argnames="run")
        def go_on(params, run: Run, inputs, limits, key, until, max_new_tokens):
            _, parts = loop(params, inputs, limits, key, max_new_tokens)
            run = jax.lax.while_loop(
                lambda r: parts.unfinished(r) & (r.length < until), parts.advance, run
            )
            return run, parts.unfinished(run)

        # Once a stream: each piece is a program of its own, which would read and round all weights again.
        cast = jax.jit(lambda p: functional.params_of(in_compute_dtype(functional.bind(build, p))))
        self._cast, self._begin, self._go_on = cast, begin, go_on

    def __call__(
        self,
        params: Params,
        inputs: Any,
        limits: Int[np.ndarray, " B"],
        key: Key[Array, ""] | None,
        max_new_tokens: int,
        every: int,
    ) -> Iterator[tuple[Tokens, Weights | None]]:
        """Tokens and captured attention, ``every`` tokens at a time.

        Args:
          inputs: arrays that say what they are by ``config()`` and ``prefill(model, cache_length)``.

        Raises:
          ValueError: the options ask for a search that does not go token by token.
        """
        if self.others:
            raise ValueError(
                f"a stream has no {self.others[0]}: it goes one token after the other."
            )
        if every < 1:
            raise ValueError(f"every is {every}; expected 1 or more tokens at a time.")
        params = self._cast(params)
        run = self._begin(params, inputs, limits, key, max_new_tokens=max_new_tokens)
        start, unfinished = int(run.length), bool(np.any(limits > 0))
        before = start
        while unfinished:
            until = jnp.int32(before + every)
            run, more = self._go_on(
                params, run, inputs, limits, key, until, max_new_tokens=max_new_tokens
            )
            unfinished, now = bool(more), int(run.length)
            tokens = np.asarray(run.tokens)[:, 0, before:now]
            yield tokens, _weights(run, before - start, now - start)
            before = now


def _weights(run: Run, begin: int, end: int) -> Weights | None:
    """Captured attention of some of the generated tokens; 0 for padding."""
    if run.weights is None:
        return None
    own = np.asarray(run.weights)[:, 0, begin:end]
    real = np.arange(begin, end) < np.asarray(run.lengths)[:, None]
    return np.moveaxis(np.where(real[..., None, None, None], own, 0), 1, 3)
