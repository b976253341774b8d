"""Folders that no run can be kept in are refused at the start; what is damaged in one is named in a line."""

import json
import logging

import pytest

from configs import lm_small, warm_start
from crossattn.train.errors import TrainError
from crossattn.train.workdir import claim, flatten
from experiments.settings import check, put
from tests.experiments.conftest import STEPS, TINY, start


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("runs/[a]", "'[' in its name"),
        ("runs/a]", "']' in its name"),
        ("runs/*", "'*' in its name"),
        ("runs/a\\b", "'\\\\' in its name"),
        ("s3://bucket/run", "kept in folders of this machine and in gs://: train into"),
        ("gs:/bucket/run", "expected gs://BUCKET/FOLDER"),
        ("gs://bucket", "expected gs://BUCKET/FOLDER"),
    ],
)
@pytest.mark.parametrize("launcher", ["train", "evaluate", "demo"])
def test_a_name_that_could_not_be_read_again(refused, launcher, name, said):
    given = [TINY] if launcher == "train" else []
    assert said in refused(launcher, *given, f"--workdir={name}")


def test_the_loop_itself_refuses_such_a_name(tmp_path):
    with pytest.raises(TrainError, match="checkpoints cannot be read from"):
        with claim(tmp_path / "a[b]", {}, "auto"):
            pass
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_one(refused, tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("mine")
    link.symlink_to(tmp_path / "nothing")
    for name, said in (
        (file, "file is a file"),
        (file / "run", "file is a file"),
        (link, "link is a link to nothing"),
        (tmp_path / ("x" * 300), "File name too long"),
        ("/proc/run", "cannot be written"),  # a file system that takes no folders
    ):
        line = refused("train", TINY, f"--workdir={name}")
        assert said in line and "name another with --workdir" in line
        assert "error: " in refused("evaluate", f"--workdir={name}")
    assert file.read_text() == "mine"


def test_evaluation_that_could_not_be_written_is_not_begun(refused, copied_run, monkeypatch):
    (copied_run / "results-test.json").mkdir()
    monkeypatch.setattr("experiments.tasks.translation.TranslationTask.report", pytest.fail)
    assert "results-test.json cannot be written" in refused("evaluate", f"--workdir={copied_run}")
    line = refused("evaluate", f"--workdir={copied_run}", "--split=a/b")
    assert "results-a/b.json cannot be written" in line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2]", "it holds a list where an object belongs"),
        ("[" * 100_000, "it is nested too deeply"),
        ('{"seed": ' + "9" * 5000 + "}", "integer string conversion"),
        ('{"seed": ', "Expecting value"),
        ("\xff", "can't decode"),
        ('{"task": "translation", "task.name": 1}', "damaged (at 'task')"),
        ('{"data": {"data.name": null}}', "does not accept dots"),
        ('{"task": "translation"}', "config.model.name is missing; expected one of"),
        ('{"task": "translation", "model.name": 3}', "config.model.name is 3; expected one of"),
        ('{"task": "translation", "model.name": "transformer"}', "config lacks seed, data.name"),
        ('{"task": "../up"}', "config.task is '../up'; expected one of"),
        ('{"task": ["translation"]}', "config.task is ['translation']"),
    ],
)
def test_a_config_that_is_damaged(refused, tmp_path, text, said):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    line = refused("evaluate", f"--workdir={tmp_path}")
    assert said in line and "config.json" in line
    if "nested" in said:
        line = refused("train", TINY, f"--workdir={tmp_path}")
        assert f"is damaged ({said})" in line and "resume" in line


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("seed", 10**400, "config.seed is 1000"),
        ("data.name", "\ud800", r"config.data.name is '\ud800'"),
        ("data.batch_size", "8", "config.data.batch_size is '8'; expected a whole number"),
        ("data.batch_size", True, "config.data.batch_size is True"),
        ("optim.learning_rate", float("nan"), "learning_rate is nan"),
        ("model.dim", {"a": 1}, "the config has no key model.dim.a"),
        ("model.\ud800", 1, "the config has no key model"),
    ],
)
def test_a_value_of_a_saved_config_that_does_not_fit(refused, tmp_path, key, value, said):
    settings = flatten(lm_small.get_config("tiny").to_dict()) | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    line = refused("evaluate", f"--workdir={tmp_path}")
    assert said in line and len(line) < 700


