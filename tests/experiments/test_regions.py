"""Regions of pages are classified by the launchers, their scores are what they say, and pages are drawn."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import f1_score

from configs import help_pages
from crossattn.data.errors import DataError
from crossattn.data.pipeline import feature_eval_batches
from experiments.tasks import find
from tests.experiments.conftest import ROOT
from tests.experiments.test_explore import views_of
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


def test_baselines_read_what_the_model_reads(task):
    pages, tokenizer = task.corpus.split("test"), task.corpus.tokenizer
    (item,) = feature_eval_batches(list(pages), task.features, batch_size=len(pages))
    there = item.batch["label_segment_ids"] > 0
    views, labels = task.vectors("test")
    assert views.keys() == {"order", "picture", "text", "words"}
    np.testing.assert_array_equal(views["picture"], item.batch["pictures"][there].reshape(-1, 256))
    np.testing.assert_array_equal(labels, item.batch["label"][there])
    tokens = item.batch["text"][there]
    counts = [np.bincount(row[row > 0], minlength=tokenizer.vocab_size) for row in tokens]
    np.testing.assert_array_equal(views["text"], counts)
    assert views["words"].tolist() == [tokenizer.decode(row.tolist()) for row in tokens]
    assert views["order"][:9].tolist() == [[i, 8] for i in range(8)] + [[0, 8]]
    config = help_pages.get_config("text,tiny")
    assert find("regions")(config).vectors("test")[0].keys() == {"order", "text", "words"}
    config.data.boxes = True
    assert find("regions")(config).vectors("test")[0]["boxes"].shape == (len(labels), 14)


@pytest.mark.slow
def test_without_boxes_a_region_is_seen_in_its_place_alone(task):
    """Boxes change nothing; where a region stands in the order of its page does."""
    params = task.init(jax.random.key(0))
    (item,) = feature_eval_batches([task.corpus.split("test")[0]], task.features, batch_size=1)
    batch = jax.tree.map(jnp.asarray, dict(item.batch))
    call = jax.jit(lambda batch: task.hidden(task.bind(params), batch))
    moved = call(batch | {"boxes": batch["boxes"] / 2})
    np.testing.assert_array_equal(moved, call(batch))
    later = call(batch | {"label_positions": batch["label_positions"] + 1})
    assert np.abs(later - call(batch)).max() > 1e-3


@pytest.mark.slow  # test_classification fits some
def test_baselines_are_fitted_to_training(task, monkeypatch):
    whole = task.corpus.split
    monkeypatch.setattr(task.corpus, "split", lambda name: list(whole(name))[:40])
    found = task.baselines("test")
    labels = [label for page in task.corpus.split("test") for label in page["label"]]
    train = [label for page in task.corpus.split("train") for label in page["label"]]
    most = max(set(train), key=train.count)
    frequent = found["most_frequent_class_accuracy"]
    assert frequent == pytest.approx(labels.count(most) / len(labels))
    for name in (
        "boosted_trees_order",
        "character_ngrams_words",
        "logistic_order_and_picture_and_text",
    ):
        assert frequent < found[f"{name}_accuracy"] and 0 < found[f"{name}_macro_f1"] <= 1


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return tmp_path_factory.mktemp("regions") / "run"


@pytest.mark.slow
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
    page = tmp_path / "page.html"
    code, _, err = launched("explore", named, "1", f"--out={page}")
    (view,) = views_of(page)
    regions = len(view["tokens"])
    assert code == 0 and view["kind"] == "page" and view["shape"] == [1, 1, regions, regions], err
    assert len(view["memory"]["boxes"]) == regions == out.count("\n") - 1
    assert "there is no page '24'; the test split has 0 to 23" in refused("explore", named, "24")
    assert "the test split has pages 0 to 23" in refused("read_page", named, "--page=24")
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


@pytest.mark.slow
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
