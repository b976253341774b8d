"""Tagged phrases as gold: links of a run's tokens scored against them, and tags that are placed."""

import numpy as np
import pytest

from crossattn.decode import markup
from crossattn.train.alignment import Recipe, phrase_scores
from experiments.bench import markup as bench
from experiments.runs import parameters
from experiments.settings import saved_config
from experiments.tasks import make_task, tags
from experiments.tasks.alignment import aer_interval, choose_recipe, phrased_pairs
from experiments.tasks.generation import Attention

SOURCE, TARGET = "the View menu.", "le menu Affichage."
SPANS = np.array([[0, 3], [4, 6], [6, 8], [9, 13], [13, 14], [0, 0]])
TARGET_SPANS = np.array([[0, 2], [3, 7], [8, 12], [12, 17], [17, 18], [0, 0]])
RIGHT = [0, 3, 1, 2, 4, 5]  # the source token of each target token
EXAMPLE = {
    "source": SOURCE,
    "target": TARGET,
    "phrases": np.array([[4, 8, 8, 17]]),
    "kinds": ["emph"],
}


class Reader:
    """A translator whose second head reads the right tokens, and whose first reads in order."""

    def attention(self, pairs):
        assert pairs == [(SOURCE, TARGET)] * len(pairs)
        heads = np.stack([np.eye(6), np.eye(6)[RIGHT]]) * 0.9 + 0.1 / 6
        return [Attention(heads[None], [""] * 6, [""] * 6, SPANS, TARGET_SPANS) for _ in pairs]


def test_links_of_tokens_are_scored_against_tagged_phrases():
    plain = EXAMPLE | {"phrases": EXAMPLE["phrases"][:0], "kinds": []}
    pairs = phrased_pairs(Reader(), [plain, EXAMPLE, plain, EXAMPLE, EXAMPLE], limit=2)
    assert [pair.phrases for pair in pairs] == [[({1, 2}, {2, 3})]] * 2
    recipe, aer = choose_recipe(pairs)
    assert (recipe.head, recipe.row_offset, aer) == (1, 0, 0.0)
    in_order = Recipe(head=0)
    links = [pair.links(in_order) for pair in pairs]
    # Links 1-1, 2-2 and 3-3 touch the phrase, and 2-2 covers two of four words.
    expected = 100 * (1 - 3 / 7)
    assert phrase_scores(links, [pair.phrases for pair in pairs])["aer"] == pytest.approx(expected)
    assert aer_interval(pairs, in_order).value == pytest.approx(expected)
    assert phrased_pairs(Reader(), [plain]) == []


def test_pairs_of_a_file_are_drawn_together():
    """One file of a right and a wrong pair has the same errors in every draw."""
    wrong = EXAMPLE | {"phrases": np.array([[9, 13, 8, 17]])}
    alone, together = (
        aer_interval(phrased_pairs(Reader(), [e | more for e in (EXAMPLE, wrong)]), Recipe(head=1))
        for more in ({}, {"family": "a.html"})
    )
    assert alone.low < alone.value < alone.high
    assert together.low == together.high == alone.value == together.value


def test_phrases_that_the_model_does_not_read_are_left_out():
    beyond = EXAMPLE | {
        "phrases": np.array([[4, 8, 8, 17], [20, 22, 30, 33]]),
        "kinds": ["emph"] * 2,
    }
    assert [len(pair.phrases) for pair in phrased_pairs(Reader(), [beyond])] == [1]


def test_placed_tags_are_counted_against_the_translators():
    marked = tags.tagged(EXAMPLE)
    assert markup.write(marked, SOURCE, [(4, 8)]) == "the <emph>View</emph> menu."
    spans = markup.place(marked, TARGET, np.eye(6)[RIGHT], SPANS, TARGET_SPANS)
    assert spans == [(8, 17)]
    assert tags.right_places(spans, EXAMPLE, TARGET) == 1
    assert tags.right_places([(8, 16)], EXAMPLE, TARGET) == 0
    assert bench.overlap([(8, 16)], EXAMPLE) == (16, 17)
    assert bench.right_words([(0, 9)], EXAMPLE, "AFFICHAGE, le menu") == 1
    assert bench.right_words([(0, 2)], EXAMPLE, "le menu Affichage") == 0


def test_the_f1_of_training_counts_tags_with_all_characters_right():
    beside = EXAMPLE | {
        "phrases": np.array([[4, 8, 8, 17], [9, 13, 0, 2]]),  # "menu" is no "le"
        "kinds": ["emph", "input"],
    }
    assert tags.tag_f1(Reader(), [EXAMPLE, beside], Recipe(head=1)) == pytest.approx(200 / 3)
    assert tags.tag_f1(Reader(), [EXAMPLE], Recipe(head=0)) == 0


def test_a_tag_inside_another_has_it_as_parent_whatever_their_order():
    nested = EXAMPLE | {
        "phrases": np.array([[9, 13, 3, 7], [4, 13, 3, 17]]),
        "kinds": ["input", "emph"],
    }
    marked = tags.tagged(nested)
    assert [(e.opening, e.parent) for e in marked.elements] == [("<input>", 1), ("<emph>", -1)]


def test_methods_without_a_model_weigh_words():
    pairs = [("the cat", "le chat"), ("the dog", "le chien"), ("a cat", "un chat")]
    found = bench.model_1(pairs, [("the cat", "chat le")])[0]
    assert found.weights.argmax(1).tolist() == [1, 0]
    assert found.source_spans.tolist() == [[0, 3], [4, 7]]
    counted = bench.by_hmm(pairs, [("the cat", "chat le")])[0]
    assert counted.weights.argmax(1).tolist() == found.weights.argmax(1).tolist()
    in_order = bench.proportion("one two three", "un deux trois")
    assert in_order.weights.tolist() == np.eye(3).tolist()
    assert bench.proportion("", "un").weights.shape == (1, 0)


@pytest.mark.slow
def test_an_evaluation_logs_the_f1_of_tags_if_asked(tiny_run, monkeypatch):
    task = make_task(saved_config(tiny_run), tiny_run / "assets")
    params = parameters(task, tiny_run)
    assert "tag_f1" not in task.evaluate(params, 1)
    examples = [
        e
        | {"phrases": np.array([[*e["source_spans"][s], *e["target_spans"][t]]]), "kinds": ["emph"]}
        for e in task.examples("validation", 6)
        for s, t in e["links"][:1]
    ]
    monkeypatch.setattr(task, "examples", lambda split, count=None: examples[:count])
    monkeypatch.setattr(task, "split_loss", lambda params, split: {})
    with task.config.unlocked():
        task.config.evaluate.tags = 4
    found = task.evaluate(params, 1)["tag_f1"]
    seen = task.translator(params).attention([(e["source"], e["target"]) for e in examples[:4]])
    spans = [
        tags.placed(tags.tagged(e), e["target"], own, Recipe(layer=None))[0]
        for e, own in zip(examples, seen, strict=False)
    ]
    right = [span == tuple(e["phrases"][0, 2:]) for span, e in zip(spans, examples, strict=False)]
    assert found == pytest.approx(100 * np.mean(right))
