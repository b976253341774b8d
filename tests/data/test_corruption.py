"""Objectives: how much is taken out and in what pieces, and that nothing of the text is lost."""

import math
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossattn.data.corruption import PrefixLM, SpanCorruption
from crossattn.data.errors import DataError

EOS, VOCAB = 2, 1000
SPANS = SpanCorruption(source_len=512, target_len=114, vocab_size=VOCAB)


def text(length):
    """Tokens that tell where they stood."""
    return np.arange(10, 10 + length, dtype=np.int32)


def put_back(source, target):
    """The text that was corrupted, by regular expressions on words: no token is looked at as a number."""
    said = re.split(r"(S\d+)", " ".join(f"S{t}" if t >= VOCAB else str(t) for t in target[:-1]))
    words = dict(zip(said[1::2], said[2::2], strict=True))
    return [
        int(word)
        for token in source[:-1]
        for word in (words.pop(f"S{token}").split() if token >= VOCAB else [token])
    ]


@given(st.integers(2, 568), st.integers(0, 2**32 - 1))
def test_source_and_target_together_are_the_text(length, seed):
    ((source, target),) = SPANS.pairs([text(length)], np.random.default_rng(seed))
    assert source[-1] == target[-1] == EOS and EOS not in [*source[:-1], *target[:-1]]
    assert put_back(source, target) == text(length).tolist()
    assert SPANS.filled(source, target).tolist() == text(length).tolist()


@given(st.integers(2, 568), st.integers(0, 2**32 - 1))
def test_as_many_tokens_and_spans_go_as_t5_takes(length, seed):
    """The closed form that is in the docstring of T5's random_spans_noise_mask."""
    noise = SPANS.noise(length, np.random.default_rng(seed))
    tokens = min(max(round(length * 0.15), 1), length - 1)
    runs = re.findall("1+", "".join(map(str, noise.astype(int))))
    assert sum(map(len, runs)) == tokens
    assert len(runs) == max(round(tokens / 3.0), 1)
    assert not noise[0] and noise[-1]


def test_a_text_of_568_tokens_makes_512_and_114():
    """The lengths that T5 was trained with; its test of random_spans_helper has them."""
    objective = SpanCorruption(512, 114, vocab_size=32000)
    assert objective.text_len == 568
    ((source, target),) = objective.pairs([text(568)], np.random.default_rng(0))
    assert (len(source), len(target)) == (512, 114)
    assert source.max() == 32099 and target[0] == 32099  # <extra_id_0>
    assert [t for t in target if t >= 32000] == list(range(32099, 32099 - 28, -1))


def test_every_division_into_spans_is_equally_likely():
    """Of 7 tokens in 3 parts there are 15, and spans of length k as often as combinatorics says."""
    objective = SpanCorruption(64, 60, vocab_size=VOCAB, sentinels=64, density=0.35, span=7 / 3)
    assert objective.taken(20) == (7, 3)
    rng, draws = np.random.default_rng(0), 6000
    found = Counter()
    for _ in range(draws):
        noise = "".join(map(str, objective.noise(20, rng).astype(int)))
        found[tuple(map(len, re.findall("1+", noise)))] += 1
    assert len(found) == math.comb(6, 2)
    expected = draws / 15
    chi_square = sum((count - expected) ** 2 / expected for count in found.values())
    assert chi_square < 36.1  # of 14 degrees of freedom, exceeded once in a thousand
    lengths = Counter(length for each, count in found.items() for length in each * count)
    for length in range(1, 6):
        share = math.comb(7 - length - 1, 1) / math.comb(6, 2)
        assert lengths[length] / (3 * draws) == pytest.approx(share, abs=0.01)


def test_the_mean_span_is_the_one_asked_for():
    for span in (2.0, 3.0, 8.0):
        objective = SpanCorruption(512, 300, vocab_size=VOCAB, density=0.15, span=span)
        tokens, spans = objective.taken(objective.text_len)
        assert tokens / objective.text_len == pytest.approx(0.15, abs=0.002)
        assert tokens / spans == pytest.approx(span, rel=0.06)


def test_what_a_model_leaves_out_or_adds_is_no_error():
    source = np.array([11, VOCAB + 99, 12, VOCAB + 98, 13, EOS], np.int32)
    said = np.array([5, VOCAB + 98, 6, 7, VOCAB + 3, 8, VOCAB + 98, 9, EOS, 4], np.int32)
    assert SPANS.filled(source, said).tolist() == [11, 12, 6, 7, 13]
    assert SPANS.filled(source, said[:0]).tolist() == [11, 12, 13]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"source_len": 4, "target_len": 40}, "leave room for texts of 3 tokens; expected 4"),
        ({"sentinels": 2}, "has 3 spans, and there are 2 sentinels; take more of them"),
        ({"target_len": 13}, "target_len is 13; what is taken out of 70 tokens"),
        ({"density": 1.0}, "density is 1.0 and span 3.0; expected a share between 0 and 1"),
        ({"span": 0.5}, "density is 0.15 and span 0.5"),
    ],
)
def test_lengths_that_do_not_suffice_are_refused(options, complaint):
    given = {"source_len": 64, "target_len": 40, "vocab_size": VOCAB} | options
    with pytest.raises(DataError, match=complaint):
        SpanCorruption(**given)


@given(
    st.integers(6, 70), st.integers(6, 70), st.integers(0, 1), st.integers(0, 1), st.integers(0, 99)
)
def test_two_prefixes_and_two_rests_fit_a_row_whatever_the_cut(source_len, target_len, a, b, seed):
    objective = PrefixLM(source_len, target_len)
    texts = [text(objective.text_len - a), text(objective.text_len - b)]
    pairs = objective.pairs(texts, np.random.default_rng(seed))
    for whole, (source, target) in zip(texts, pairs, strict=True):
        assert source[-1] == target[-1] == EOS and min(len(source), len(target)) >= 2
        assert [*source[:-1], *target[:-1]] == whole.tolist()
        assert objective.filled(source, target).tolist() == whole.tolist()
    assert sum(len(source) for source, _ in pairs) <= source_len
    assert sum(len(target) for _, target in pairs) <= target_len


def test_prefixes_are_of_every_length_equally_often():
    objective, rng = PrefixLM(12, 12), np.random.default_rng(0)
    found = Counter()
    for _ in range(9000):
        found.update(len(source) - 1 for source, _ in objective.pairs([text(10), text(10)], rng))
    assert sorted(found) == list(range(1, 10))
    assert all(count == pytest.approx(2000, rel=0.1) for count in found.values())


def test_a_row_too_short_for_two_texts_is_refused():
    with pytest.raises(DataError, match="leave room for texts of 3 tokens; expected 4 or more"):
        PrefixLM(64, 5)
