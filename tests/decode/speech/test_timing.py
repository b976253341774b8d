"""Dynamic time warping over attention: the path, the filter, and where tokens begin."""

import numpy as np
import pytest
from scipy import ndimage, stats

from crossattn.decode.speech import timing
from tests.closeness import close
from tests.peers import peer


def cheapest(cost):
    """The least total cost of a monotone path, cell by cell."""
    total = np.full((cost.shape[0] + 1, cost.shape[1] + 1), np.inf)
    total[0, 0] = 0
    for i, row in enumerate(cost, start=1):
        for j, value in enumerate(row, start=1):
            total[i, j] = value + min(total[i - 1, j - 1], total[i - 1, j], total[i, j - 1])
    return total[-1, -1]


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (5, 5), (4, 30), (30, 4)])
def test_the_path_is_monotone_whole_and_the_cheapest(shape):
    cost = np.random.default_rng(0).standard_normal(shape)
    rows, columns = timing.warp(cost)
    steps = np.stack([np.diff(rows), np.diff(columns)])
    assert (rows[0], columns[0]) == (0, 0) and (rows[-1] + 1, columns[-1] + 1) == shape
    assert np.all((steps >= 0) & (steps <= 1)) and np.all(steps.sum(axis=0) >= 1)
    assert cost[rows, columns].sum() == pytest.approx(cheapest(cost))


@pytest.mark.parametrize("width", [1, 3, 7])
def test_the_median_is_that_of_scipy(width):
    x = np.random.default_rng(1).standard_normal((2, 3, 40)).astype(np.float32)
    expected = ndimage.median_filter(x, size=(1, 1, width), mode="mirror")
    np.testing.assert_array_equal(timing.median(x, width), expected)
    with pytest.raises(ValueError, match="width is 4; expected an odd number"):
        timing.median(x, 4)


def test_each_place_is_measured_by_its_own_mean_and_spread():
    weights = np.random.default_rng(3).random((2, 6, 20)).astype(np.float32)
    shares = weights.astype(np.float64) / weights.sum(-1, keepdims=True, dtype=np.float64)
    expected = ndimage.median_filter(stats.zscore(shares, axis=-2), (1, 1, 3), mode="mirror")
    close(timing.sharpened(weights, 3), expected.mean(0))


def test_tokens_begin_where_attention_moves_to():
    begins = [0, 12, 30, 41, 70, 90]
    weights = np.full((2, 5, 90), 0.01, np.float32)
    for row, (start, end) in enumerate(zip(begins[:-1], begins[1:], strict=True)):
        weights[:, row, start:end] = 1.0
    weights[1, :, 55] = 50.0  # what every token looks at
    assert timing.token_starts(weights).tolist() == begins[:-1]
    assert timing.token_starts(weights, 2, -1)[1:].tolist() == begins[3:4]


def test_starts_are_those_of_transformers():
    theirs = peer("transformers.models.whisper.generation_whisper")
    weights = np.random.default_rng(2).random((3, 12, 60)).astype(np.float32)
    sharp = timing.sharpened(weights)
    rows, places = theirs._dynamic_time_warping(-sharp.astype(np.float64))
    ours = timing.warp(-sharp)
    np.testing.assert_array_equal(ours[0], rows)
    np.testing.assert_array_equal(ours[1], places)


def timed(rng, right, late, words=4):
    """A text whose words last 10 to 20 places: head ``right`` looks at them, ``late`` 8 places too late."""
    edges = np.cumsum(rng.integers(10, 21, words + 1))
    S, weights = edges[-1] + 20, rng.uniform(0.1, 1, (2, 3, words + 1, edges[-1] + 20))
    for head, shift in ((right, 0), (late, 8)):
        for row, (begin, end) in enumerate(zip(edges, [*edges[1:], S], strict=True)):
            weights[head][row, begin + shift : end + shift] += 20
    sharp = np.stack([[timing.sharpened(head[None]) for head in layer] for layer in weights])
    rows = np.stack([np.arange(words), np.arange(1, words + 1)], axis=1)
    return timing.Timed(sharp, rows, edges[rows].astype(float))


def test_heads_that_tell_the_times_are_chosen():
    texts = [timed(np.random.default_rng(i), (1, 2), (0, 1)) for i in range(4)]
    assert timing.choose_heads(texts)[0] == (1, 2)
    # The first begin is that of the path, 0.
    errors = np.concatenate([text.errors(((1, 2),))[1:] for text in texts])
    late = np.concatenate([text.errors(((0, 1),))[1:] for text in texts])
    assert errors.max() <= 1 and np.all(abs(late - 8) <= 1)
    assert timing.choose_heads(texts, most=1) == ((1, 2),)
    swapped = [timed(np.random.default_rng(i), (0, 0), (1, 2)) for i in range(4)]
    assert timing.choose_heads(swapped)[0] == (0, 0)


def test_errors_are_those_of_the_starts_of_tokens():
    rng = np.random.default_rng(5)
    weights = rng.uniform(size=(2, 3, 9, 60))
    sharp = np.stack([[timing.sharpened(head[None])[1:-1] for head in layer] for layer in weights])
    rows, heads = np.array([[0, 2], [2, 6]]), ((0, 1), (1, 0))
    times = np.array([[3.0, 20.5], [20.5, 44.0]])
    starts = timing.token_starts(weights[[0, 1], [1, 0]], 1, -1)
    np.testing.assert_allclose(
        timing.Timed(sharp, rows, times).errors(heads), np.abs(starts[rows] - times)
    )
