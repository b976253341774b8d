"""Bootstrap intervals against the normal approximation, and what groups and pairs change."""

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest

from experiments.intervals import difference, of_texts, ratio

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


WORDS = ("black", "cats", "sleep", "on", "warm", "roofs", "of", "old", "towns")
REFERENCES = [" ".join(RANDOM.choice(WORDS, 8)) for _ in range(60)]
BAD, GOOD = (
    [" ".join(w if RANDOM.random() < p else "dog" for w in text.split()) for text in REFERENCES]
    for p in (0.6, 0.8)
)


@pytest.mark.parametrize("metric", [BLEU(), CHRF()])
def test_added_counts_have_the_score_of_sacrebleu_also_of_short_and_empty_texts(metric):
    texts, references = (
        [*BAD, "", "so", "", "été d", "x y"],
        [*REFERENCES, "a b", "s", "", "été", ""],
    )
    for rows in ([60], [61], [62], [61, 63], [60, 61, 62, 63, 64], list(range(55, 65)), [3, 3, 7]):
        own, right = ([every[i] for i in rows] for every in (texts, references))
        (found,), _ = of_texts(metric, [[own]], right, range(len(rows)))
        assert found.value == pytest.approx(metric.corpus_score(own, [right]).score, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("metric", [BLEU(), CHRF()])
def test_texts_have_the_scores_and_intervals_of_sacrebleu(metric):
    scores, differences = of_texts(metric, [[BAD], [GOOD]], REFERENCES, range(60))
    for texts, found in zip((BAD, GOOD), scores, strict=True):
        assert found.value == pytest.approx(metric.corpus_score(texts, [REFERENCES]).score)
    assert differences[0].value == 0 and differences[1].excludes_zero
    assert differences[1].value == pytest.approx(scores[1].value - scores[0].value)
    name = type(metric).__name__
    test = PairedTest(
        [("bad", BAD), ("good", GOOD)], {name: metric}, [REFERENCES], "bs", n_samples=2000
    )
    peer = next(x for key, x in test()[1].items() if key != "System")[1]
    assert (scores[1].high - scores[1].low) / 2 == pytest.approx(peer.ci, rel=0.15)


def test_a_system_of_several_texts_has_their_mean_score():
    (one, both), (_, more) = of_texts(BLEU(), [[BAD], [BAD, GOOD]], REFERENCES, range(60))
    (good,), _ = of_texts(BLEU(), [[GOOD]], REFERENCES, range(60))
    assert both.value == pytest.approx((one.value + good.value) / 2)
    assert more.value == pytest.approx(both.value - one.value) and more.excludes_zero


@pytest.mark.slow
def test_texts_of_a_family_are_drawn_together():
    four = [[text for text in texts for _ in range(4)] for texts in (BAD, GOOD, REFERENCES)]
    groups = np.repeat(np.arange(60), 4).tolist()
    alone, _ = of_texts(BLEU(), [[BAD]], REFERENCES, range(60))
    grouped, _ = of_texts(BLEU(), [four[:1]], four[2], groups)
    apart, _ = of_texts(BLEU(), [four[:1]], four[2], range(240))
    width = alone[0].high - alone[0].low
    assert grouped[0].high - grouped[0].low == pytest.approx(width, rel=0.1)
    assert apart[0].high - apart[0].low < 0.6 * width
