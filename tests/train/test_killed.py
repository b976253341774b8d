"""A run in a process of its own is interrupted from outside, or fills a disk.

``kill -9`` is in ``tests/experiments/test_resume.py``.
"""

import os
import signal

import pytest
from toy_task import assert_same, param_shapes

from crossattn.train.checkpoint import load_params, steps_in

OPTIONS = {
    "config": {"steps": 60, "log_every": 10, "ema_decay": 0.9},
    "optim": {"learning_rate": 0.01, "weight_decay": 0.1},
    "checkpoint": {"every": 7},
    "task": {"delay": 0.02},
}


@pytest.mark.slow
def test_an_interrupt_saves_and_the_same_command_goes_on(toy_process, reach, last_line, tmp_path):
    process = toy_process(tmp_path, OPTIONS)
    reach(process, 3)
    process.send_signal(signal.SIGTERM)
    stopped, _, stderr = last_line(process)
    assert process.returncode == 0 and stopped["status"] == "interrupted"
    assert stderr.strip() == "SIGTERM: finishing the step and saving; once more to kill"
    assert (tmp_path / "checkpoints" / str(stopped["step"])).is_dir()


@pytest.mark.slow
def test_a_disk_that_fills_up_is_one_clear_error_and_loses_nothing(
    toy_process, last_line, tmp_path
):
    process = toy_process(tmp_path, OPTIONS | {"task": {"poison_at": 10}})
    _, _, _ = last_line(process)
    assert os.listdir(tmp_path / "checkpoints") == ["7"]
    before = load_params(tmp_path / "checkpoints", param_shapes(), average=False)
    process = toy_process(tmp_path, OPTIONS | {"file_limit": 2000})
    error, lines, stderr = last_line(process)
    assert process.returncode == 2 and error["type"] == "CheckpointError"
    assert "could not be written" in error["error"] and "step 7 is safe" in error["error"]
    assert "note going on from the checkpoint of step 7" in lines
    assert "Traceback" not in stderr
    assert steps_in(tmp_path / "checkpoints") == [7]
    assert_same(before, load_params(tmp_path / "checkpoints", param_shapes(), average=False))
