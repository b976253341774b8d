"""Every launcher says what it takes, and every key of a config what it means."""

import dataclasses
import importlib
import re
import signal
import subprocess
import sys
from typing import Annotated, Literal

import pytest
from absl import flags

from crossattn.__main__ import main as doctor
from crossattn.functional import flatten
from crossattn.models import TransformerConfig
from crossattn.nn import BLOCK_KEYS
from crossattn.train.config import CheckpointConfig, TrainConfig
from crossattn.train.optim import OptimConfig
from crossattn.train.sharding import MeshConfig
from crossattn.types import Count
from experiments import keys, options
from experiments.settings import check
from tests.experiments.conftest import ROOT, TINY
from tests.experiments.test_configs import CONFIGS, get_config

LAUNCHERS = (
    "train", "prepare", "evaluate", "compare", "export", "generate", "translate", "transcribe", "classify",
    "caption", "speak", "demo", "draw", "explore", "word_errors", "fetch_weights", "plan", "read_page", "zoo",
    "answer", "bench.steps",
)  # fmt: skip
BENCHMARKS = (
    "bench.alignment_heads", "bench.attend", "bench.block_sizes", "bench.captions", "bench.conformance",
    "bench.corpus", "bench.decode", "bench.deltas", "bench.drawn", "bench.images_in_text", "bench.knockouts",
    "bench.lag", "bench.markup", "bench.patterns",
    "bench.plans", "bench.pronunciations", "bench.scores", "bench.shots", "bench.stamps",
    "bench.translation_step", "bench.understood", "bench.whisper", "bench.word_maps",
    "bench.word_times",
    "cluster.same_end", "parity.__main__",
)  # fmt: skip


def test_all_that_can_be_started_is_tested_here():
    runs = (path for path in (ROOT / "experiments").rglob("*.py") if path.name != "__init__.py")
    found = {
        ".".join(path.relative_to(ROOT / "experiments").with_suffix("").parts)
        for path in runs
        if re.search('^if __name__ == "__main__"', path.read_text(), re.MULTILINE)
    }
    found.remove("__main__")  # the list of them
    packages = {"fetch_weights", "plan"}
    expected = {*LAUNCHERS, *BENCHMARKS} - packages | {f"{name}.__main__" for name in packages}
    assert found == expected


@pytest.mark.parametrize("asked", ["--help", "-h"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_help_has_a_line_for_each_flag_and_an_example(launched, launcher, asked):
    code, out, err = launched(launcher, asked)
    assert code == 0 and not err
    assert f"python -m experiments.{launcher}" in out
    lines = out.partition("\nflags:\n")[2].splitlines()
    names = re.findall(r"^  --(?:\[no\])?(\w+)", "\n".join(lines), re.MULTILINE)
    module = importlib.import_module(f"experiments.{launcher}")
    assert set(names) == {flag.name for flag in module.FLAGS} | {"help"}
    for line in lines:
        assert re.fullmatch(r"  --\S+(, -h)?  +\S.*", line), line


def test_a_launcher_lists_every_flag_of_its_own():
    """What a module defines and no launcher takes could not be given to any."""
    taken = {flag.name for name in LAUNCHERS for flag in _flags(name)}
    modules = flags.FLAGS.flags_by_module_dict().items()
    defined = {
        flag.name for name, own in modules if name.startswith("experiments.") for flag in own
    }
    assert defined == taken
    for name in LAUNCHERS:
        own = flags.FLAGS.get_flags_for_module(f"experiments.{name}")
        assert {flag.name for flag in own} <= {flag.name for flag in _flags(name)}


def _flags(launcher):
    return importlib.import_module(f"experiments.{launcher}").FLAGS


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmarks_show_their_docstring_and_measure_nothing(name, capsys, monkeypatch):
    module = importlib.import_module(f"experiments.{name}")
    for asked in ("--help", "-h"):
        monkeypatch.setattr(sys, "argv", [f"experiments/{name.replace('.', '/')}.py", asked])
        with pytest.raises(SystemExit) as end:
            module.main()
        assert end.value.code == 0
        out = capsys.readouterr().out
        command = f"python -m experiments.{name.removesuffix('.__main__')}"
        assert out.startswith(f"usage: {command} ") and out.count(command) >= 2
    parser = out.partition("options:")[2]
    assert all(re.search(r"  \S", line.strip()) for line in parser.splitlines() if "--" in line)


def test_a_misspelt_flag_of_a_benchmark(capsys, monkeypatch):
    module = importlib.import_module("experiments.parity.__main__")
    with pytest.raises(SystemExit) as end:
        module.main(["--onyl=x"])
    said = "error: got --onyl=x, which it does not take; did you mean --only? --help lists what it does.\n"
    assert end.value.code == 2 and capsys.readouterr().err == said


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["doctor", "--help"]])
def test_the_library_itself(capsys, arguments):
    assert doctor(arguments) == 0 and capsys.readouterr().out.startswith("usage: ")


@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_of_a_config_has_a_meaning(name):
    out = options.of_config(get_config(name).to_dict(), "")
    shown = dict(re.findall(r"^  (\S+) +(.*)$", out, re.MULTILINE))
    values = flatten(get_config(name).to_dict())
    known = keys.of(get_config(name).to_dict())
    assert values.keys() <= shown.keys() == known.keys()
    for key, value in values.items():
        text = str(value).lower() if value is None or isinstance(value, bool) else repr(value)
        assert shown[key].startswith(text), (key, shown[key])
        assert known[key].meaning and known[key].meaning in shown[key]
        assert known[key].expected in shown[key]
    check(get_config(name))


