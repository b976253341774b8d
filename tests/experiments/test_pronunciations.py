"""Errors of phonemes, against jiwer's own rate and by hand; words with relatives; runs and neighbours."""

from types import SimpleNamespace

import numpy as np
import pytest

from configs import rnn_translation
from crossattn.data import fetch
from crossattn.data.sources import phrases
from crossattn.data.tokenizers import train_tokenizer
from experiments import train
from experiments.bench import pronunciations
from experiments.runs import parameters
from experiments.settings import check
from experiments.tasks import make_task
from tests.peers import peer

KNOWN = {
    "read": ["R EH1 D".split(), "R IY1 D".split()],
    "cat": ["K AE1 T".split()],
}


def test_a_word_has_the_errors_to_its_nearest_pronunciation():
    said = ["R IY0 D".split(), "AE1 T S".split()]
    assert pronunciations.errors(said, KNOWN, list(KNOWN)).tolist() == [1, 2]
    assert pronunciations.errors(said, KNOWN, list(KNOWN), stress=False).tolist() == [0, 2]
    assert pronunciations.errors([[], []], KNOWN, list(KNOWN)).tolist() == [3, 3]


def test_distances_are_those_of_a_table_of_all_edits():
    peer("jiwer")
    random = np.random.default_rng(27)
    for _ in range(50):
        said, right = ([*random.choice(["K", "AE1", "T"], random.integers(1, 7))] for _ in range(2))
        table = np.zeros((len(said) + 1, len(right) + 1), int)
        table[:, 0], table[0] = np.arange(len(said) + 1), np.arange(len(right) + 1)
        for i, own in enumerate(said, 1):
            for j, other in enumerate(right, 1):
                around = table[i - 1, j] + 1, table[i, j - 1] + 1
                table[i, j] = min(*around, table[i - 1, j - 1] + (own != other))
        assert pronunciations.distance(said, right) == table[-1, -1]


@pytest.mark.parametrize(
    ("word", "related"), [("cats", True), ("ca", False), ("cat", False), ("walk", True)]
)
def test_a_relative_is_the_word_with_or_without_an_ending(word, related):
    train = {"cat": [], "walked": []}
    assert pronunciations.has_relative(word, train) is related


def test_the_nearest_word_shares_the_most_ngrams():
    pytest.importorskip("sklearn")
    train = {"cat": [["K"]], "bread": [["B"], ["C"]], "dog": [["D"]]}
    assert pronunciations.nearest(["cats", "breads", "dogged"], train) == [["K"], ["B"], ["D"]]


@pytest.mark.parametrize("attention", rnn_translation.ATTENTION)
@pytest.mark.parametrize("data", rnn_translation.DATA)
def test_every_attention_has_a_config_of_every_data(attention, data):
    config = rnn_translation.get_config(f"{data},{attention}")
    assert config == rnn_translation.get_config(f"{attention},{data}")
    check(config)
    tiny = rnn_translation.get_config(f"{data},{attention},tiny")
    assert tiny == rnn_translation.get_config(f"{attention},tiny")


def test_a_token_is_a_letter_or_a_phoneme_without_its_stress():
    options = rnn_translation.get_config("phonemes").tokenizer
    words = ["AO1 L B AO0 R G", "K AE1 T", "R IY1 D", "B AO1 L"] * 20
    tokenizer = train_tokenizer(words, options.vocab_size, options.kind)
    assert len(tokenizer.encode("K AE1 T B AO1 L")) == 6 + 2


@pytest.mark.slow
def test_a_run_writes_of_each_word_what_its_translator_writes(tmp_path, monkeypatch):
    """The second of two runs that were trained as one, if it is named."""
    monkeypatch.setattr(phrases, "NUM_PAIRS", 540)
    config = rnn_translation.get_config("none,tiny")
    config.train.update(steps=1, seeds=2)
    assert train.run(config, tmp_path).status == "finished"
    words = ["the black cat", "sleeps"]
    task = make_task(config, tmp_path / "assets")
    found = {}
    for member in (None, "seed_1"):
        translator = task.translator(parameters(task, tmp_path, member=member))
        said, attention = pronunciations.of_run(task, tmp_path, words, member)
        assert said == [text.split() for text in translator.texts(words)]
        assert not attention
        found[member] = said
    assert found[None] != found["seed_1"]


def test_attention_reads_on_where_its_peak_does_not_go_back():
    peaks = [[0, 1, 1, 3, 2], [2, 0, 1]]  # the last token ends the text
    read = [SimpleNamespace(weights=np.eye(4)[own][None, None]) for own in peaks]
    assert pronunciations.reads_on(read) == 3 / 4


@pytest.mark.skipif(
    not (fetch.cache_dir() / "weights" / "g2p-en").is_dir(),
    reason="not fetched yet: python -m experiments.fetch_weights g2p-en",
)
def test_g2p_writes_what_its_own_code_writes():
    words = {"kubernetes": "K AH0 B ER1 N AH0 T S", "luong": "L UW1 AO0 NG"}
    assert pronunciations.published(list(words)) == [own.split() for own in words.values()]
