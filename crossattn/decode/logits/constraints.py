"""Logits processors that forbid tokens, repetitions or lengths."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from crossattn.decode.logits.processors import Context, LogitsProcessor
from crossattn.types import AnyArray, Array, Bool, Float, Int

Tokens = int | Sequence[int] | AnyArray


def ban(tokens: Tokens) -> LogitsProcessor:
    """Forbids tokens."""
    ids = _ids(tokens)
    return lambda logits, context: logits.at[ids].set(-jnp.inf)


def ban_first(tokens: Tokens) -> LogitsProcessor:
    """Forbids tokens at the first step, such as Whisper's blank and end."""
    ids = _ids(tokens)

    def process(logits, context: Context):
        return jnp.where(context.generated == 0, logits.at[ids].set(-jnp.inf), logits)

    return process


def allow(tokens: Tokens) -> LogitsProcessor:
    """Forbids all tokens but these, among which the end must be if it may come."""
    ids = _ids(tokens)
    return lambda logits, context: _only(jnp.zeros(logits.shape, bool).at[ids].set(True), logits)


def allow_where(allowed: Bool[AnyArray, "*B #T V"]) -> LogitsProcessor:
    """Allows the tokens of a table at each step: [T V], or [B T V] for each row; its last step repeats."""
    table = jnp.asarray(allowed)

    def process(logits, context: Context):
        own = table if table.ndim == 2 else table[context.row]
        return _only(own[jnp.minimum(context.generated, own.shape[0] - 1)], logits)

    return process


def ban_ngrams(ngrams: Sequence[Sequence[int]]) -> LogitsProcessor:
    """Forbids sequences of tokens."""
    if empty := [ngram for ngram in ngrams if not len(ngram)]:
        raise ValueError(f"ban_ngrams: got {empty[0]!r}; expected at least one token in each.")

    def process(logits, context: Context):
        for *before, last in ngrams:
            known = _last(context, len(before))
            complete = jnp.all(known == jnp.asarray(before, jnp.int32))
            complete = complete & (context.length >= len(before))
            logits = logits.at[last].add(jnp.where(complete, -jnp.inf, 0))
        return logits

    return process


def no_repeat_ngram(size: int) -> LogitsProcessor:
    """Forbids to repeat any sequence of ``size`` tokens, those of the prefix included.

    Source: Paulus et al. 2018, section 2.5 (trigrams).
    """
    if size < 1:
        raise ValueError(f"no_repeat_ngram: size is {size}; expected 1 or more.")

    def process(logits, context: Context):
        tokens, X, V = context.tokens, context.tokens.shape[0], logits.shape[-1]
        last = _last(context, size - 1)
        windows = jnp.arange(X)[:, None] + jnp.arange(size)
        known = windows[:, -1] < context.length
        windows = tokens[jnp.minimum(windows, X - 1)]
        same = known & jnp.all(windows[:, :-1] == last, axis=-1)
        same = same & (context.length >= size - 1)
        return logits.at[jnp.where(same, windows[:, -1], V)].set(-jnp.inf, mode="drop")

    return process


def min_new_tokens(length: Any, eos_id: Tokens) -> LogitsProcessor:
    """Forbids the end before ``length`` other tokens; one number, or one for each row [B]."""
    ends = _ids(eos_id)

    def process(logits, context: Context):
        early = context.generated < _of_row(length, context)
        return logits.at[ends].add(jnp.where(early, -jnp.inf, 0))

    return process


def max_new_tokens(length: Any, eos_id: int) -> LogitsProcessor:
    """Forces the end as token ``length`` at the latest; one number, or one for each row [B]."""

    def process(logits, context: Context):
        full = context.generated >= _of_row(length, context) - 1
        return jnp.where(full, _forced(eos_id, logits), logits)

    return process


def force(tokens: dict[int, int]) -> LogitsProcessor:
    """Forces tokens ``{n: token}``, n counted from 0, with log-probability 0."""

    def process(logits, context: Context):
        for index, token in tokens.items():
            logits = jnp.where(context.generated == index, _forced(token, logits), logits)
        return logits

    return process


def _ids(tokens: Tokens) -> Int[Array, " n"]:
    return jnp.atleast_1d(jnp.asarray(tokens, jnp.int32))


def _forced(token: int, logits: Float[Array, " V"]) -> Float[Array, " V"]:
    return jnp.where(jnp.arange(logits.shape[-1]) == token, 0.0, -jnp.inf)


def _only(allowed: Bool[Array, " V"], logits: Float[Array, " V"]) -> Float[Array, " V"]:
    return jnp.where(allowed, logits, -jnp.inf)


def _last(context: Context, count: int) -> Array:
    """Returns the last tokens, [count]; if there are fewer, the caller compares lengths."""
    positions = context.length - count + jnp.arange(count)
    return context.tokens[jnp.maximum(positions, 0)]


def _of_row(length: Any, context: Context) -> Any:
    length = jnp.asarray(length)
    return length if length.ndim == 0 else length[context.row]
