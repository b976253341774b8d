"""Counted n-grams, a baseline of models of tokens: they read the tokens before a token, and nothing else."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

Texts = Sequence[Int[np.ndarray, " n"]]


def surprises(
    train: Texts, other: Texts, order: int, vocab_size: int
) -> list[Float[np.ndarray, " n"]]:
    """Returns -log p of each token of the other texts under n-grams of 1, 2, ... ``order`` tokens.

    Raises:
      ValueError: the vocabulary is too large for n-grams of that order.
    """
    return window_surprises(train, other, [(n, 0) for n in range(order)], vocab_size)


def window_surprises(
    train: Texts,
    other: Texts,
    windows: Sequence[tuple[int, int]],
    vocab_size: int,
    seen: Texts | None = None,
) -> list[Float[np.ndarray, " n"]]:
    """Returns -log p of each token given tokens on both sides, under growing windows.

    p(w | h) = (c(h w) + t(h) p(w | h')) / (c(h) + t(h)), where h is the window, t(h) counts the kinds of
    tokens in it, and h' is the window before in the list.

    Args:
      train, other: texts whose tokens are counted, and predicted.
      windows: numbers of tokens read on the left and on the right, (0, 0) first.
      vocab_size: V.
      seen: the other texts as they are read, with masked tokens replaced; None reads them whole.

    Raises:
      ValueError: the vocabulary is too large for n-grams of that order.

    Source: Witten and Bell 1991, method C; Chen and Goodman 1998, section 2.6.
    """
    order = 1 + max(left + right for left, right in windows)
    bits = 63 // order  # of an id, so that an n-gram fits into an int64
    if vocab_size > 1 << bits:
        raise ValueError(
            f"order is {order}, of {vocab_size} kinds of tokens; expected {1 << bits} at most: take a "
            "smaller order."
        )
    p, found = np.full(sum(map(len, other)), 1 / vocab_size), []
    for window in windows:
        grams, counts = np.unique(_grams(train, train, window, bits), return_counts=True)
        contexts, starts = np.unique(grams >> bits, return_index=True)
        totals = np.add.reduceat(counts, starts)
        kinds = np.diff(np.append(starts, len(grams)))
        here = _grams(other, other if seen is None else seen, window, bits)
        count = _looked_up(grams, counts, here)
        total = _looked_up(contexts, totals, here >> bits)
        kind = _looked_up(contexts, kinds, here >> bits)
        p = np.where(total > 0, (count + kind * p) / np.maximum(total + kind, 1), p)
        found.append(-np.log(p))
    return found


LEFT = tuple((n, 0) for n in range(6))
"""Windows of the tokens before a token."""

BOTH_SIDES = ((0, 0), (1, 0), (1, 1), (2, 1), (2, 2), (3, 2), (3, 3))
"""Windows of the tokens around a masked token."""


def countable(windows: Sequence[tuple[int, int]], vocab_size: int) -> Sequence[tuple[int, int]]:
    """Returns the windows whose n-grams of such a vocabulary can be counted."""
    bits = (vocab_size - 1).bit_length()
    return [window for window in windows if (1 + sum(window)) * bits <= 63]


def _grams(texts: Texts, seen: Texts, window: tuple[int, int], bits: int) -> np.ndarray:
    """Each token, below those around it, as one number; beside a text are ids of 0."""
    left, right = window
    found = []
    for text, own in zip(texts, seen, strict=True):
        padded = np.concatenate([np.zeros(left, np.int64), own, np.zeros(right, np.int64)])
        offsets = [*range(left), *range(left + 1, left + 1 + right)]
        around = np.zeros(len(text), np.int64)
        for offset in offsets:
            around = around << bits | padded[offset : offset + len(text)]
        found.append(around << bits | text)
    return np.concatenate(found)


def _looked_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Returns the values of the wanted keys, 0 for those that are missing."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
