"""Processes of one run come to one end: asked to stop, killed, or broken by an error of one of them.

`experiments/cluster` tries the same under SLURM and Open MPI.
"""

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

HEARTBEAT = 10  # seconds
OPTIONS = {
    "config": {"steps": 40, "log_every": 1, "eval_every": 10},
    "checkpoint": {"every": 4},
    "join": {"initialization_timeout": 60, "heartbeat_timeout_seconds": HEARTBEAT},
}


@pytest.fixture(scope="module")
def two(two_toy_processes):
    """Starts both processes of a run."""
    return lambda workdir, **task: two_toy_processes(
        workdir, OPTIONS | {"task": {"delay": 0.05, **task}}
    )


@pytest.fixture(scope="module")
def last_lines(last_line):
    """What each of several processes printed last; all are read at once, so that no full pipe stops one."""

    def read(processes):
        with ThreadPoolExecutor(len(processes)) as pool:
            return [said for said, _, _ in pool.map(last_line, processes)]

    return read


@pytest.fixture(scope="module")
def whole(two, last_lines, tmp_path_factory):
    """What process 0 of a run that was left alone printed last."""
    processes = two(tmp_path_factory.mktemp("whole") / "run")
    said, _ = last_lines(processes)
    assert [process.returncode for process in processes] == [0, 0]
    return said


def ends_in_time(process):
    """Ends a process's test unless JAX ends the process within two heartbeats; exit code and stderr."""
    begun = time.monotonic()
    code = process.wait(60)
    assert code != 0 and time.monotonic() - begun < 2 * HEARTBEAT
    return code, process.stderr.read()


@pytest.mark.slow  # SIGTERM and errors in one of two processes are not
@pytest.mark.parametrize("killed", [1, 0])
def test_a_process_that_is_killed_ends_the_other_and_the_restart_ends_with_the_same_bits(
    two, reach, last_line, whole, tmp_path, killed
):
    processes = two(tmp_path / "run")
    reach(processes[0], 10)
    processes[killed].kill()
    ends_in_time(processes[1 - killed])
    said, lines, _ = last_line(two(tmp_path / "run")[0])
    assert any(line.startswith("note going on from the checkpoint of step") for line in lines)
    assert said == whole


@pytest.mark.slow
def test_sigterm_for_one_process_saves_one_checkpoint_on_all(
    two, reach, last_lines, whole, tmp_path
):
    processes = two(tmp_path / "run")
    reach(processes[0], 10)
    processes[1].send_signal(signal.SIGTERM)
    said, other = last_lines(processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert said == other and said["status"] == "interrupted" and 10 <= said["step"] < 40
    assert (tmp_path / "run" / "checkpoints" / str(said["step"])).is_dir()
    assert last_lines(two(tmp_path / "run"))[0] == whole


@pytest.mark.slow
def test_an_error_in_one_process_is_told_there_and_ends_both(two, tmp_path):
    broken, other = two(tmp_path / "run", broken_in=0)
    code, stderr = ends_in_time(broken)
    assert code == 1 and stderr.rstrip().endswith("ValueError: row 5 cannot be read")
    ends_in_time(other)
