"""Baselines of translation that count words: they find what counts tell, and nothing else."""

import itertools

import numpy as np
import pytest

from crossattn.data.sources import open_source
from experiments.tasks import lexical

PAIRS = [
    (["das", "Haus"], ["the", "house"]),
    (["das", "Buch"], ["the", "book"]),
    (["ein", "Buch"], ["a", "book"]),
]


def counted(pairs, rounds):
    """Model 1 by its definition: the posterior of each alignment of a whole sentence, one after another."""
    words = [sorted({w for pair in pairs for w in pair[side]}) for side in (0, 1)]
    table = {(s, t): 1.0 for s in ["", *words[0]] for t in words[1]}
    for _ in range(rounds):
        counts = dict.fromkeys(table, 0.0)
        for source, target in pairs:
            choices = list(itertools.product(["", *source], repeat=len(target)))
            chances = [
                np.prod([table[s, t] for s, t in zip(c, target, strict=True)]) for c in choices
            ]
            for choice, chance in zip(choices, chances, strict=True):
                for s, t in zip(choice, target, strict=True):
                    counts[s, t] += float(chance / sum(chances))
        for s in ["", *words[0]]:
            total = sum(counts[s, t] for t in words[1])
            table |= {(s, t): counts[s, t] / total for t in words[1]}
    return table


@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_model_1_has_the_probabilities_of_its_definition(rounds):
    found, expected = lexical.ibm_model_1(PAIRS, rounds).probabilities, counted(PAIRS, rounds)
    for (source, target), chance in expected.items():
        assert found[source].get(target, 0.0) == pytest.approx(chance, abs=1e-9)


def test_model_1_links_and_translates_by_its_likeliest_words():
    model = lexical.WordModel(
        {"": {"the": 0.9, "x": 0.1}, "Haus": {"house": 1.0}, "das": {"the": 0.5, "house": 0.2}}
    )
    assert model.links((["das", "Haus"], ["the", "house"])) == {(1, 1)}, "the empty word has the"
    assert model.translation(["Haus", "neu", "das"]) == "house the"


def test_the_diagonal_has_a_link_for_each_target_word():
    assert lexical.diagonal((["a", "b", "c"], ["x", "y", "z"])) == {(0, 0), (1, 1), (2, 2)}
    assert lexical.diagonal((["a", "b", "c"], ["x"])) == {(0, 0)}
    assert lexical.diagonal((["a"], ["x", "y"])) == {(0, 0), (0, 1)}


def test_model_1_aligns_the_phrases_that_the_diagonal_does_not():
    def examples(split):
        return open_source("phrases/en-ja", split)[:300]

    found = lexical.alignment_errors(examples, "test")
    assert found["ibm_model_1_aer"] < 40 < found["diagonal_aer"] < 90
    assert 0 < found["hmm_aer"] < 40


def test_words_of_known_words_are_written_in_the_order_of_the_source():
    train, test = (open_source("phrases/en-es", split) for split in ("train", "test"))
    found = lexical.word_by_word(train, [e for e in test if e["source"] == "the black cat"])
    assert found[0].split()[1:] == ["negro", "gato"]
