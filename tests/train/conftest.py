"""The toy task is a module next to the tests, and a program for tests that need a process.

Compiled code is kept on disk for the session: these tests start the same run again and again.
"""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import kept, one_device, with_devices

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


@pytest.fixture(scope="module", autouse=True)
def _keep_compiled_code(compiled_code):
    with kept(compiled_code):
        yield


@pytest.fixture(scope="module", autouse=True)
def _on_one_device():
    with one_device():
        yield


@pytest.fixture(scope="module")
def toy_process(compiled_code):
    """Starts the toy program in a process of its own; whatever still runs at the end is ended."""
    started = []

    def start(workdir, options, *, devices=1, **variables):
        env = with_devices(devices) | {
            "JAX_COMPILATION_CACHE_DIR": compiled_code,
            "PYTHONFAULTHANDLER": "1",  # what hangs prints its threads when it is aborted
            **variables,
        }
        if "file_limit" in options:  # what it cut short, others would read
            del env["JAX_COMPILATION_CACHE_DIR"]
        command = [sys.executable, str(HERE / "toy_task.py"), str(workdir), json.dumps(options)]
        process = subprocess.Popen(
            command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def two_toy_processes(toy_process):
    """Starts the toy program in two processes that join to one run."""

    def start(workdir, options, **settings):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        variables = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", **settings}
        return [
            toy_process(workdir, options, JAX_PROCESS_ID=str(index), **variables)
            for index in range(2)
        ]

    return start


@pytest.fixture(scope="module")
def reach():
    """Reads the output of a toy program up to a step."""

    def read(process, step):
        for line in process.stdout:
            if line.startswith("tick") and int(line.split()[1]) >= step:
                return
        pytest.fail(process.stderr.read())

    return read


@pytest.fixture(scope="module")
def last_line():
    """(the JSON that the toy program printed last, all its lines, stderr) once it has ended."""

    def read(process):
        try:
            out, err = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            out, err = process.communicate()
            pytest.fail(f"a toy program hangs:\n{out}\n{err}")
        lines = out.splitlines()
        assert lines and lines[-1].startswith("{"), f"{out}\n{err}"
        return json.loads(lines[-1]), lines, err

    return read
