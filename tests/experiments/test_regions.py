"""Regions of pages are classified by the launchers, their scores are what they say, and pages are drawn."""

import json

import jax
import numpy as np
import pytest
from sklearn.metrics import f1_score

from configs import help_pages
from crossattn.data.errors import DataError
from experiments.tasks import find
from tests.experiments.conftest import ROOT
from tests.peers import package

package("pymupdf", "pages")
CONFIG = f"--config={ROOT}/configs/help_pages.py:tiny"


@pytest.fixture(scope="module")
def task():
    return find("regions")(help_pages.get_config("tiny"))


def test_scores_are_those_of_counts(task):
    rng = np.random.default_rng(0)
    label, said = rng.integers(0, 3, (3, 20)), rng.integers(0, 4, (3, 20))  # a table is never meant
    there = rng.random((3, 20)) < 0.8
    sums = {name: float(x) for name, x in task._counts(said, label, there).items()}
    right = (there & (said == label)).sum()
    scores = task.scores(
        sums | {"loss": 7.0, "accuracy": float(right), "weight": float(there.sum())}
    )
    f1 = f1_score(label[there], said[there], average=None)
    assert [scores[f"f1_{name}"] for name in task.classes] == pytest.approx([*f1, 0])
    assert scores["macro_f1"] == pytest.approx(f1.mean()) and len(f1) == 4 and f1[3] == 0
    assert scores["accuracy"] == pytest.approx(right / there.sum())


def test_baselines_of_boxes_and_words_are_fitted_to_training(task):
    found = task.baselines("test")
    labels = [label for page in task.corpus.split("test") for label in page["label"]]
    train = [label for page in task.corpus.split("train") for label in page["label"]]
    most = max(set(train), key=train.count)
    frequent = found["most_frequent_class_accuracy"]
    assert frequent == pytest.approx(labels.count(most) / len(labels))
    for name in ("boosted_trees_boxes", "character_ngrams_words", "logistic_boxes_and_text"):
        assert frequent < found[f"{name}_accuracy"] and 0 < found[f"{name}_macro_f1"] <= 1


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return tmp_path_factory.mktemp("regions") / "run"


def test_pages_are_learnt_scored_and_drawn(launched, refused, workdir, tmp_path):
    named = f"--workdir={workdir}"
    code, out, err = launched("train", CONFIG, named)
    assert code == 0 and "macro_f1" in out, err
    code, _, err = launched("evaluate", named)
    scores = json.loads((workdir / "results-test.json").read_text())
    assert code == 0 and scores.keys() >= {"accuracy", "macro_f1", "accuracy_unseen"}, err
    picture = tmp_path / "page.png"
    code, out, err = launched("read_page", named, "--page=1", "--region=2", f"--plot={picture}")
    assert code == 0 and picture.stat().st_size > 10_000, err
    assert out.startswith("test/") and out.count("\n") >= 8
    assert "the test split has pages 0 to 11" in refused("read_page", named, "--page=12")
    assert "the page has regions 0 to 7" in refused("read_page", named, "--region=8")


def test_what_cannot_be_trained_or_read_is_one_line(refused, tmp_path, task):
    for override, said in (
        ("--config.model.reads=sound", "'sound'; expected one of both, text, picture"),
        ("--config.model.patch=5", "patch is 5; expected a divisor of the pictures' height"),
        ("--config.data.name=phrases", "phrases has no classes of regions"),
        ("--config.model.name=decoder", "lists those of a regions by a decoder"),
    ):
        found = refused("train", CONFIG, override, f"--workdir={tmp_path / 'run'}")
        assert said in found, found
    with pytest.raises(DataError, match="page none has no regions; there is nothing to read"):
        task.read_page({}, {"id": "none", "text": []})


def test_outcomes_are_the_scores_by_region_and_know_which_texts_are_new(task):
    params = task.init(jax.random.key(0))
    results = task.report(params, "test")
    examples, pages = results["examples"], task.corpus.split("test")
    assert np.mean(examples["accuracy"]) == pytest.approx(results["accuracy"])
    assert len(examples["group"]) == sum(len(page["label"]) for page in pages)
    known = {text for page in task.corpus.split("train") for text in page["text"]}
    new = [text not in known for page in pages for text in page["text"]]
    assert results["regions_unseen"] == sum(new)
    right = np.array(examples["accuracy"])[new]
    assert results["accuracy_unseen"] == pytest.approx(
        right.mean() if sum(new) else np.nan, nan_ok=True
    )
