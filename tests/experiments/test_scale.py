"""The same launcher and config on eight devices and in two processes: the same run."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from crossattn.data.sources import open_source
from tests.experiments.conftest import ROOT, TINY, start

FIVE = (TINY, "--config.train.steps=5", "--config.train.log_every=1")
PAIRS = 200
MESHES = {
    "data": ["--config.mesh.data=8"],
    "fsdp": ["--config.mesh.fsdp=8"],
    "all": ["--config.mesh.fsdp=2", "--config.mesh.tensor=2"],
}
# Several starts of the launcher in one process, to load JAX once.
PROGRAM = """
import json, sys
from tests.experiments.conftest import start
for arguments in json.loads(sys.argv[1]):
    code = start("train", *arguments)
    if code:
        sys.exit(code)
"""


def losses(workdir):
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "train"]


@pytest.fixture(scope="module")
def five_steps(tmp_path_factory):
    """The command line, on a few pairs of like length: evaluation has one shape to compile."""
    path = tmp_path_factory.mktemp("data") / "pairs.tsv"
    pairs = [e for e in open_source("phrases", "train") if e["source"].count(" ") == 2][:PAIRS]
    path.write_text("".join(f"{e['source']}\t{e['target']}\n" for e in pairs))
    return (*FIVE, f"--config.data.name=files:{path}", "--config.evaluate.examples=0")


@pytest.fixture(scope="module")
def one_device(tmp_path_factory, five_steps):
    workdir = tmp_path_factory.mktemp("one")
    assert start("train", *five_steps, "--config.mesh.data=1", f"--workdir={workdir}") == 0
    assert len(losses(workdir)) == 5
    return losses(workdir)


@pytest.fixture(scope="module")
def eight_devices(tmp_path_factory, environment, five_steps):
    """mesh -> work directory of a run over eight devices."""
    folder = tmp_path_factory.mktemp("eight")
    runs = [[*five_steps, *mesh, f"--workdir={folder / name}"] for name, mesh in MESHES.items()]
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(runs)],
        env=environment | flags,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("mesh", MESHES)
def test_eight_devices_give_the_losses_of_one(one_device, eight_devices, mesh):
    np.testing.assert_allclose(losses(eight_devices / mesh), one_device, rtol=1e-4)


def test_two_processes_train_one_run_that_one_process_evaluates(
    one_device, five_steps, environment, launched, tmp_path
):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "experiments.train", "--distributed", *five_steps]
    both = [
        subprocess.Popen(
            [*command, "--config.mesh.fsdp=2", f"--workdir={tmp_path}"],
            cwd=ROOT,
            env=environment
            | {
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": str(index),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        said = [process.communicate(timeout=240) for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], said
    np.testing.assert_allclose(losses(tmp_path), one_device, rtol=1e-4)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["4", "5"]
    code, _, _ = launched("evaluate", f"--workdir={tmp_path}", "--limit=5")
    assert code == 0
    assert json.loads((tmp_path / "results-test.json").read_text())["sentences"] == 5
