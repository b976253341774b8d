"""Bootstrap intervals against the normal approximation, and what groups and pairs change."""

import numpy as np
import pytest

from experiments.intervals import difference, ratio

RANDOM = np.random.default_rng(1)
CORRECT = (RANDOM.random(400) < 0.7).astype(float)
ONES = np.ones(400)


def test_the_interval_of_a_mean_is_that_of_the_normal_approximation():
    found = ratio(CORRECT, ONES)
    error = 1.96 * CORRECT.std() / 20
    assert found.value == pytest.approx(CORRECT.mean())
    assert found.low == pytest.approx(CORRECT.mean() - error, abs=0.005)
    assert found.high == pytest.approx(CORRECT.mean() + error, abs=0.005)


def test_examples_of_a_group_count_as_one():
    """Every example four times widens nothing; without the groups it would halve the interval."""
    groups = np.repeat(np.arange(100), 4)
    four = np.repeat(CORRECT[:100], 4)
    alone, grouped = ratio(CORRECT[:100], ONES[:100]), ratio(four, ONES, groups)
    assert grouped.high - grouped.low == pytest.approx(alone.high - alone.low, rel=0.1)
    assert ratio(four, ONES).high - ratio(four, ONES).low < 0.6 * (alone.high - alone.low)


def test_a_paired_difference_of_systems_that_agree_is_narrow():
    better = CORRECT.copy()
    better[np.flatnonzero(CORRECT == 0)[:12]] = 1
    found = difference(CORRECT, better, ONES)
    assert found.value == pytest.approx(0.03) and found.excludes_zero
    assert found.high - found.low < 0.5 * (ratio(better, ONES).high - ratio(better, ONES).low)
    assert not difference(CORRECT, CORRECT, ONES).excludes_zero


def test_weights_are_those_of_the_examples():
    assert ratio([2.0, 3.0], [4.0, 1.0]).value == 1.0
    with pytest.raises(ValueError, match="no examples"):
        ratio([], [])
