"""What only a process of its own can show: Ctrl-C from outside, a disk that fills up.

``kill -9`` is in ``tests/experiments/test_resume.py``.
"""

import os
import signal

import jax
import numpy as np
from toy_task import ToyTask

from crossattn.train.checkpoint import load_params, steps_in

OPTIONS = {
    "config": {"steps": 60, "log_every": 10, "ema_decay": 0.9},
    "optim": {"learning_rate": 0.01, "weight_decay": 0.1},
    "checkpoint": {"every": 7},
    "task": {"delay": 0.02},
}


def read_until(process, step):
    """Reads what the toy program prints up to a step; whether it got there."""
    for line in process.stdout:
        if line.startswith("tick") and int(line.split()[1]) >= step:
            return True
    return False


def test_an_interrupt_saves_and_the_same_command_goes_on(toy_process, last_line, tmp_path):
    process = toy_process(tmp_path, OPTIONS)
    assert read_until(process, 3)
    process.send_signal(signal.SIGTERM)
    stopped, _, stderr = last_line(process)
    assert process.returncode == 0 and stopped["status"] == "interrupted"
    assert stderr.strip() == "SIGTERM: finishing the step and saving; once more to kill"
    assert (tmp_path / "checkpoints" / str(stopped["step"])).is_dir()


def test_a_disk_that_fills_up_is_one_clear_error_and_loses_nothing(
    toy_process, last_line, tmp_path
):
    process = toy_process(tmp_path, OPTIONS | {"task": {"poison_at": 10}})
    _, _, _ = last_line(process)
    assert os.listdir(tmp_path / "checkpoints") == ["7"]
    before = load(tmp_path)
    process = toy_process(tmp_path, OPTIONS | {"file_limit": 2000})
    error, lines, stderr = last_line(process)
    assert process.returncode == 2 and error["type"] == "CheckpointError"
    assert "could not be written" in error["error"] and "step 7 is safe" in error["error"]
    assert "note going on from the checkpoint of step 7" in lines
    assert "Traceback" not in stderr
    assert steps_in(tmp_path / "checkpoints") == [7]
    jax.tree.map(np.testing.assert_array_equal, before, load(tmp_path))


def load(workdir):
    target = jax.eval_shape(ToyTask().init, jax.random.key(0))
    params, step = load_params(workdir / "checkpoints", target, average=False)
    assert step == 7
    return params
