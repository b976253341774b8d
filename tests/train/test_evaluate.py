import math
import sys

import numpy as np
import pytest
import sacrebleu

from crossattn.train.errors import MissingPackage
from crossattn.train.evaluate import (
    loss_scores,
    rouge_scores,
    translation_scores,
    word_error_rate,
    word_errors,
)
from tests.peers import package

REFERENCES = ["le chat noir voit un petit oiseau", "la maison blanche", "deux chiens heureux"]
HYPOTHESES = ["le chat noir voit un oiseau", "la maison est blanche", "deux chiens heureux"]


def test_scores_are_sacrebleus_own_with_their_signatures():
    scores = translation_scores(HYPOTHESES, REFERENCES)
    assert scores["bleu"] == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score
    assert scores["chrf"] == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score
    assert "tok:13a" in scores["bleu_signature"] and "nc:6" in scores["chrf_signature"]
    characters = translation_scores(HYPOTHESES, REFERENCES, tokenize="char")
    assert "tok:char" in characters["bleu_signature"]
    assert characters["bleu"] != scores["bleu"]


def test_without_sacrebleu_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(MissingPackage, match="pip install 'crossattn"):
        translation_scores(HYPOTHESES, REFERENCES)


@pytest.mark.parametrize("weight", [8.0, 0.125])
def test_losses_are_means_by_weight(weight):
    means = {"loss": 4.0, "nll": math.log(20.0), "correct": 0.25}
    scores = loss_scores({"weight": weight} | {name: weight * x for name, x in means.items()})
    accuracy = means.pop("correct")
    assert scores == pytest.approx(means | {"perplexity": 20.0, "accuracy": accuracy})


def test_extreme_sums_still_have_finite_scores():
    scores = loss_scores({"weight": 1.0, "nll": 5000.0, "loss": 5000.0, "correct": 0.0})
    assert math.isfinite(scores["perplexity"])
    scores = loss_scores({"weight": 0.0, "nll": 0.0, "loss": 0.0, "correct": 0.0})
    assert scores == {"loss": 0.0, "nll": 0.0, "perplexity": 1.0, "accuracy": 0.0}


def test_word_errors_count_words_that_mean_something_else():
    package("jiwer", "speech")
    package("whisper_normalizer", "speech")
    said = ["Press one, please.", "It's twenty", "(silence)"]
    assert word_error_rate(said, ["press 1 please", "it is 20", "noise"]) == 0.0
    # Of six words one is wrong, one is missing and one is put in.
    wrong = word_error_rate(said, ["press two", "it is 20 now", ""])
    assert wrong == pytest.approx(100 * 3 / 6)
    each = word_errors(said, ["press two", "it is 20 now", ""])
    assert each.tolist() == [[2, 3], [1, 3], [0, 0]]


def test_rouge_counts_stemmed_words_pairs_and_subsequences():
    package("rouge_score", "summaries")
    right = ["accept, accept4 - accept a connection on a socket", "opens the file", "close a file"]
    said = ["accepting connections on some socket", "open a File!", ""]

    def f1(common, own, wanted):
        return 200 * common / (own + wanted)

    scores = rouge_scores(said, right)
    # accept connect on socket, of five words and eight; pairs: connect on; open file, of three and three.
    np.testing.assert_allclose(scores["rouge1"], [f1(4, 5, 8), f1(2, 3, 3), 0])
    np.testing.assert_allclose(scores["rouge2"], [f1(1, 4, 7), 0, 0])
    np.testing.assert_allclose(scores["rougeL"], [f1(4, 5, 8), f1(2, 3, 3), 0])
    swapped = rouge_scores(["socket connection"], ["connection socket"])
    assert swapped["rouge1"] == 100 and swapped["rougeL"] == pytest.approx(50)


def test_rouge_of_another_script_is_refused():
    package("rouge_score", "summaries")
    with pytest.raises(ValueError, match="'Γάτα και σκύλος' has none"):
        rouge_scores(["a cat"], ["Γάτα και σκύλος"])


def test_without_rouge_score_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(MissingPackage, match=r"pip install 'crossattn\[summaries\]'"):
        rouge_scores(["a"], ["a"])
