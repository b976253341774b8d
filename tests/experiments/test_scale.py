"""The same launcher and config over eight devices of two processes: the run of one device.

Each way to split the devices of one process is checked in ``tests/train/test_sharding.py``.
"""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from crossattn.data.sources import open_source
from tests.conftest import with_devices
from tests.experiments.conftest import ROOT, TINY, start

FIVE = (TINY, "--config.train.steps=5", "--config.train.log_every=1")
PAIRS = 200
# With the rest for data, each axis splits in two.
MIXED = ("--config.mesh.fsdp=2", "--config.mesh.tensor=2")


def losses(workdir):
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "train"]


@pytest.fixture
def five_steps(tmp_path):
    """The command line, on a few pairs of like length: evaluation has one shape to compile."""
    path = tmp_path / "pairs.tsv"
    pairs = [e for e in open_source("phrases", "train") if e["source"].count(" ") == 2][:PAIRS]
    path.write_text("".join(f"{e['source']}\t{e['target']}\n" for e in pairs))
    return (*FIVE, f"--config.data.name=files:{path}", "--config.evaluate.examples=0")


@pytest.fixture
def together(environment):
    """Starts a launcher in two processes of four devices each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    shared = environment | {
        "XLA_FLAGS": with_devices(4)["XLA_FLAGS"],
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": "2",
    }

    def run(launcher, *arguments):
        command = [sys.executable, "-m", f"experiments.{launcher}", "--distributed", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        both = [
            subprocess.Popen(
                command, cwd=ROOT, env=shared | {"JAX_PROCESS_ID": str(index)}, **pipes
            )
            for index in range(2)
        ]
        try:
            said = [process.communicate(timeout=240) for process in both]
        finally:
            for process in both:
                process.kill()
        assert [process.returncode for process in both] == [0, 0], said

    return run


def test_eight_devices_of_two_processes_train_the_run_of_one_which_evaluates_it(
    five_steps, together, launched, tmp_path
):
    one, eight = tmp_path / "one", tmp_path / "eight"
    assert start("train", *five_steps, "--config.mesh.data=1", f"--workdir={one}") == 0
    together("train", *five_steps, *MIXED, f"--workdir={eight}")
    assert len(losses(one)) == 5
    np.testing.assert_allclose(losses(eight), losses(one), rtol=1e-4)
    assert sorted(os.listdir(eight / "checkpoints")) == ["4", "5"]
    code, _, _ = launched("evaluate", f"--workdir={eight}", "--limit=5")
    assert code == 0
    assert json.loads((eight / "results-test.json").read_text())["sentences"] == 5
