"""Launchers on gs://: killed at any moment a run ends as if it had not been; then it is read
as one on a disk is."""

import json
import os
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from crossattn.train import storage
from tests.experiments.conftest import ROOT, STEPS, TINY
from tests.experiments.test_resume import losses


def is_written(checkpoints):
    """Whether a checkpoint is being written at this moment."""
    names = [each.name for each in storage.children(checkpoints)]
    return any(not (checkpoints / name / "commit_success.txt").exists() for name in names)


@pytest.mark.slow  # tests/train cuts a checkpoint short
def test_killed_twice_is_the_run_never_killed(
    store, tiny_run, parameters, environment, launched, tmp_path
):
    workdir = storage.folder(store)
    command = [sys.executable, "-m", "experiments.train", TINY, *STEPS, f"--workdir={store}"]
    errors = tmp_path / "errors.txt"
    for writing, step in ((True, 4), (False, 17)):
        with (
            errors.open("w") as stderr,
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment | servers(),
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            ) as process,
        ):
            try:
                while not process.stdout.readline().startswith(
                    (f"step {step}/", f"step {step + 1}/")
                ):
                    assert process.poll() is None, errors.read_text()
                while writing and not is_written(workdir / "checkpoints"):
                    assert process.poll() is None, errors.read_text()
            finally:
                process.kill()
        assert process.returncode == -signal.SIGKILL
    code, out, err = launched("train", TINY, *STEPS, f"--workdir={store}")
    assert code == 0 and "going on from the checkpoint of step" in out, (out, err)
    jax.tree.map(np.testing.assert_array_equal, parameters(workdir), parameters(tiny_run))
    assert losses(workdir) == losses(tiny_run)
    assert not is_written(workdir / "checkpoints")


def servers():
    """What points a process at the servers: it is in this process's environment since they were started."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("GCSFS_", "GOOGLE_", "STORAGE_", "TENSORSTORE_"))
    }


@pytest.fixture
def copied(store, tiny_run):
    """The finished run of the tests, in a store."""
    with storage.filled(storage.folder(store)) as folder:
        shutil.copytree(tiny_run, folder, dirs_exist_ok=True)
    return store


@pytest.mark.slow  # tests/train reads, damages and resumes one
def test_what_reads_a_run_reads_it_in_a_store(copied, launched, tiny_run):
    code, out, err = launched("evaluate", f"--workdir={copied}", "--limit=4", "--split=validation")
    assert code == 0 and "bleu" in out, err
    results = storage.folder(copied) / "results-validation.json"
    scores = json.loads(results.read_text())
    assert scores["sentences"] == 4 and scores["validation_loss"] > 0 and "loss" not in scores
    there = launched("translate", "The file is open.", f"--workdir={copied}")
    assert there[:2] == launched("translate", "The file is open.", f"--workdir={tiny_run}")[:2]
    assert there[0] == 0
    code, out, err = launched("train", TINY, *STEPS, f"--workdir={copied}")
    assert code == 0 and "is finished: all 32 steps are made" in out, err


def test_a_store_that_has_no_such_run_is_one_sentence(store, refused):
    line = refused("evaluate", f"--workdir={store}")
    assert "there is no run in" in line and store in line
    line = refused("train", TINY, f"--workdir={store.replace('bucket', 'nobucket')}")
    assert "nobucket" in line and "cannot be written" in line
    assert storage.children(storage.folder(store)) == []


def test_the_demo_wants_a_folder_of_this_machine(store, refused):
    assert "a folder of this machine, --workdir=runs/demo" in refused("demo", f"--workdir={store}")
