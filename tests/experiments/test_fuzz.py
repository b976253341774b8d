"""The fuzz job runs: some cases of each part hold, planted faults are found and named with their number."""

import importlib
import json
import subprocess
import sys

import numpy as np
import pytest

import crossattn as xa
from experiments.fuzz import PARTS, Wrong, damage, files, hostile, made_files, masks, process
from experiments.fuzz.__main__ import Report, table
from tests.conftest import ROOT, with_devices
from tests.peers import package

# Numbers of cases that take little time.
SOME = {
    "masks": (0, 1, 2),
    "files": range(4, 20),
    "checkpoints": (1,),
    "configs": (1,),
    "generation": (4,),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One for all parts: the run that one of them trains serves the other."""
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("name", SOME)
def test_some_cases_of_each_part_hold(in_production, folder, name):
    part = importlib.import_module(f"experiments.fuzz.{name}")
    for module in part.NEEDS:
        package(module, "bench")
    case = part.start(folder)
    assert [process.fault(case, number) for number in SOME[name]] == [""] * len(SOME[name])


def test_the_command_counts_its_cases_in_a_process_of_eight_devices():
    command = [sys.executable, "-m", "experiments.fuzz", "--only=meshes", "--seed=5", "--cases=1"]
    done = subprocess.run(command, cwd=ROOT, env=with_devices(1), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].split()[:3] == ["meshes", "1", "0"]


def test_a_mask_that_is_forgotten_is_found(monkeypatch, in_production):
    real = xa.attend
    monkeypatch.setattr(xa, "attend", lambda q, k, v, mask=None, **o: real(q, k, v, **o))
    said = [process.fault(masks.attend, number) for number in range(3)]
    assert any("differ" in one and "attend by" in one for one in said), said


def test_damage_that_checksums_show_is_found_where_nobody_looks(monkeypatch, tmp_path):
    name, maker, expected, _, checked = files._READERS["zipped"]
    blind = (name, maker, expected, lambda path: path.read_bytes(), checked)
    monkeypatch.setattr(files, "_READERS", {"zipped": blind})
    said = {process.fault(files.start(tmp_path), number) for number in range(30)}
    assert any("is read as something else, though it holds checksums" in one for one in said)


def test_what_is_no_refusal_asks_too_much_or_takes_too_long_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(files, "_SECONDS", 1)

    def read(how):
        with pytest.raises(Wrong) as error:
            files._read("a file", how, tmp_path, (ValueError,))
        return str(error.value)

    def wait(path):
        while True:
            pass

    assert "KeyError, not ValueError" in read(lambda path: {}[path])
    assert "asks for more than" in read(lambda path: np.ones(1 << 40, np.int8))
    assert "takes more than 1 s" in read(wait)


def test_a_bomb_is_small_and_unpacks_to_what_it_says(tmp_path):
    size = 8 << 20
    for kind, name in (("deb", "a_1.0_all.deb"), ("zipped", "a.zip")):
        (tmp_path / name).write_bytes(made_files.bomb(kind, size))
        assert (tmp_path / name).stat().st_size < size / 100
    [(_, content)] = files._deb(tmp_path / "a_1.0_all.deb")
    assert [len(content), len(files._zip(tmp_path / "a.zip")[0])] == [size, size]


def test_damage_always_changes_something():
    for number in range(50):
        random = np.random.default_rng(number)
        content = random.bytes(number)
        assert damage.damaged(random, content)[0] != content


def test_hypothesis_makes_the_text_that_breaks_a_reader_small():
    def check(text):
        if "d_model" in text:
            raise Wrong(str(len(text)))

    with pytest.raises(Wrong) as error:
        hostile.check_texts(check, 3, most=200)
    assert (
        int(str(error.value)) <= 100
    )  # it draws up to 100,000 characters; how far it shrinks varies


def test_a_process_that_dies_is_a_finding_of_the_case_it_was_in(tmp_path, capsys):
    from experiments.fuzz import __main__ as command

    log = tmp_path / "log.jsonl"
    lines = [dict(event="case", case=4), dict(event="finding", case=4, said="odd")]
    log.write_text(
        "".join(json.dumps(line) + "\n" for line in [*lines, dict(event="case", case=5)])
    )
    report = Report("masks")
    assert command._read(report, log) == 5 and report.cases == 2
    assert "--only=masks --seed=4 --cases=1" in capsys.readouterr().out
    assert command._end(-11) == "was killed by SIGSEGV"
    assert table([report]).splitlines()[1].split()[:4] == ["masks", "2", "1", "1"]


def test_every_part_says_what_it_is_about():
    for name in PARTS:
        assert importlib.import_module(f"experiments.fuzz.{name}").ABOUT
