"""Counted n-grams against counting by dictionaries, and what masks hide from them."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from experiments.tasks.ngrams import BOTH_SIDES, surprises, window_surprises

RANDOM = np.random.default_rng(3)
TRAIN = [RANDOM.integers(1, 4, n) for n in (30, 1, 17)]
OTHER = [RANDOM.integers(1, 5, n) for n in (9, 12)]


def by_dictionaries(train, other, seen, windows, vocab_size):
    """The same probabilities, context by context."""

    def context(text, at, window):
        padded = [0] * 9 + list(text) + [0] * 9
        left, right = padded[9 + at - window[0] : 9 + at], padded[10 + at : 10 + at + window[1]]
        return window, tuple(left), tuple(right)

    counts = defaultdict(Counter)
    for text in train:
        for at, token in enumerate(text):
            for window in windows:
                counts[context(text, at, window)][token] += 1
    found = []
    for text, own in zip(other, seen, strict=True):
        for at, token in enumerate(text):
            p = 1 / vocab_size
            for window in windows:
                after = counts.get(context(own, at, window), Counter())
                if after:
                    p = (after[token] + len(after) * p) / (after.total() + len(after))
            found.append(-np.log(p))
    return found


@pytest.mark.parametrize("windows", [[(0, 0), (1, 0), (2, 0)], BOTH_SIDES], ids=["left", "both"])
def test_probabilities_are_those_of_counting_by_hand(windows):
    seen = [np.where(RANDOM.random(len(text)) < 0.3, 7, text) for text in OTHER]
    found = window_surprises(TRAIN, OTHER, windows, 8, seen)
    np.testing.assert_allclose(
        found[-1], by_dictionaries(TRAIN, OTHER, seen, windows, 8), rtol=1e-12
    )


def test_n_grams_are_windows_on_the_left():
    found = surprises(TRAIN, OTHER, 3, 8)
    expected = window_surprises(TRAIN, OTHER, [(0, 0), (1, 0), (2, 0)], 8)
    np.testing.assert_array_equal(found, expected)


def test_the_other_side_tells_what_one_side_cannot():
    """The token in the middle is the one that follows it."""
    texts = [np.repeat(RANDOM.integers(1, 6, 20), 2) for _ in range(30)]
    left, both = (
        window_surprises(texts[:20], texts[20:], windows, 8)[-1].mean()
        for windows in ([(0, 0), (1, 0)], [(0, 0), (1, 0), (1, 1)])
    )
    assert both < 0.75 * left


def test_a_vocabulary_too_large_is_refused():
    with pytest.raises(
        ValueError, match="order is 7, of 600 kinds of tokens; expected 512 at most"
    ):
        window_surprises(TRAIN, OTHER, BOTH_SIDES, 600)
