"""The page on a model, a task, data and a config of one's own, run as printed outside the clone."""

import itertools
import json
import re
import shlex

import pytest

from experiments import keys, tasks
from experiments.errors import SettingsError
from tests.conftest import ROOT
from tests.experiments.conftest import start
from tests.experiments.test_configs import get_config

PAGE = (ROOT / "docs" / "own.md").read_text()
FILES = dict(re.findall(r'```python title="([\w/.]+)"\n(.*?)```', PAGE, re.DOTALL))
_NUMBERS = itertools.count()  # or the next test would find the modules of the one before


def own(folder, monkeypatch, name="mine"):
    """The files of the page in a folder, the package under a name."""
    (folder / name).mkdir()
    for path, text in FILES.items():
        (folder / path.replace("mine/", f"{name}/")).write_text(text.replace("mine.", f"{name}."))
    monkeypatch.syspath_prepend(str(folder))
    return f"--config={folder / 'config.py'}"


def commands():
    """The words of each launcher that the page starts."""
    for line in re.findall(r"^python -m experiments\.(.*)$", PAGE, re.MULTILINE):
        yield shlex.split(line.partition(" #")[0])


@pytest.mark.slow
def test_the_page_runs_as_printed(tmp_path, monkeypatch, capsys):
    own(tmp_path, monkeypatch)
    for launcher, *words in commands():
        assert start(launcher, *words, cwd=tmp_path) == 0, (words, capsys.readouterr().err)
    said = capsys.readouterr().out
    assert "the most points of a set (a whole number, 1 or more)" in said
    found = json.loads((tmp_path / "runs/points/results-test.json").read_text())
    assert found.keys() == {"step", "loss", "nll", "correct"} and found["correct"] > 0.8
    lines = (tmp_path / "runs/points/metrics.jsonl").read_text().splitlines()
    trained = [line for line in map(json.loads, lines) if line["kind"] == "train"]
    assert [line["step"] for line in trained] == [*range(20, 201, 20)]  # none of them twice
    assert trained[-1]["loss"] < 0.7 * trained[0]["loss"]
    settings = json.loads((tmp_path / "runs/wide/config.json").read_text())
    assert settings["model.dim"] == 64 and settings["data.options.size"] == 500


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The flag of the page's config, under a name of its own."""
    return own(tmp_path, monkeypatch, f"mine{next(_NUMBERS)}")


def test_own_keys_are_held_to(mine, refused, tmp_path):
    for override, said in (
        ("--config.model.dim=0", "model.dim is 0; expected a whole number, 1 or more"),
        ("--config.model.dims=64", "no key model.dims; did you mean model.dim?"),
        ("--config.model.num_classes=4", "no key model.num_classes"),
        ("--config.model.activation=gelu", "no key model.activation"),
        ("--config.data.most_points=none", "most_points is 'none'"),
        ("--config.data.options.size=0", "options.size is 0; expected a whole number, 1 or more"),
        ("--config.checkpoint.best_metric=bleu", "'bleu'; expected one of loss, nll, correct"),
        ("--config.train.accumulate=3", "batches of 32 rows"),
    ):
        assert said in refused("train", mine, override, f"--workdir={tmp_path / 'run'}"), override
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_flags_of_other_tasks_are_refused(mine, launched, refused, tmp_path):
    workdir = f"--workdir={tmp_path / 'run'}"
    assert launched("train", mine, workdir, "--config.train.steps=1")[0] == 0
    assert "--num_beams says nothing to a mine" in refused("evaluate", workdir, "--num_beams=2")
    assert "shape, not a translation." in refused("translate", workdir, "a cat")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("def hidden(self", "def vectors(self", "has no hidden(points, *, segment_ids, key)."),
        (", key=None)", ")", "has no hidden(points, *, segment_ids, key): it lacks key."),
        ("def logits(self, hidden)", "def classes(self, hidden)", "has no logits(hidden, /)."),
    ],
)
def test_a_model_that_lacks_what_the_task_asks_is_one_sentence(
    mine, refused, tmp_path, old, new, said
):
    (model,) = tmp_path.glob("*/point_reader.py")
    text = model.read_text()
    assert old in text
    model.write_text(text.replace(old, new))
    line = refused("train", mine, f"--workdir={tmp_path / 'run'}")
    assert f"cannot be trained as a {model.parent.name}.shape: PointReader {said}" in line


def test_a_model_of_another_kind_is_refused():
    config = get_config("lm_small", "tiny")
    config.model.name = "transformer"
    with pytest.raises(
        SettingsError, match=r"Transformer has no hidden\(tokens, \*, segment_ids, positions"
    ):
        tasks.find("language_model").check(config)


def test_a_file_in_the_folder_of_tasks_is_a_task(tmp_path, monkeypatch):
    text = "from experiments.tasks.base import Task\n\n\nclass SortingTask(Task):\n    pass\n"
    (tmp_path / "sorting.py").write_text(text)
    (tmp_path / "parts_of_it.py").write_text('"""No task."""\n')
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(tmp_path)])
    assert tasks.find("sorting").__name__ == "SortingTask"
    assert "sorting" in tasks.known() and "parts_of_it" not in tasks.known()
    found = keys.of({"task": "sorting", "model": {"name": "decoder"}})
    assert "optim.learning_rate" in found


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("--config.task=sort", "'sort'; expected one of captioning, classification,"),
        ("--config.task=mine.nowhere", "which cannot be imported (No module named 'mine"),
        ("--config.task=json.decoder", "but json.decoder has no class DecoderTask."),
        ("--config.task=corpus", "'corpus'; expected one of captioning"),
        (
            "--config.model.name=gpt",
            "there is no model 'gpt'; expected one of attention_sum_reader, bert, clip",
        ),
        ("--config.model.name=mine.gpt", "the model 'mine.gpt' cannot be imported"),
        ("--config.model.name=json.decoder", "json.decoder has no Decoder"),
    ],
)
def test_an_unknown_name_is_one_line_that_lists_the_known(refused, tmp_path, override, said):
    given = ("--config=configs/copy_task.py:tiny", override, f"--workdir={tmp_path / 'run'}")
    assert said in refused("train", *given)
