"""Logits processors that forbid: tokens, repetitions, lengths. Combine any number of them in one list."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from crossattn.decode.config import token_ids
from crossattn.decode.logits.processors import Context, LogitsProcessor
from crossattn.types import AnyArray, Array, Bool, Float

Tokens = int | Sequence[int] | AnyArray


def ban(tokens: Tokens) -> LogitsProcessor:
    """These tokens never come."""
    ids = token_ids(tokens)
    return lambda logits, context: logits.at[ids].set(-jnp.inf)


def ban_first(tokens: Tokens) -> LogitsProcessor:
    """These tokens do not come first, as Whisper's blank and end do not."""
    ids = token_ids(tokens)

    def process(logits, context: Context):
        return jnp.where(context.generated == 0, logits.at[ids].set(-jnp.inf), logits)

    return process


def allow(tokens: Tokens) -> LogitsProcessor:
    """Only these tokens, the end among them if it may come."""
    ids = token_ids(tokens)

    def process(logits, context: Context):
        return _only(jnp.zeros(logits.shape, bool).at[ids].set(True), logits)

    return process


def allow_where(allowed: Bool[AnyArray, "*B #T V"]) -> LogitsProcessor:
    """A table of what may come at each step: [T V], or [B T V] for each row; its last step stays.

    With T = 1 it is the same vocabulary at every step.
    """
    table = jnp.asarray(allowed)

    def process(logits, context: Context):
        own = table if table.ndim == 2 else table[context.row]
        return _only(own[jnp.minimum(context.generated, own.shape[0] - 1)], logits)

    return process


def ban_ngrams(ngrams: Sequence[Sequence[int]]) -> LogitsProcessor:
    """None of these sequences of tokens is ever completed."""
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
    """No sequence of ``size`` tokens comes twice, those of the prefix included.

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
    """At least so many tokens, the end not counted; one number, or one for each row [B]."""
    ends = token_ids(eos_id)

    def process(logits, context: Context):
        early = context.generated < _of_row(length, context)
        return logits.at[ends].add(jnp.where(early, -jnp.inf, 0))

    return process


def max_new_tokens(length: Any, eos_id: int) -> LogitsProcessor:
    """At most so many tokens, the end included, which comes last; one number, or one a row [B]."""

    def process(logits, context: Context):
        full = context.generated >= _of_row(length, context) - 1
        return jnp.where(full, _forced(eos_id, logits), logits)

    return process


def force(tokens: dict[int, int]) -> LogitsProcessor:
    """``{n: token}``: the n-th generated token, from 0. It costs a beam nothing, being no choice."""

    def process(logits, context: Context):
        for index, token in tokens.items():
            logits = jnp.where(context.generated == index, _forced(token, logits), logits)
        return logits

    return process


def _forced(token: int, logits: Float[Array, " V"]) -> Float[Array, " V"]:
    return jnp.where(jnp.arange(logits.shape[-1]) == token, 0.0, -jnp.inf)


def _only(allowed: Bool[Array, " V"], logits: Float[Array, " V"]) -> Float[Array, " V"]:
    return jnp.where(allowed, logits, -jnp.inf)


def _last(context: Context, count: int) -> Array:
    """The last tokens, [count]; where there are fewer, the caller compares lengths."""
    positions = context.length - count + jnp.arange(count)
    return context.tokens[jnp.maximum(positions, 0)]


def _of_row(length: Any, context: Context) -> Any:
    length = jnp.asarray(length)
    return length if length.ndim == 0 else length[context.row]
