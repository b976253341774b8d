"""Processes of one run: they join, stop after the same step, and exchange values.

All processes call every function but `is_main`.
"""

import json
import os
import signal
import sys
import threading
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from crossattn.train.errors import JoinError

BY_HAND = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def join(initialization_timeout: int = 300, heartbeat_timeout_seconds: int = 100) -> None:
    """Joins this process to the others of its run, before any computation.

    JAX finds them under SLURM, Open MPI, Kubernetes and on TPU pods; elsewhere the variables BY_HAND name
    them. An uncaught error then ends this process at once, and the others by JAX's heartbeats.

    Args:
        initialization_timeout: seconds in which all processes must join.
        heartbeat_timeout_seconds: seconds without a heartbeat after which a process counts as dead.

    Raises:
        JoinError: JAX did not find the other processes.
    """
    given = {name: os.environ.get(name) for name in BY_HAND}
    count, index = (given[name] for name in BY_HAND[1:])
    try:
        jax.distributed.initialize(
            num_processes=int(count) if count else None,
            process_id=int(index) if index else None,
            initialization_timeout=initialization_timeout,
            heartbeat_timeout_seconds=heartbeat_timeout_seconds,
        )
    except Exception as error:  # JAX raises errors of all kinds.
        said = ", ".join(f"{name} is {value or 'not set'}" for name, value in given.items())
        raise JoinError(
            f"the processes of the run did not join: {' '.join(str(error).split())}; {said}; expected a"
            " cluster that JAX knows (SLURM, Open MPI, Kubernetes, TPU pods), or HOST:PORT of process 0, the"
            " number of processes and the index of this one, from 0"
        ) from error
    print_error = sys.excepthook

    def end(*error: Any) -> None:
        print_error(*error)
        leave(1)

    sys.excepthook = end


def leave(code: int) -> None:
    """Ends a failed process of several at once; JAX's own exit would wait for the others forever."""
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class StopRequest:
    """Handler of SIGTERM and Ctrl-C, by which a run finishes its step, saves and ends.

    ``with StopRequest() as stop:``, then ``stop.after(step)`` after every step. The second signal kills.
    Outside the main thread Python allows no handlers, and signals keep their effect. Of several processes,
    SIGTERM for any one stops all, through JAX, and Ctrl-C ends the process.
    """

    def __init__(self):
        self._asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and jax.process_count() == 1:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def after(self, step: int) -> bool:
        """Returns whether the run stops after this step, the same one in all processes."""
        if jax.process_count() == 1:
            return self._asked
        return multihost_utils.reached_preemption_sync_point(step)

    def _ask(self, number: int, _) -> None:
        self._asked = True
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)
        # Not print: a handler may interrupt one.
        name = signal.Signals(number).name
        os.write(2, f"\n{name}: finishing the step and saving; once more to kill\n".encode())


def is_main() -> bool:
    """Returns whether this is the process that writes logs and files."""
    return jax.process_index() == 0


def gather(value: Any) -> list[Any]:
    """Returns the JSON-able values of all processes, in their order."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(text.size))
    padded = np.zeros(int(np.max(sizes)), np.uint8)
    padded[: text.size] = text
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(bytes(row[:size]).decode()) for row, size in zip(rows, sizes, strict=True)]


def barrier(name: str) -> None:
    """Waits for every process."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
