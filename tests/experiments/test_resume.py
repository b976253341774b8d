"""Killed or interrupted, a run ends as the run that was left alone; finished, it says so."""

import json
import os
import signal

import jax
import numpy as np
import pytest

from crossattn.train import loop
from crossattn.train.writers import Writer
from tests.experiments.conftest import STEPS, TINY


def losses(workdir):
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]


@pytest.mark.slow  # tests/train kills a smaller run
def test_killed_three_times_is_the_run_never_killed(
    tiny_run, parameters, killed_at, launched, tmp_path
):
    workdir = tmp_path / "run"
    for step in (3, 12, 20):  # before a first checkpoint, after one, as one is written
        killed_at(step, workdir, "train", TINY, *STEPS, f"--workdir={workdir}")
    code, out, err = launched("train", TINY, *STEPS, f"--workdir={workdir}")
    assert code == 0 and "going on from the checkpoint of step" in out, (out, err)
    jax.tree.map(np.testing.assert_array_equal, parameters(workdir), parameters(tiny_run))
    assert losses(workdir) == losses(tiny_run)


class Impatient(Writer):
    """Presses Ctrl-C after a step."""

    def __init__(self, step):
        self.step = step

    def tick(self, step, values):
        if step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_goes_on(
    launched, monkeypatch, tmp_path, tiny_run, parameters
):
    usual = loop.default_writers
    with monkeypatch.context() as patched:
        patched.setattr(loop, "default_writers", lambda *a: [*usual(*a), Impatient(9)])
        code, out, err = launched("train", TINY, *STEPS, f"--workdir={tmp_path}")
    assert code == 130 and "Traceback" not in err
    assert "the same command goes on from here" in out and "results are in" not in out
    code, out, _ = launched("train", TINY, *STEPS, f"--workdir={tmp_path}")
    assert code == 0 and "going on from the checkpoint of step" in out, (out, err)
    jax.tree.map(np.testing.assert_array_equal, parameters(tmp_path), parameters(tiny_run))
