"""The table of all architectures: its rows find themselves, and hold what was measured."""

import json

import numpy as np
import pytest

from configs import emoji_group
from experiments import zoo
from experiments.settings import check
from experiments.tasks import make_task
from tests.experiments.test_configs import CONFIGS, get_config
from tests.peers import package


def test_every_config_is_a_row_or_is_the_same_as_one():
    found = zoo.experiments()
    assert {name.partition(":")[0] for name in found} == set(CONFIGS)
    for config in found.values():
        check(config)
    joined = zoo._joined(found)
    assert "t5_11b, t5_1b:span_corruption" in joined and "copy_task" in joined
    names = [name for together in joined for name in together.split(", ")]
    assert sorted(names) == sorted(found)


def test_rows_are_measured_and_one_that_fails_stops_no_other(launched, monkeypatch, tmp_path):
    good, bad = get_config("lm_small", "tiny"), get_config("lm_small", "tiny")
    good.train.steps, bad.model.num_heads = 4, 5
    monkeypatch.setattr(zoo, "experiments", lambda steps: {"broken": bad, "whole": good})
    code, out, err = launched("zoo", "--seeds=2", f"--table={tmp_path / 'zoo.json'}")
    assert code == 1 and "2 rows of 2 runs" in out
    table = [line.split(" | ") for line in out.splitlines() if line.startswith("|")]
    assert [row[0].strip("| ") for row in table][2:] == ["decoder", "decoder"]
    broken, whole = json.loads((tmp_path / "zoo.json").read_text())["rows"]
    assert "dim" in broken["failed"] and "\n" not in broken["failed"] and not whole["failed"]
    assert len(set(whole["reached"])) == 2 and whole["metric"] == "nll"
    assert whole["baseline"] == "trigrams" and 0 < whole["must_beat"] < np.log(400)
    assert "failed" in err and "**none**" in err  # after four steps


def test_a_name_that_there_is_not_is_one_line(refused):
    assert "--only names lm; expected some of copy_task," in refused("zoo", "--only=lm")


@pytest.mark.parametrize(
    ("best", "reached", "said"),
    [
        ("max", [0.6, 0.7, 0.8], "all"),
        ("min", [0.6, 0.4, 0.4], "2 of 3"),
        ("max", [0.1, 0.4, 0.5], "**none**"),  # level is not better
    ],
)
def test_a_row_says_how_many_runs_are_better(best, reached, said):
    row = zoo.Row("some", 5, metric="m", best=best, baseline="most", must_beat=0.5, reached=reached)
    line = zoo.table([row]).splitlines()[-1]
    assert [cell.strip("| ") for cell in line.split(" | ")][4] == "most: m 0.500"
    assert line.split(" | ")[6].strip() == said
    assert f"{sorted(reached)[1]:.3f} ({min(reached):.3f} to {max(reached):.3f})" in line


def test_baselines_of_classes_are_those_of_another_library():
    package("sklearn", "test")
    from sklearn.dummy import DummyClassifier
    from sklearn.neighbors import KNeighborsClassifier

    task = make_task(emoji_group.get_config("tiny"))
    found = task.baselines("test")
    (train, labels), (other, expected) = task.vectors("train"), task.vectors("test")
    for name in train.keys() - {"words"}:
        x = train[name]
        nearest = KNeighborsClassifier(1).fit(x, labels).score(other[name], expected)
        # Ties are broken otherwise.
        assert found[f"nearest_{name}_accuracy"] == pytest.approx(nearest, abs=0.02)
        most = DummyClassifier().fit(x, labels).score(other[name], expected)
        assert found["most_frequent_class_accuracy"] == pytest.approx(most)
