"""Alignment scores against numbers worked out by hand, joining against a second implementation."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from crossattn.train.alignment import (
    Recipe,
    alignment_scores,
    anchors,
    phrase_counts,
    phrase_scores,
    symmetrised,
    transport,
    viterbi,
    word_weights,
)


@pytest.mark.parametrize(
    ("predicted", "gold", "aer", "precision", "recall"),
    [
        # |A| = 3, |G| = 4, |A and G| = 2: AER = 1 - 4 / 7.
        ([{(0, 0), (1, 1), (2, 0)}], [{(0, 0), (1, 1), (2, 2), (3, 3)}], 300 / 7, 200 / 3, 50),
        ([{(0, 1), (1, 0)}], [{(0, 1), (1, 0)}], 0, 100, 100),
        ([{(0, 1)}], [{(1, 0)}], 100, 0, 0),
        # Over a corpus, links are counted before dividing: 3 of 4 found, 3 of 5 wanted.
        (
            [{(0, 0)}, {(0, 0), (1, 1), (2, 2)}],
            [{(0, 0), (1, 0), (2, 0)}, {(0, 0), (1, 1)}],
            100 / 3,
            75,
            60,
        ),
        ([set()], [{(0, 0)}], 100, 0, 0),
        ([{(0, 0)}], [set()], 100, 0, 0),
    ],
)
def test_scores_are_those_of_och_and_ney(predicted, gold, aer, precision, recall):
    scores = alignment_scores(predicted, gold)
    assert scores == pytest.approx({"aer": aer, "precision": precision, "recall": recall})


def test_sentences_that_do_not_pair_up_are_refused():
    with pytest.raises(ValueError, match="2 sentences and gold 1"):
        alignment_scores([set(), set()], [set()])


def test_words_get_the_sum_of_their_source_pieces_and_the_mean_of_their_target_pieces():
    # Target pieces "cha" "t" | "noir" | end; source pieces "bla" "ck" | "cat" | end.
    weights = np.array(
        [[0.1, 0.1, 0.7, 0.1], [0.3, 0.1, 0.5, 0.1], [0.4, 0.4, 0.1, 0.1], [0, 0, 0, 1.0]],
    )
    found = word_weights(weights, np.array([0, 0, 1, -1]), np.array([0, 0, 1, -1]), (2, 2))
    np.testing.assert_allclose(found, [[0.3, 0.6], [0.8, 0.1]])


def test_a_word_without_pieces_has_no_attention_and_no_link():
    weights = np.array([[0.9, 0.1], [0.2, 0.8]])
    found = word_weights(weights, np.array([0, 2]), np.array([0, 1]), (3, 2))
    np.testing.assert_allclose(found, [[0.9, 0.1], [0, 0], [0.2, 0.8]])
    assert Recipe().links(found) == {(0, 0), (1, 2)}


WEIGHTS = np.arange(2 * 3 * 4 * 5, dtype=float).reshape(2, 3, 4, 5)  # [L N T S]


def test_a_recipe_picks_the_layer_the_head_and_the_row():
    """Row t predicts token t, row t + 1 reads it, and row t + 2 has read the next; the last has none."""
    mean = Recipe(layer=-1, head=None).token_weights(WEIGHTS, 2)
    np.testing.assert_array_equal(mean, WEIGHTS[1].mean(0)[:2])
    output, read, later = (
        Recipe(layer=0, head=2, row_offset=offset).token_weights(WEIGHTS, 3) for offset in (0, 1, 2)
    )
    np.testing.assert_array_equal(output, WEIGHTS[0, 2, :3])
    np.testing.assert_array_equal(read, WEIGHTS[0, 2, 1:])
    np.testing.assert_array_equal(later[:-1], WEIGHTS[0, 2, 2:])
    assert not later[-1].any()
    assert Recipe(row_offset=2).links(later) == {(4, 0), (4, 1)}


def test_words_that_attend_outside_every_word_may_stay_unlinked():
    # The rest of each row, 0.1, 0.6 and 0.4, is on the end of the source.
    matrix = np.array([[0.6, 0.3], [0.1, 0.3], [0.3, 0.3]])
    assert Recipe().links(matrix) == {(0, 0), (1, 1), (0, 2)}
    assert Recipe(unlinked=True).links(matrix) == {(0, 0)}
    # What stays unlinked is no source word's choice either: (1, 1) could have been grown to.
    both = Recipe(unlinked=True, symmetrise="union")
    assert both.links(matrix) == {(0, 0), (1, 0)}


def test_source_words_that_hardly_anyone_attends_to_may_stay_unlinked():
    matrix = np.array([[0.7, 0.08, 0.0], [0.2, 0.02, 0.3]])
    both = Recipe(symmetrise="union")
    assert both.links(matrix) == {(0, 0), (2, 1), (1, 0)}
    assert replace(both, threshold=0.08).links(matrix) == {(0, 0), (2, 1), (1, 0)}
    assert replace(both, threshold=0.1).links(matrix) == {(0, 0), (2, 1)}
    # A target word links with what it attends to most, be it little.
    assert replace(both, threshold=0.5).links(matrix) == {(0, 0), (2, 1)}


MATRIX = np.array([[0.6, 0.4, 0.0], [0.1, 0.5, 0.4], [0.0, 0.8, 0.2]])  # target x source


@pytest.mark.parametrize(
    ("method", "links"),
    [
        # Each target word's best source word: 0, 1, 1.
        ("none", {(0, 0), (1, 1), (1, 2)}),
        # Each source word's best target word: 0, 2, 1.
        ("intersection", {(0, 0), (1, 2)}),
        ("union", {(0, 0), (1, 1), (1, 2), (2, 1)}),
        # (1, 1) is next to (1, 2) and target word 1 had no link; (2, 1) brings in source word 2.
        ("grow-diag", {(0, 0), (1, 1), (1, 2), (2, 1)}),
    ],
)
def test_links_of_a_small_matrix(method, links):
    assert Recipe(symmetrise=method).links(MATRIX) == links


def test_growing_takes_neighbours_of_words_that_have_no_link_yet():
    both = {(0, 0), (1, 1)}
    near, full, far = (2, 2), (0, 1), (5, 5)
    assert symmetrised(both | {near, full}, both | {far}, "grow-diag") == both | {near}


def test_final_links_words_that_have_none():
    """(0, 1) is of two words that are linked, (2, 3) of two that are not, (0, 4) of one that is not."""
    both, more = {(0, 0), (1, 1)}, {(0, 1), (3, 5), (0, 4)}
    assert symmetrised(both | more, both, "grow-diag") == both
    assert symmetrised(both | more, both, "grow-diag-final") == both | {(3, 5), (0, 4)}


def test_the_path_is_the_best_of_all_paths():
    random = np.random.default_rng(0)
    for _ in range(20):
        matrix, jump = random.dirichlet(np.ones(3), 4), float(random.uniform(0, 1))

        def worth(path, matrix=matrix, jump=jump):
            steps = zip(path, path[1:], strict=False)
            emitted = sum(np.log(matrix[row, column]) for row, column in enumerate(path))
            return emitted - jump * sum(abs(j - i - 1) for i, j in steps)

        best = max(itertools.product(range(3), repeat=4), key=worth)
        assert viterbi(matrix, jump).tolist() == list(best)
    assert viterbi(MATRIX, 0.0).tolist() == MATRIX.argmax(1).tolist()
    assert viterbi(np.array([[1.0, 0, 0], [0, 0, 0], [0, 0, 1]]), 1.0).tolist()[::2] == [0, 2]


def test_a_plan_moves_the_same_mass_from_every_word_and_keeps_ratios():
    matrix = np.random.default_rng(0).dirichlet(np.ones(4), 3)
    plan = transport(matrix)
    np.testing.assert_allclose(plan.sum(1), 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(plan.sum(0), 1 / 4, rtol=1e-6)
    # Scaling of rows and columns keeps every ratio of ratios.
    ratios = [m[0, 0] * m[1:, 1:] / (m[0, 1:] * m[1:, :1]) for m in (matrix, plan)]
    np.testing.assert_allclose(*ratios, rtol=1e-6)
    empty = transport(np.array([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0], [3.0, 0.0, 1.0]]))
    np.testing.assert_allclose(empty.sum(1), [0.5, 0, 0.5], rtol=1e-6)
    assert not empty[:, 1].any()
    assert transport(np.zeros((2, 3))).tolist() == np.zeros((2, 3)).tolist()


@pytest.mark.parametrize(
    ("path", "links"),
    [
        ("argmax", {(0, 0), (0, 1), (0, 2)}),  # all read the first word, which says most
        ("transport", {(0, 0), (1, 1), (2, 2)}),
        ("viterbi", {(0, 0), (1, 1), (2, 2)}),
    ],
)
def test_paths_and_plans_link_words_that_none_reads_most(path, links):
    matrix = np.array([[0.8, 0.1, 0.1], [0.5, 0.4, 0.1], [0.5, 0.1, 0.4]])
    assert Recipe(path=path).links(matrix) == links
    assert Recipe(path=path).links(np.zeros((2, 2))) == set()
    assert str(Recipe(path=path)).endswith("" if path == "argmax" else f", by {path}")


def test_a_recipe_that_there_is_none_of_is_refused(in_production):
    with pytest.raises(ValueError, match="row_offset is 3"):
        Recipe(row_offset=3)
    with pytest.raises(ValueError, match="symmetrise is 'both'"):
        Recipe(symmetrise="both")
    with pytest.raises(ValueError, match="path is 'straight'; expected one of argmax, viterbi"):
        Recipe(path="straight")


def test_a_recipe_reads_as_a_sentence():
    text = str(Recipe(layer=1, head=None, row_offset=1, symmetrise="grow-diag"))
    assert text == "layer 1, all heads, row offset 1, grow-diag"
    assert str(Recipe(unlinked=True)).endswith("not symmetrised, words may stay unlinked")
    assert str(Recipe(symmetrise="union", threshold=0.1)).endswith("source words below 0.1 stay so")
    assert str(Recipe(head=3)) == "layer -1, head 3, row offset 0, not symmetrised"


def random_links(random, size):
    return {tuple(map(int, link)) for link in random.integers(0, size, (int(1.5 * size), 2))}


@pytest.mark.parametrize("seed", range(20))
def test_joining_keeps_between_intersection_and_union(seed):
    """What holds whatever the order in which links are grown, checked link by link."""
    random = np.random.default_rng(seed)
    forward, backward = random_links(random, 7), random_links(random, 7)
    assert symmetrised(forward, backward, "union") == forward | backward
    assert symmetrised(forward, backward, "intersection") == forward & backward
    grown = symmetrised(forward, backward, "grow-diag")
    assert forward & backward <= grown <= forward | backward
    for link in (forward | backward) - grown:  # Nothing that could still grow was left out.
        touches = any(max(abs(link[0] - s), abs(link[1] - t)) == 1 for s, t in grown)
        full = {s for s, _ in grown} >= {link[0]} and {t for _, t in grown} >= {link[1]}
        assert not touches or full
    assert grown == symmetrised(backward, forward, "grow-diag")


def test_anchors_are_words_spelt_alike_once_on_either_side():
    source = ["Press", "Ctrl", "and", "F5", "and", "a", "OK"]
    target = ["Appuyez", "sur", "F5", "et", "Ctrl", "a", "OK", "OK"]
    assert anchors(source, target) == {(1, 4), (3, 2)}
    assert anchors([], target) == set()


def test_scores_of_phrases_by_hand():
    """Words 0 and 1 are a phrase with 1 to 3; one link is astray, and target word 3 has none."""
    phrases = [({0, 1}, {1, 2, 3}), ({4}, {0})]
    links = {(0, 1), (1, 1), (1, 2), (2, 3), (4, 0), (3, 4)}
    # Inside 3 + 1, touching 4 + 1, covered words 4 + 2, words 5 + 2.
    assert phrase_counts(links, phrases).tolist() == [4, 5, 6, 7]
    scores = phrase_scores([links, set()], [phrases, []])
    assert scores["aer"] == pytest.approx(100 * (1 - 10 / 12))
    assert scores["precision"] == pytest.approx(80) and scores["recall"] == pytest.approx(600 / 7)


def test_every_link_inside_is_right_and_every_word_needs_one():
    whole = [({0, 1}, {0, 1})]
    for links in ({(0, 0), (1, 1)}, {(0, 1), (1, 0)}, {(s, t) for s in (0, 1) for t in (0, 1)}):
        assert phrase_scores([links], [whole])["aer"] == pytest.approx(0)
    assert phrase_scores([set()], [whole])["aer"] == 100
    with pytest.raises(ValueError, match="predicted has 1 sentences and phrases 2"):
        phrase_scores([set()], [whole, whole])
