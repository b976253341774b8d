"""Runs compared: what their tables say, and what is refused."""

import json

import jax
import pytest

from configs import rnn_translation
from crossattn.data.sources import phrases
from crossattn.train.errors import TrainError
from crossattn.train.records import read_run
from experiments import compare, launch, report, text_scores
from experiments.evaluate import of_all
from experiments.tasks import make_task


def write(folder, settings, log, **results):
    """A run as training and evaluation leave it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    for split, values in results.items():
        (folder / f"results-{split}.json").write_text(json.dumps(values))
    return folder


def texts(*said):
    return [
        {"translation": s, "reference": f"the {i} black cats sleep here"}
        for i, s in enumerate(said)
    ]


@pytest.fixture
def runs(tmp_path):
    """Three runs: the second is right more often, the third has two seeds and no results."""
    log = [
        {"step": 10, "kind": "train", "loss": 3.0},
        {"step": 10, "kind": "eval", "loss": 2.0, "accuracy": 0.5},
        {"step": 20, "kind": "eval", "loss": None, "accuracy": 0.5},
    ]
    members = [{"step": 20, "kind": "eval", "loss": 1.5, "a/loss": 1.0, "b/loss": 2.0}]
    group = [i // 2 for i in range(40)]
    right = [float(i % 4 == 0) for i in range(40)]
    more = [float(i % 4 != 1) for i in range(40)]
    half = {"accuracy": 0.25, "examples": dict(group=group, weight=[1.0] * 40, accuracy=right)}
    good = {"accuracy": 0.75, "examples": dict(group=group, weight=[1.0] * 40, accuracy=more)}
    half["samples"] = texts(*["a dog barks there"] * 20)
    good["samples"] = texts(*[f"the {i} black cats sleep" for i in range(20)])
    paths = (
        write(tmp_path / "a", {"optim.learning_rate": 1e-3, "seed": 0}, log, test=half),
        write(tmp_path / "b", {"optim.learning_rate": 2e-3, "seed": 0}, log, test=good),
        write(tmp_path / "c", {"seed": 0, "train.seeds": 2}, members),
    )
    return {path.name: read_run(path) for path in paths}


def test_a_run_reads_as_plain_records(runs):
    assert runs["a"].curve("eval", "loss") == ([10], [2.0])
    assert runs["c"].members("loss") == ["a", "b"]
    assert runs["b"].results["test"]["accuracy"] == 0.75


def test_baselines_stand_in_a_table_of_their_own(runs):
    runs["b"].results["test"]["baseline_mlp_accuracy"] = 0.5
    assert compare.baselines(runs, "test") == [("baseline", "score"), ("mlp_accuracy", "0.5")]
    assert not any("baseline" in name for name in compare.scores(runs, "test")[0])


def test_only_keys_that_differ_are_shown(runs):
    assert compare.differing(runs) == [
        ("key", "a", "b", "c"),
        ("optim.learning_rate", "0.001", "0.002", "not set"),
        ("train.seeds", "not set", "not set", "2"),
    ]


def test_scores_have_intervals_of_examples_or_of_members(runs):
    head, first, second, third = compare.scores(runs, "test")
    rows = [dict(zip(head, row, strict=True)) for row in (first, second, third)]
    assert rows[0]["accuracy"].startswith("0.25 (0.1") and rows[1]["accuracy"].startswith("0.75 (")
    assert rows[2]["loss"] == "1.5 (1 to 2)" and rows[2]["accuracy"] == ""


def test_scores_of_training_are_not_passed_off_as_those_of_the_split(runs):
    head, *rows = compare.scores(runs, "test")
    assert [row[head.index("split")] for row in rows] == ["test", "test", "validation, in training"]
    named = {row[head.index("split")] for row in compare.scores(runs, "validation")[1:]}
    assert named <= {"validation, in training", ""}


def test_scores_have_the_step_and_the_member_that_were_evaluated(runs):
    runs["a"].results["test"] |= {"step": 10}
    runs["b"].results["test"] |= {"step": 15, "member": "seed_1"}
    head, *rows = compare.scores(runs, "test")
    assert head[:3] == ("run", "steps", "split") and "step" not in head[3:]
    assert [row[1:3] for row in rows[:2]] == [("10", "test"), ("15", "test, seed_1")]


def test_differences_are_paired_also_those_of_texts(runs):
    rows = compare.differences({name: runs[name] for name in "ab"}, "test")
    assert rows[1][:2] == ("b", "accuracy") and rows[1][3] == "differs"
    assert rows[1][2].startswith("0.5 (")
    bleu = [row for row in rows if row[1] == "BLEU"]
    assert [row[0] for row in bleu] == ["a", "b"]
    assert bleu[0][3] == "baseline" and float(bleu[1][3].removeprefix("p = ")) < 0.01


@pytest.mark.slow
def test_texts_with_groups_are_drawn_by_them(runs):
    for name in "ab":
        groups = [i // 2 for i in range(20)]
        runs[name].results["test"]["examples"] = dict(group=groups, weight=[1.0] * 20)
    rows = compare.differences({name: runs[name] for name in "ab"}, "test")
    bleu = [row for row in rows if row[1] == "BLEU"]
    assert [row[0] for row in bleu] == ["a", "b", "b"]
    assert [row[3] for row in bleu] == ["score", "score", "differs"]


@pytest.mark.parametrize("grouped", [False, True])
def test_bins_of_lengths_have_equal_counts_and_the_scores_of_their_texts(runs, grouped):
    """Runs of 20 texts: one is right about short sources, the other about all."""
    lengths = [1 + (7 * i) % 20 for i in range(20)]
    for name in "ab":
        results = runs[name].results["test"]
        for text, words in zip(results["samples"], lengths, strict=True):
            text["source"] = " ".join(["word"] * words)
            right = text["reference"]
            text["translation"] = right if words < 11 or name == "b" else "no"
        groups = [str(i) for i in range(20)] if grouped else []
        results["examples"] = dict(group=groups)
    results = {name: runs[name].results["test"] for name in "ab"}
    texts = text_scores.texts_of(results)
    assert texts is not None
    bins = text_scores.by_length(texts, 4, "13a")
    assert [(own.least, own.most, own.count) for own in bins] == [
        (1, 5, 5), (6, 10, 5), (11, 15, 5), (16, 20, 5),
    ]  # fmt: skip
    assert [own.scores["a"].value for own in bins] == pytest.approx([100, 100, 0, 0])
    assert [own.scores["b"].value for own in bins] == pytest.approx([100] * 4)
    said = [own.said["b"] for own in bins]
    if grouped:
        assert said == ["within its interval"] * 2 + ["differs"] * 2
    else:
        assert float(said[3].removeprefix("p = ")) < 0.01
    rows = compare.lengths(bins)
    assert rows[0] == ("length", "texts", "a", "b") and rows[1][:2] == ("1 to 5", "5")
    (axes,) = text_scores.draw(bins).axes
    lines = [line for line in axes.get_lines() if len(line.get_ydata()) == 4]
    assert [list(line.get_ydata()) for line in lines[::3]] == [
        pytest.approx([own.scores[name].value for own in bins]) for name in "ab"
    ]
    with pytest.raises(launch.Refused, match="--by_length is 21 of 20 texts"):
        text_scores.by_length(texts, 21, "13a")


def test_texts_of_members_have_their_mean_score_beside_those_of_one_run(runs):
    """Both seeds of c are of the examples of a and b: one writes the texts of a, the other those of b."""
    each = {f"seed_{i}": runs[name].results["test"] for i, name in enumerate("ab")}
    both = of_all(each)
    samples = both["samples"]
    assert set(samples[0]) == {"reference", "seed_0/translation", "seed_1/translation"}
    same = of_all({"seed_0": each["seed_0"], "seed_1": each["seed_0"]})["samples"]
    assert same == each["seed_0"]["samples"]
    runs["c"].results["test"] = {"samples": samples}
    rows = compare.differences(runs, "test")
    bleu = {
        row[0]: float(row[2].split()[0]) for row in rows if row[1] == "BLEU" and row[3] == "score"
    }
    assert bleu["c"] == pytest.approx((bleu["a"] + bleu["b"]) / 2, rel=1e-3)
    said = {row[0]: row[3] for row in rows if row[1] == "BLEU"}
    assert said["c"] == "differs"


def test_groups_of_texts_are_their_own_where_they_are_some_of_the_examples(runs):
    for name in "ab":
        samples = runs[name].results["test"]["samples"]
        runs[name].results["test"]["samples"] = [
            sample | {"group": i // 4} for i, sample in enumerate(samples)
        ]
    texts = text_scores.texts_of({name: runs[name].results["test"] for name in "ab"})
    assert texts is not None and list(texts.groups) == [i // 4 for i in range(20)]


@pytest.mark.slow
def test_translations_are_drawn_by_the_families_of_their_examples(monkeypatch):
    monkeypatch.setattr(phrases, "NUM_PAIRS", 540)
    task = make_task(rnn_translation.get_config("none,tiny"))
    params, plain = task.init(jax.random.key(0)), task.examples("test", 4)
    assert not text_scores.texts_of({"a": task.report(params, "test", limit=4)}).groups
    known = [e | {"family": file} for e, file in zip(plain, "xxyz", strict=True)]
    monkeypatch.setattr(task, "examples", lambda split, count=None: known[:count])
    assert text_scores.texts_of({"a": task.report(params, "test", limit=4)}).groups == [*"xxyz"]


def test_texts_without_sources_have_no_lengths(runs):
    texts = text_scores.texts_of({name: runs[name].results["test"] for name in "ab"})
    assert texts is not None
    with pytest.raises(launch.Refused, match="the texts of a have no source in words"):
        text_scores.by_length(texts, 2, "13a")


def test_runs_on_other_examples_are_refused(runs):
    runs["b"].results["test"]["examples"]["group"][0] = 7
    with pytest.raises(launch.Refused, match="a and b were evaluated on other examples"):
        compare.differences(runs, "test")


def test_of_runs_with_other_tokenizers_the_texts_alone_are_compared(runs):
    own = runs["b"].results["test"]
    own["examples"]["weight"] = [2 * weight for weight in own["examples"]["weight"]]
    del runs["c"]  # which has no texts
    rows = [row for row in compare.differences(runs, "test") if row[0] == "b"]
    assert ("b", "nll", "", "of other tokens: not compared") in rows
    assert [row[1] for row in rows if "of other" not in row[3]] == ["BLEU", "chrF2"]
    del own["samples"]  # as of language models
    assert [row for row in compare.differences(runs, "test")[1:]] == rows[:1]


def test_curves_have_bands_of_members_and_an_unknown_metric_is_refused(runs):
    figure = compare.curves(runs, "loss")
    axes = figure.axes[0]
    assert [line.get_label() for line in axes.get_lines()][-1] == "c" and len(axes.collections) == 1
    with pytest.raises(launch.Refused, match="'lost' in its log; expected one of accuracy,"):
        compare.curves(runs, "lost")


def test_the_page_has_tables_and_picture_inside(runs):
    tables = {"<Scores>": [("run", "x"), ("a&b", "1")], "Empty": [("run", "x")]}
    page = report.page("Runs", tables, compare.curves(runs, "loss"), "Curves")
    assert "&lt;Scores&gt;" in page and "a&amp;b" in page and "data:image/png;base64," in page
    assert "http" not in page and "Empty" not in page


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.json", None, "no run in"),
        ("config.json", "{", "no JSON"),
        ("metrics.jsonl", '{"step"\n{"step": 1, "kind": "eval"}\n', "line 1 of"),
    ],
)
def test_a_damaged_run_is_refused_in_a_sentence(runs, name, text, said):
    path = runs["a"].workdir / name
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(TrainError, match=said):
        read_run(path.parent)
