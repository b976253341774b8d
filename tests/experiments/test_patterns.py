"""Patterns of heads of a run: in words as gold, at the rows where a head reads its words."""

import numpy as np
import pytest

from crossattn.analysis.patterns import of_links, patterns
from experiments.bench.patterns import of_heads
from experiments.tasks.alignment import Aligned
from experiments.tasks.generation import Attention
from tests.experiments.test_configs import get_config

SOURCE, TARGET = "one two three four", "trois deux un quatre"
LINKS = [(0, 2), (1, 1), (2, 0), (3, 3)]
OFFSETS = [[0, 1], [0, 2]]
"""The row offset at which each head of two layers reads; head 1 of the last layer learnt links."""


def pieces(text):
    """Spans of words, each of two halves, and of the end, which has no characters."""
    words, start = [], 0
    for word in text.split():
        words.append((start, start + len(word)))
        start += len(word) + 1
    halves = [h for a, b in words for h in ((a, (a + b) // 2), ((a + b) // 2, b))]
    return np.array(words), np.array([*halves, (0, 0)])


@pytest.fixture
def pair():
    """Every half of a target word reads both halves of its source word alike."""
    (sources, source), (targets, target) = map(pieces, (SOURCE, TARGET))
    weights = np.zeros((2, 2, len(target), len(source)))
    weights[..., -1] = 1.0  # the end, where there is no word to read
    word_of = {t: s for s, t in LINKS}
    for layer, head in np.ndindex(2, 2):
        for token in range(len(target) - 1):
            if (row := token + OFFSETS[layer][head]) < len(target):
                weights[layer, head, row] = 0.0
                first = 2 * word_of[token // 2]
                weights[layer, head, row, first : first + 2] = 0.5
    attention = Attention(weights, [], [], source, target)
    return Aligned(attention, sources, targets, set(LINKS), None, None)


def test_a_head_that_follows_gold_has_the_patterns_of_gold(pair):
    config = get_config("libreoffice", "tiny")
    config.loss.update(alignment="hmm", alignment_head=1)
    found = of_heads([pair], config)
    gold = patterns(of_links(LINKS, 4, 4))
    assert [found[0, 0], found[1, 0], found[1, 1]] == [[pytest.approx(gold)]] * 3
    assert found[0, 1] != [pytest.approx(gold)]
    config.evaluate.alignment.row_offset = 1
    assert of_heads([pair], config)[0, 1] == [pytest.approx(gold)]
