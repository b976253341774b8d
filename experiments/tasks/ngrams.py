"""Counted n-grams: the baseline of a model of tokens.

An n-gram reads what stands before a token, and nothing else; a model that reads a
source, a picture or a sound beside it, or both sides of a hole, has more to go by.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

Texts = Sequence[Int[np.ndarray, " n"]]


def surprises(
    train: Texts, other: Texts, order: int, vocab_size: int
) -> list[Float[np.ndarray, " n"]]:
    """-log p of each token of the other texts under n-grams of 1, 2, ... ``order`` tokens.

    p(w | h) = (c(h w) + t(h) p(w | h')) / (c(h) + t(h)), where t(h) counts the kinds of tokens after h, and
    h' is h without its first token.

    Raises:
      ValueError: there are too many kinds of tokens for n-grams of that order to be counted.

    Source: Witten and Bell 1991, method C; Chen and Goodman 1998, section 2.6.
    """
    bits = 63 // order  # of an id, so that an n-gram fits into an int64
    if vocab_size > 1 << bits:
        raise ValueError(
            f"order is {order}, of {vocab_size} kinds of tokens; expected {1 << bits} at most: take a "
            "smaller order."
        )
    p, found = np.full(sum(map(len, other)), 1 / vocab_size), []
    for n in range(1, order + 1):
        grams, counts = np.unique(_grams(train, n, bits), return_counts=True)
        contexts, starts = np.unique(grams >> bits, return_index=True)
        totals = np.add.reduceat(counts, starts)
        kinds = np.diff(np.append(starts, len(grams)))
        here = _grams(other, n, bits)
        count = _looked_up(grams, counts, here)
        total = _looked_up(contexts, totals, here >> bits)
        kind = _looked_up(contexts, kinds, here >> bits)
        p = np.where(total > 0, (count + kind * p) / np.maximum(total + kind, 1), p)
        found.append(-np.log(p))
    return found


def trigrams(train: Texts, other: Texts) -> float:
    """Nats a token of the other texts under trigrams that were counted in training."""
    kinds = 1 + max(int(text.max(initial=0)) for text in (*train, *other))
    return float(surprises(train, other, 3, kinds)[-1].mean())


def targets(
    batches: Iterable[Mapping[str, np.ndarray]], segments: str = "target_segment_ids"
) -> Iterator[Int[np.ndarray, " n"]]:
    """The texts that a model predicts, of batches with ``target_out``: of each row, each segment but 0."""
    for batch in batches:
        for tokens, owner in zip(batch["target_out"], batch[segments], strict=True):
            for number in range(1, int(owner.max(initial=0)) + 1):
                if len(text := tokens[owner == number]):
                    yield text.astype(np.int64)


def _grams(texts: Texts, n: int, bits: int) -> np.ndarray:
    """Each token with the n - 1 before it as one number; before a text stand ids of 0."""
    found = []
    for text in texts:
        padded = np.concatenate([np.zeros(n - 1, np.int64), text])
        parts = [padded[i : i + len(text)] << (bits * (n - 1 - i)) for i in range(n)]
        found.append(sum(parts))
    return np.concatenate(found)


def _looked_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The values of the wanted keys, 0 for those that are not there."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
