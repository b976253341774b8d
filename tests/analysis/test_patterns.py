"""Patterns of alignments, on matrices whose values are known and on gold of which the order is known.

`numbers.json` is what num2words 0.5.14 writes for 1 to 99 in English, German and French.
"""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from crossattn.analysis.patterns import PATTERNS, crossing_rate, fertility, of_links, patterns
from crossattn.data.sources import open_source

NUMBERS = json.loads((Path(__file__).parent / "numbers.json").read_text(encoding="utf-8"))
SOFT = np.random.default_rng(0).dirichlet(np.ones(5), 4)


def test_in_order():
    found = patterns(np.eye(6))
    assert found == pytest.approx(dict(zip(PATTERNS, (1, 1, 0, 0, 0), strict=True)))
    assert fertility(np.eye(6)).tolist() == [1] * 6


def test_turned_round():
    found = patterns(np.eye(6)[::-1])
    assert found["monotonic"] == pytest.approx(0) == found["scattered"] and found["diagonal"] < 0
    assert found["many_to_one"] == found["one_to_many"] == 0


def test_even_weights_are_half_of_each():
    found = patterns(np.ones((4, 5)))
    expected = (1 - 0.5 * (1 - 1 / 5), 0, 1, 1 - 1 / 5, 1 - 1 / 4)
    np.testing.assert_allclose([found[name] for name in PATTERNS], expected, atol=1e-12)


def test_without_order():
    found = patterns(np.eye(400)[np.random.default_rng(0).permutation(400)])
    assert found["monotonic"] == pytest.approx(0.5, abs=0.05)
    assert found["scattered"] == pytest.approx(1, abs=0.1)
    assert found["diagonal"] == pytest.approx(0, abs=0.1)


def test_two_to_one_and_one_to_two():
    two = patterns(np.repeat(np.eye(4), 2, 1))  # each target has two sources
    assert (two["many_to_one"], two["one_to_many"], two["monotonic"]) == (0.5, 0, 1)
    one = patterns(np.repeat(np.eye(4), 2, 0))  # each source has two targets
    assert (one["many_to_one"], one["one_to_many"], one["monotonic"]) == (0, 0.5, 1)
    assert fertility(np.repeat(np.eye(4), 2, 0)).tolist() == [2] * 4


def test_values_are_the_expectations_that_they_state():
    """By sums over every pair of rows and every pair of sources."""
    T, S = SOFT.shape
    crossed = [
        sum(SOFT[t, s] * SOFT[u, r] for s in range(S) for r in range(S) if s > r)
        for t, u in combinations(range(T), 2)
    ]
    mass = SOFT.mean(0)

    def between(p, q):
        return sum(
            p[s] * q[r] * mass[min(s, r) + 1 : max(s, r)].sum() for s in range(S) for r in range(S)
        )

    near = np.mean([between(SOFT[t], SOFT[t + 1]) for t in range(T - 1)])
    found = patterns(SOFT)
    assert crossing_rate(SOFT) == pytest.approx(np.mean(crossed))
    assert found["scattered"] == pytest.approx(near / between(mass, mass))
    assert patterns(SOFT * np.array([[1], [2], [3], [9]])) == pytest.approx(found)


def test_rows_without_weight_have_no_part_but_keep_their_place():
    links = np.diag([1.0, 0, 1, 0, 1])
    found = patterns(links)
    assert (found["monotonic"], found["diagonal"]) == (1, 1)
    assert found["scattered"] == pytest.approx(0)
    assert patterns(links[[0, 2, 4]])["diagonal"] < 1
    assert all(np.isnan(value) for value in patterns(np.eye(5)[:1]).values())
    assert np.isnan(crossing_rate(np.zeros((3, 3))))


def test_what_is_no_alignment_is_refused():
    for wrong in (-np.eye(2), np.full((2, 2), np.nan)):
        with pytest.raises(ValueError, match="expected finite weights"):
            patterns(wrong)
    with pytest.raises(ValueError, match=r"the link \(3, 0\) is outside 3 sources and 2 targets"):
        of_links([(0, 1), (3, 0)], 2, 3)


def parts_of(number: int, language: str) -> list[str]:
    """The words of a number; of a German one its unit, "und" and its ten."""
    text = NUMBERS[language][str(number)]
    if language != "de":
        return text.replace("-", " ").split()
    ten, unit = NUMBERS["de"][str(number // 10 * 10)], NUMBERS["de"][str(number % 10)]
    unit = "ein" if unit == "eins" else unit
    assert text == f"{unit}und{ten}"
    return [unit, "und", ten]


TWO_DIGITS = [n for n in range(21, 100) if n % 10]


@pytest.mark.parametrize("number", TWO_DIGITS)
def test_german_numbers_turn_tens_and_units_round(number):
    assert len(parts_of(number, "en")) == 2 and len(parts_of(number, "de")) == 3
    assert patterns(of_links([(0, 2), (1, 0)], 3, 2))["monotonic"] == 0


def test_french_seventy_and_ninety_have_several_words_for_one():
    """Read from French, one English word has two French ones, or three; other tens have one."""
    for number, count in ((30, 1), (60, 1), (70, 2), (90, 3)):
        french = parts_of(number, "fr")
        assert len(french) == count and len(parts_of(number, "en")) == 1
        # With "and one" after it, so that there are rows to compare.
        links = [(s, 0) for s in range(count)] + [(count, 1)]
        there = patterns(of_links(links, 2, count + 1))
        back = patterns(of_links([(t, s) for s, t in links], count + 1, 2))
        expected = (1 - 1 / count) / 2
        assert there["many_to_one"] == pytest.approx(expected) and there["one_to_many"] == 0
        assert back["one_to_many"] == pytest.approx((1 - 1 / count) * count / (count + 1))
        assert back["many_to_one"] == 0 and there["monotonic"] == back["monotonic"] == 1


@pytest.mark.parametrize(("pair", "low", "high"), [("en-es", 0.9, 1.0), ("en-ja", 0.6, 0.85)])
def test_gold_of_phrases_has_the_order_of_its_language(pair, low, high):
    """Spanish exchanges neighbours; the Japanese verb goes to the end."""
    source = open_source(f"phrases/{pair}", "validation")
    rates = [
        crossing_rate(of_links(e["links"].tolist(), len(e["target_spans"]), len(e["source_spans"])))
        for e in (source[i] for i in range(100))
    ]
    assert low <= 1 - np.nanmean(rates) <= high