def test_a_tokenizer_that_is_another_unchecked_or_lost_is_told(refused, launched, copied_run):
    path = copied_run / "assets" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    one, other = list(vocabulary)[300:302]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    path.write_text(json.dumps(content))
    for launcher, given in (("evaluate", []), ("translate", ["a cat"]), ("train", [TINY, *STEPS])):
        line = refused(launcher, f"--workdir={copied_run}", *given)
        assert "is not the tokenizer that this run was trained with" in line
    (copied_run / "assets" / "sha256.json").unlink()
    code, _, err = launched("translate", f"--workdir={copied_run}", "a cat")
    assert code == 0 and err.startswith("note: ") and "sha256.json is missing" in err
    path.unlink()
    for launcher, given in (("evaluate", []), ("train", [TINY, *STEPS])):
        line = refused(launcher, f"--workdir={copied_run}", *given)
        assert "tokenizer.json is missing, but" in line and "restore the file" in line
    assert not path.exists()


def test_stacks_of_other_libraries_are_in_a_file_and_not_on_the_screen(
    refused, copied_run, monkeypatch
):
    def main(_):
        try:
            {}["deep inside"]
        except KeyError as error:
            logging.getLogger("other").exception("it failed here")
            raise TrainError("one sentence") from error

    monkeypatch.setattr("experiments.evaluate.main", main)
    assert refused("evaluate", f"--workdir={copied_run}") == "error: one sentence\n"
    text = (copied_run / "log.txt").read_text()
    assert text.count("Traceback") >= 2 and "deep inside" in text and "it failed here" in text


def test_data_that_only_evaluation_would_miss_is_missed_at_the_start(refused, tmp_path):
    (tmp_path / "train.tsv").write_text("a cat\tun chat\n" * 30)
    name = f"--config.data.name=files:{tmp_path}/{{split}}.tsv"
    line = refused("train", TINY, name, f"--workdir={tmp_path / 'run'}")
    assert "validation.tsv cannot be read" in line and not (tmp_path / "run").exists()


def test_a_split_that_only_evaluation_would_miss_is_missed_at_the_start(refused, tmp_path):
    (tmp_path / "x.tsv").write_text("a cat\tun chat\n" * 60)
    given = (TINY, f"--config.data.name=files:{tmp_path}/x.tsv", f"--workdir={tmp_path / 'run'}")
    line = refused("train", *given, "--config.data.splits.test=tst")
    assert "files have no split 'tst'; they have" in line and not (tmp_path / "run").exists()


def test_options_of_the_data_of_a_config_file_are_left_out_for_other_data(refused, tmp_path):
    (tmp_path / "x.tsv").write_text("a cat\tun chat\n" * 60)
    given = ("--config=configs/warm_start.py", f"--config.data.name=files:{tmp_path}/x.tsv")
    line = refused("train", *given, f"--workdir={tmp_path / 'run'}")
    assert "no key data.options.pairs: the data source files:" in line
    assert "--config.data.options.pairs=None" in line
    assert start("train", *given, "--config.data.options.pairs=None", "--help=config") == 0
    config = warm_start.get_config()
    put(config, {"data.name": f"files:{tmp_path}/x.tsv", "data.options.pairs": "None"})
    check(config)
    assert "pairs" not in config.data.options


def test_columns_of_a_table_are_named_on_the_command_line(refused, tmp_path):
    (tmp_path / "x.tsv").write_text("en\tfr\n" + "a cat\tun chat\n" * 30)
    name = f"--config.data.name=files:{tmp_path / 'x.tsv'}"
    given = ("train", TINY, name, f"--workdir={tmp_path / 'run'}")
    line = refused(*given, "--config.data.options.source_column=de")
    assert "no column 'de'; the columns are en, fr" in line
    assert "2 column(s), expected 6" in refused(*given, "--config.data.options.source_column", "5")
    assert start(*given, "--config.data.options.source_column=en", "--help=config") == 0
