"""The hidden Markov model of alignment: posteriors by definition, agreement, words without links."""

import itertools

import numpy as np
import pytest

from experiments.tasks import hmm

RANDOM = np.random.default_rng(0)
NOUNS = (("chat", "cat"), ("chien", "dog"), ("oiseau", "bird"))
ADJECTIVES = (("noir", "black"), ("petit", "small"), ("vert", "green"))
JUMPS = RANDOM.uniform(0.1, 1.0, 2 * hmm.FURTHEST + 1)


def by_definition(emissions, jumps):
    """The probability of each link, and of the target: sums over every path of positions and empty words."""
    T, S = emissions.shape[0], emissions.shape[1] - 1
    table, total = np.zeros((T, S)), 0.0
    for written in itertools.product([None, *range(S)], repeat=T):
        for start in range(S):
            at, chance = start, 1.0 / S
            for t, s in enumerate(written):
                if s is None:
                    chance *= hmm.EMPTY * emissions[t, 0]
                    continue
                if t:
                    weights = np.array([jumps[r - at + hmm.FURTHEST] for r in range(S)])
                    chance *= weights[s] / weights.sum()
                elif s != start:
                    chance = 0.0
                chance *= (1 - hmm.EMPTY) * emissions[t, 1 + s]
                at = s
            total += chance
            for t, s in enumerate(written):
                if s is not None:
                    table[t, s] += chance
    return table / total, total


@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 3), (3, 2), (4, 3)])
def test_posteriors_have_the_probabilities_of_their_definition(T, S):
    """Also beside a longer pair, where padding fills the shorter one."""
    emissions = RANDOM.uniform(0.01, 1.0, (2, T + 1, S + 1))
    emissions[0, T] = [hmm.PADDING, *np.zeros(S)]
    short, long = hmm.posteriors(emissions, JUMPS)
    np.testing.assert_allclose(short[:T], by_definition(emissions[0, :T], JUMPS)[0], rtol=1e-9)
    np.testing.assert_allclose(long, by_definition(emissions[1], JUMPS)[0], rtol=1e-9)
    assert not short[T].any()
    chances = hmm.predictive(emissions, JUMPS)
    for row, chance in enumerate(chances):
        for t in range(1, T + 1):
            total = by_definition(emissions[row, :t], JUMPS)[1]
            np.testing.assert_allclose(np.prod(chance[:t]), total, rtol=1e-9)


def test_chances_of_the_next_word_add_up_to_1_and_are_of_training_pairs_alone():
    """Also after a source word that is in no training pair."""
    words = [f"w{i}" for i in range(6)]
    pairs = [(x, [w.upper() for w in x]) for x in (RANDOM.choice(words, 4) for _ in range(30))]
    source = [words[2], "unseen", words[0]]
    for before in ([], ["W2"], ["W2", "W5"]):
        other = [(source, [*before, w.upper()]) for w in words]
        chances = [found[-1] for found in hmm.predictions(pairs, other)]
        assert sum(chances) == pytest.approx(1, abs=1e-6)
        if not before:
            assert min(chances[0], chances[2]) > 1.4 * max(chances[i] for i in (1, 3, 4, 5))
    (unknown,) = hmm.predictions(pairs, [(source, ["W9"])])
    assert unknown[0] < 1e-9
    nothing = hmm.predictions(pairs, [([], [w.upper()]) for w in words])
    assert np.sum(nothing) == pytest.approx(1, abs=1e-6)


def test_words_that_nothing_writes_have_no_posterior_and_no_nan():
    emissions = np.zeros((1, 3, 3))
    emissions[0, [0, 2], 1:] = 0.5
    found = hmm.posteriors(emissions, JUMPS)
    assert np.isfinite(found).all()


def test_a_text_without_words_has_no_links():
    pairs = [([], ["a"]), (["b"], []), (["b"], ["a"])]
    found = [hmm.links(*each, 0.3) for each in zip(hmm.align(pairs), pairs, strict=True)]
    assert found == [set(), set(), {(0, 0)}]


def test_pairs_read_together_have_the_links_of_pairs_read_one_by_one(monkeypatch):
    words = "a b c d e f g".split()
    drawn = [RANDOM.choice(words, n).tolist() for n in (3, 5, 3, 4, 5, 3)]
    pairs = [(x, x[::-1] + y[:1]) for x, y in zip(drawn, drawn[1:] + drawn[:1], strict=True)]
    together = hmm.align(pairs)
    monkeypatch.setattr(hmm, "_TOGETHER", 1)
    for some, own in zip(together, hmm.align(pairs), strict=True):
        for x, y in zip(some, own, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9)


def test_directions_that_agree_align_words_that_change_places():
    pairs = [(["le", n, a], ["the", b, m]) for n, m in NOUNS for a, b in ADJECTIVES]
    for pair, found in zip(pairs, hmm.align(pairs), strict=True):
        assert hmm.links(found, pair, 0.3) == {(0, 0), (2, 1), (1, 2)}


def test_words_count_by_their_first_letters():
    assert hmm.stem("Λόγος") == hmm.stem("λογοσ") and hmm.stem("ἀνθρώπων") == hmm.stem("ἄνθρωπος")
    assert hmm.stem("Word") != hmm.stem("was")


def test_a_word_without_a_link_takes_that_of_the_next_word():
    pair = (["λόγος"], ["in", "the", "word", ",", "was"])
    there = np.array([[0.0], [0.1], [0.9], [0.0], [0.0]])
    found = there, there.T
    assert hmm.links(found, pair, 0.3) == {(0, 2)}
    assert hmm.links(found, pair, 0.3, reach=1) == {(0, 1), (0, 2)}
    assert hmm.links(found, pair, 0.3, reach=2) == {(0, 0), (0, 1), (0, 2)}
    assert hmm.links(found, pair, 0.05, reach=0) == {(0, 1), (0, 2)}


def test_examples_get_links_that_are_counted_on_their_texts_alone():
    """The example's own spans are its words; without any, words are as they are written."""
    texts = [(f"{n} {a}", f"the {b} {m}") for n, m in NOUNS for a, b in ADJECTIVES]
    examples = [dict(id=s, source=s, target=t, links=np.zeros((0, 2), int)) for s, t in texts]
    for example in hmm.linked(examples, threshold=0.3, reach=0):
        assert {(0, 2), (1, 1)} <= {tuple(link) for link in example["links"].tolist()}
        assert example["links"].dtype == np.int32
        assert [example["target"][a:b] for a, b in example["target_spans"]][0] == "the"
    whole = [e | {"source_spans": np.array([[0, len(e["source"])]])} for e in examples]
    assert {s for e in hmm.linked(whole, 0.3, 0) for s in e["links"][:, 0].tolist()} == {0}
    assert not len(examples[0]["links"])
