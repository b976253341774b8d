"""Processes of one run come to one end: asked to stop, killed, or broken by an error of one of them.

`experiments/cluster` tries the same under SLURM and Open MPI.
"""

import signal
import socket
import time

import pytest

from crossattn.train.watch import LOST

OPTIONS = {
    "config": {"steps": 40, "log_every": 1, "eval_every": 10},
    "checkpoint": {"every": 4},
    "join_seconds": 60.0,
}


@pytest.fixture(scope="module")
def two(toy_process):
    """Starts both processes of a run."""

    def start(workdir, **task):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        variables = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
        options = OPTIONS | {"task": {"delay": 0.05, **task}}
        return [
            toy_process(workdir, options, JAX_PROCESS_ID=str(index), **variables)
            for index in range(2)
        ]

    return start


@pytest.fixture(scope="module")
def whole(two, last_line, tmp_path_factory):
    """What process 0 of a run that was left alone printed last."""
    processes = two(tmp_path_factory.mktemp("whole") / "run")
    said = [last_line(process)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return said[0]


def reach(process, step):
    """Reads what process 0 prints up to a step."""
    for line in process.stdout:
        if line.startswith("tick") and int(line.split()[1]) >= step:
            return
    pytest.fail(process.stderr.read())


def ends(process):
    """Exit code and stderr, which has to come within the minute."""
    return process.wait(60), process.stderr.read()


def kill(processes, index):
    """Kills one of two in the middle; the other has to say so in one line, and soon."""
    reach(processes[0], 10)
    processes[index].kill()
    killed_at = time.monotonic()
    code, stderr = ends(processes[1 - index])
    assert code == LOST and time.monotonic() - killed_at < 30
    assert stderr.endswith("\n") and stderr.count("\n") == 1, stderr
    assert stderr.startswith(f"error: process {index} of 2 on {socket.gethostname()} died; ")


def test_a_process_that_is_killed_ends_the_other_with_a_line_and_the_restart_goes_on_exactly(
    two, last_line, whole, tmp_path
):
    kill(two(tmp_path / "run"), 1)
    said, lines, _ = last_line(two(tmp_path / "run")[0])
    assert any(line.startswith("note going on from the checkpoint of step") for line in lines)
    assert said == whole


def test_the_loss_of_process_0_is_told_by_the_other_and_not_by_a_dump(two, tmp_path):
    kill(two(tmp_path / "run"), 0)


def test_sigterm_for_one_process_saves_one_checkpoint_on_all(two, last_line, whole, tmp_path):
    processes = two(tmp_path / "run")
    reach(processes[0], 10)
    processes[1].send_signal(signal.SIGTERM)
    said, _, stderr = last_line(processes[0])
    other, _, others = last_line(processes[1])
    assert [process.returncode for process in processes] == [0, 0], stderr + others
    assert said == other and said["status"] == "interrupted" and 10 <= said["step"] < 40
    assert stderr == f"note: process 1 of 2 on {socket.gethostname()} was asked to stop (SIGTERM)\n"
    assert others.strip() == "SIGTERM: finishing the step and saving; once more to kill"
    assert (tmp_path / "run" / "checkpoints" / str(said["step"])).is_dir()
    assert last_line(two(tmp_path / "run")[0])[0] == whole


def test_an_error_in_one_process_ends_both_and_both_say_it(two, tmp_path):
    broken, other = two(tmp_path / "run", broken_in=0)
    (code, stderr), (others_code, others) = ends(broken), ends(other)
    assert code == others_code == 1
    assert stderr.endswith("ValueError: row 5 cannot be read\n")
    name = f"process 0 of 2 on {socket.gethostname()}"
    assert others == f"error: {name} failed: ValueError: row 5 cannot be read\n"