@dataclasses.dataclass(frozen=True)
class Example:
    """Fields of every kind.

    Attributes:
      count, share: a number
        in two lines. The rest is not shown.
      either: a flag, or a name.
    """

    count: Count
    share: Annotated[float, "(0, 1]"] | None = None
    either: bool | Literal["some"] = False
    column: int | str = 0
    shape: tuple[int, int] = (1, 1)


def test_a_key_is_what_its_field_says():
    found = keys.of_class(Example)
    assert list(found) == ["count", "share", "either", "column"]  # a pair is no plain value
    count, share, either, column = found.values()
    assert (count.meaning, count.default) == ("a number in two lines", keys.NEEDED)
    assert share.expected == "a number, above 0 and at most 1, or none" and share.default is None
    assert either.expected == "true or false, or one of some"
    for key, taken, refused in (
        (count, [1, 2**40], [0, 1.0, True, None, "1"]),
        (share, [1, 0.5, None], [0, 0.0, 1.1, float("nan"), "half", False]),
        (either, [True, "some"], ["all", 1, None]),
        (column, [0, "fr"], [True, 1.5, None]),
    ):
        assert all(map(key.takes, taken)) and not any(map(key.takes, refused))
    assert [key.read("1") for key in found.values()] == [1, 1.0, True, 1]
    assert (share.read("None"), share.read("half"), column.read("fr")) == (None, "half", "fr")


def test_every_plain_field_that_the_data_do_not_give_is_a_key():
    known = keys.of(get_config("libreoffice").to_dict())
    parts = {"block", "encoder_block", "input", "output"}
    for section, kind, given in (
        ("model", TransformerConfig, parts | {"vocab_size", "source_vocab_size", "max_length"}),
        ("train", TrainConfig, {"optim", "mesh", "checkpoint", "seed"}),
        ("optim", OptimConfig, set()),
        ("mesh", MeshConfig, set()),
        ("checkpoint", CheckpointConfig, {"resume"}),
    ):  # fmt: skip
        names = {field.name for field in dataclasses.fields(kind)} - given
        assert {f"{section}.{name}" for name in names} <= known.keys()
    assert {f"model.{name}" for name in BLOCK_KEYS} <= known.keys()


def test_the_config_that_is_shown_is_the_one_that_is_named(launched, tiny_run):
    _, out, _ = launched("train", "--help=config", TINY, "--config.train.steps=77")
    assert re.search(r"^  train.steps +77 ", out, re.MULTILINE)
    code, out, _ = launched("evaluate", "--help=config", f"--workdir={tiny_run}")
    assert code == 0 and re.search(r"^  train.steps +32 ", out, re.MULTILINE)
    _, out, _ = launched("train", "--help=config")
    assert "configs/libreoffice.py" in out and re.search(r"^  train.steps +900 ", out, re.MULTILINE)


@pytest.mark.parametrize("name", ["libreoffice", "emoji_captions"])
def test_none_is_a_value_of_every_key_that_may_be_none(launched, name):
    values = flatten(get_config(name).to_dict())
    known = keys.of(get_config(name).to_dict())
    may = [key for key in known if known[key].none and key in values]
    words = [f"--config.{key}=none" for key in may[1:]] + [f"--config.{may[0]}", "None"]
    code, out, err = launched(
        "train", "--help=config", f"--config={ROOT}/configs/{name}.py", *words
    )
    assert code == 0, err
    shown = dict(re.findall(r"^  (\S+) +(.*)$", out, re.MULTILINE))
    assert [key for key in may if not shown[key].startswith("none ")] == []


def test_help_on_something_else(refused):
    assert "expected --help or --help=config." in refused("train", "--help=flags")
    assert "there is no --help=config; expected --help." in refused("compare", "--help=config")


def test_keys_that_a_config_leaves_out_or_has_as_none_can_be_set(launched):
    given = ("--config.model.qk_norm=true", "--config.model.num_kv_heads", "1")
    given += ("--config.train.ema_decay=0.5",)
    options = ("--config.data.options.source_column=2", "--config.data.options.target_column=fr")
    options += ("--config.data.name=files:a.tsv",)
    _, out, _ = launched("train", TINY, *given, *options, "--help=config")
    for line in (
        r"model.qk_norm +true ",
        r"model.num_kv_heads +1 ",
        r"train.ema_decay +0.5 ",
        r"data.options.source_column +2 ",
        r"data.options.target_column +'fr' ",
    ):
        assert re.search(f"^  {line}", out, re.MULTILINE), line


def test_ctrl_c_while_a_launcher_is_still_being_imported_is_one_line(environment):
    command = [sys.executable, "-X", "importtime", "-m", "experiments.train", "--workdir=no"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    for line in process.stderr:  # one for each module, when it is there
        if line.rstrip().endswith("| experiments"):
            break
    process.send_signal(signal.SIGINT)
    rest = [line for line in process.stderr if not line.startswith("import time:")]
    process.stderr.close()
    assert process.wait(60) == 130 and rest == ["stopped.\n"]


def test_ctrl_c_before_training_is_one_line(launched, monkeypatch):
    def main(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("experiments.train.main", main)
    assert launched("train") == (130, "", "stopped.\n")


@pytest.mark.slow
def test_output_that_nobody_reads_on_is_no_error(environment):
    command = f"{sys.executable} -m experiments.train --help=config | head -n 1"
    done = subprocess.run(command, shell=True, cwd=ROOT, env=environment, capture_output=True)
    assert done.returncode == 0 and done.stderr == b"" and done.stdout.count(b"\n") == 1
