"""Summaries are scored by ROUGE, held to baselines that need no model, and compared with intervals."""

import json
import shutil

import jax
import numpy as np
import pytest

from configs import man_pages
from crossattn.decode import constraints
from experiments.tasks import make_task
from experiments.tasks.copied import nearest
from tests.experiments.conftest import ROOT
from tests.peers import package

CONFIG = f"--config={ROOT}/configs/man_pages.py:generate,tiny"
SHORT = ("--config.train.steps=2", "--config.checkpoint.every=2", "--config.evaluate.examples=4")
TRAIN = [
    ("Opens a file. It may fail.", "open - open a file"),
    ("Reads from a file descriptor into memory.", "read - read bytes"),
    ("The cosine of an angle x!  In radians.", "cos - cosine"),
    ("The sine of an angle x.", "cos - cosine"),
]


@pytest.fixture
def task(monkeypatch):
    package("rouge_score", "summaries")
    task = make_task(man_pages.get_config("generate,tiny"))
    splits = {
        "train": TRAIN,
        "validation": [("one two three four five six seven", "one two three four")],
        "test": [("Opens a file again. And more.", "open - open a file"), TRAIN[1]],
    }
    for name, pairs in splits.items():
        own = [{"id": str(i), "source": s, "target": t} for i, (s, t) in enumerate(pairs)]
        task.corpus._splits[name] = own
    return task


def test_scores_are_means_of_rouge_scores_own(task):
    from rouge_score.rouge_scorer import RougeScorer

    examples = task.examples("test")
    texts = ["open a file", "a descriptor is read"]
    scores = task.text_scores(examples, texts)
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    each = [scorer.score(e["target"], text) for e, text in zip(examples, texts, strict=True)]
    for name in ("rouge1", "rouge2", "rougeL"):
        own = [100 * x[name].fmeasure for x in each]
        assert scores[name] == pytest.approx(np.mean(own))
        assert scores["examples"][name] == pytest.approx(own)
    assert 0 < scores["rouge1"] < 100 and scores["examples"]["weight"] == [1.0, 1.0]
    assert scores["examples"]["group"] == [e["id"] for e in examples]
    kin = [e | {"family": "open"} for e in examples]
    assert task.text_scores(kin, texts)["examples"]["group"] == ["open"] * 2


def test_baselines_are_what_they_are_called(task):
    """ "open - open a file" is nearest to the first page of the test, whose first sentence opens a file."""
    found = task.baselines("test")

    def rouge1(*texts):
        return task.text_scores(task.examples("test"), texts)["rouge1"]

    assert found["lead_1_rouge1"] == rouge1("Opens a file again.", TRAIN[1][0])
    # Four words: those are the validation summary.
    assert found["lead_words_rouge1"] == rouge1("Opens a file again.", "Reads from a file")
    assert found["nearest_rouge1"] == 100
    assert found["most_frequent_rouge1"] == rouge1("cos - cosine", "cos - cosine")
    assert np.isfinite(found["trigrams_nll"])


def test_the_nearest_text_is_that_of_the_largest_cosine():
    random = np.random.default_rng(0)
    words = [f"w{i}" for i in range(30)]
    pages = [" ".join(random.choice(words, 20)) for _ in range(12)]
    train = [{"source": page, "target": f"summary {i}"} for i, page in enumerate(pages[:8])]
    sets = [{w: page.split().count(w) for w in page.split()} for page in pages]

    def vector(counts):
        idf = {w: 1 + np.log(9 / (1 + sum(w in own for own in sets[:8]))) for w in words}
        x = np.array([(1 + np.log(counts[w])) * idf[w] if w in counts else 0.0 for w in words])
        return x / np.linalg.norm(x)

    known = np.stack([vector(own) for own in sets[:8]])
    wanted = [f"summary {(known @ vector(own)).argmax()}" for own in sets[8:]]
    assert nearest(train, pages[8:]) == wanted and len(set(wanted)) > 1


@pytest.mark.slow
def test_a_run_reports_rouge_that_compare_gives_intervals(launched, tmp_path):
    package("rouge_score", "summaries")
    run = tmp_path / "one"
    code, _, err = launched("train", CONFIG, *SHORT, f"--workdir={run}")
    assert code == 0, err
    code, out, err = launched("evaluate", f"--workdir={run}", "--limit=12", "--split=test")
    assert code == 0 and "rougeL" in out and "bleu" not in out, err
    results = json.loads((run / "results-test.json").read_text())
    assert results["rouge2"] == pytest.approx(np.mean(results["examples"]["rouge2"]))
    assert len(results["samples"]) == 12 and results["samples"][0].keys() >= {"text"}
    other = shutil.copytree(run, tmp_path / "other")
    results["examples"]["rouge1"] = [value + 50 for value in results["examples"]["rouge1"]]
    (other / "results-test.json").write_text(json.dumps(results))
    code, out, err = launched("compare", run, other, "--split=test")
    assert code == 0, err
    (row,) = [line for line in out.splitlines() if " rouge1 " in line and " to " in line]
    assert "differs" in row


def test_a_summary_in_another_script_is_one_line(refused, tmp_path):
    package("rouge_score", "summaries")
    table = tmp_path / "greek.tsv"
    table.write_text("source\ttarget\n" + "a cat\tμια γάτα\n" * 200, encoding="utf-8")
    said = refused(
        "train", CONFIG, f"--config.data.name=files:{table}", f"--workdir={tmp_path}/run"
    )
    assert "'μια γάτα' has none" in said and "task 'translation'" in said


@pytest.mark.slow
def test_the_config_says_whether_a_summary_may_repeat_trigrams(task):
    """An untrained model would write one token again and again."""
    params, texts = task.init(jax.random.key(0)), [source for source, _ in TRAIN]

    def written(**options):
        return task.translator(params, **options).texts(texts)

    own = constraints.no_repeat_ngram(3)
    assert written() == written(no_repeat_ngram=None, processors=(own,))
    assert written() != written(no_repeat_ngram=None)
