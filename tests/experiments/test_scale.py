"""The same launchers and config over four devices of two processes: the run of one device.

Each way to split the devices of one process is checked in ``tests/train/test_sharding.py``.
"""

import json
import os
import re
import socket
import subprocess
import sys

import numpy as np
import pytest

from crossattn.data.sources import open_source
from crossattn.train import processes
from tests.conftest import with_devices
from tests.experiments.conftest import ROOT, TINY, start

STEPS = 3
OPTIONS = (
    TINY,
    f"--config.train.steps={STEPS}",
    "--config.train.log_every=1",
    "--config.checkpoint.every=2",
    "--config.evaluate.examples=4",
    "--config.evaluate.decoding.max_new_tokens=8",
    "--config.evaluate.alignment.choose=False",
)
PAIRS = 200
# Rows split over the processes, heads and feed-forward over the devices of each.
MIXED = ("--config.mesh.fsdp=2", "--config.mesh.tensor=2")

# A process joins the others once, with the first launcher, and stays with them for the rest.
PROGRAM = """
import json, sys
from tests.experiments.conftest import start
for launcher, *arguments in json.loads(sys.argv[1]):
    code = start(launcher, *arguments)
    print("ended", launcher, code, flush=True)
    if code != 0:
        sys.exit(code)
"""


def lines_of(workdir, kind):
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def losses(workdir):
    return [line["loss"] for line in lines_of(workdir, "train")]


@pytest.fixture
def data(tmp_path):
    """Writes a few pairs of like length, so that evaluation has one shape to compile; returns their name."""
    path = tmp_path / "pairs.tsv"
    pairs = [e for e in open_source("phrases", "train") if e["source"].count(" ") == 2][:PAIRS]
    path.write_text("".join(f"{e['source']}\t{e['target']}\n" for e in pairs))
    return f"files:{path}"


@pytest.fixture
def together(environment):
    """Starts launchers, one after the other, in several processes with several devices each."""

    def run(count, devices, *launchers):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        shared = environment | {
            "XLA_FLAGS": with_devices(devices)["XLA_FLAGS"],
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(count),
        }
        (first, *arguments), *rest = launchers
        program = json.dumps([[first, "--distributed", *arguments], *rest])
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        all_ = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, program],
                cwd=ROOT,
                env=shared | {"JAX_PROCESS_ID": str(index)},
                **pipes,
            )
            for index in range(count)
        ]
        try:
            said = [process.communicate(timeout=240) for process in all_]
        finally:
            for process in all_:
                process.kill()
        assert [process.returncode for process in all_] == [0] * count, said
        return [out for out, _ in said]

    return run


@pytest.mark.slow  # in tests/train two processes train a small model
def test_four_devices_of_two_processes_are_one_device_from_training_to_translation(
    data, together, launched, tmp_path
):
    options = (*OPTIONS, f"--config.data.name={data}")
    sentences = [open_source(data, "test")[i]["source"] for i in range(3)]
    one, four = tmp_path / "one", tmp_path / "four"
    assert start("train", *options, "--config.mesh.data=1", f"--workdir={one}") == 0
    workdir = f"--workdir={four}"
    main, other = together(
        2,
        2,
        ["train", *options, *MIXED, workdir],
        ["evaluate", workdir, "--limit=3"],
        ["translate", workdir, *sentences],
    )
    assert len(losses(one)) == STEPS
    np.testing.assert_allclose(losses(four), losses(one), rtol=1e-4)
    ((mine,), (theirs,)) = lines_of(four, "eval"), lines_of(one, "eval")
    assert mine.keys() == theirs.keys() >= {"loss", "bleu", "chrf"}
    np.testing.assert_allclose(mine["loss"], theirs["loss"], rtol=1e-4)
    assert sorted(os.listdir(four / "checkpoints")) == ["2", "3"]
    together_said = json.loads((four / "results-test.json").read_text())
    assert "ended translate 0" in other and "decoding_seconds" not in other
    # The same checkpoint on one device.
    assert launched("evaluate", workdir, "--limit=3")[0] == 0
    alone_said = json.loads((four / "results-test.json").read_text())
    assert alone_said["samples"] == together_said["samples"] and alone_said["sentences"] == 3
    for name in ("test_loss", "accuracy"):
        np.testing.assert_allclose(together_said[name], alone_said[name], rtol=1e-4)
    texts = [sample["translation"] for sample in together_said["samples"]]
    assert main.endswith("\n".join([*texts, "ended translate 0"]) + "\n")


@pytest.mark.slow
def test_the_loss_of_each_text_is_the_same_over_two_processes(together, launched, tmp_path):
    workdir, tiny = f"--workdir={tmp_path}", f"--config={ROOT}/configs/lm_small.py:tiny"
    short = ("--config.train.steps=1", "--config.train.log_every=1", "--config.checkpoint.every=1")
    together(2, 2, ["train", tiny, *short, *MIXED, workdir], ["evaluate", workdir])
    results = tmp_path / "results-test.json"
    found = json.loads(results.read_text())["examples"]
    assert launched("evaluate", workdir)[0] == 0
    alone = json.loads(results.read_text())["examples"]
    assert found["group"] == alone["group"] and found["weight"] == alone["weight"]
    np.testing.assert_allclose(found["nll"], alone["nll"], rtol=1e-4)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ((), "JAX_COORDINATOR_ADDRESS is not set, .* expected a cluster that JAX knows"),
        (("host", 2, 0), "JAX_COORDINATOR_ADDRESS is host, .* expected .* HOST:PORT"),
        (("host:80", "two", 0), "JAX_NUM_PROCESSES is two, .* expected .* the number of processes"),
        (("host:80", 2, 2), "JAX_PROCESS_ID is 2; expected .* the index of this one, from 0"),
    ],
)
def test_a_place_that_is_none_is_refused(monkeypatch, refused, tmp_path, place, message):
    for name in processes.BY_HAND:
        monkeypatch.delenv(name, raising=False)
    for name, value in zip(processes.BY_HAND, place, strict=False):
        monkeypatch.setenv(name, str(value))
    assert re.search(message, refused("train", TINY, "--distributed", f"--workdir={tmp_path}"))
