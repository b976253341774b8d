"""Two implementations timed in turn, so that a machine whose speed drifts is fair to both.

Each has a process of its own: neither's threads, caches or allocator settings touch the other's.
"""

import contextlib
import multiprocessing
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np


def alternate(
    contestants: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Seconds of each call: A B A B ..., after ``warmup`` rounds that do not count.

    Each call waits a little, until the threads of the one before have stopped spinning for more work.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for index in range(warmup + rounds):
        for name, call in contestants.items():
            time.sleep(0.25)
            start = time.perf_counter()
            call()
            if index >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return seconds


@contextlib.contextmanager
def elsewhere(make: Callable[..., Callable[..., Any]], *arguments: Any) -> Iterator[Callable]:
    """``make(*arguments)`` in a new process; calling what this gives calls what that made, there.

    Arguments of that call, and what it returns, must pickle; an exception there is raised here as
    RuntimeError.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, make, arguments), daemon=True)
    process.start()
    there.close()

    def answer() -> Any:
        try:
            fine, value = here.recv()
        except EOFError:
            raise RuntimeError(f"the process of {make.__name__} died") from None
        if not fine:
            raise RuntimeError(value)
        return value

    def call(*arguments: Any) -> Any:
        here.send(arguments)
        return answer()

    try:
        answer()
        yield call
    finally:
        here.close()
        process.join()


def _serve(connection, make, arguments) -> None:
    def answered(function: Callable, *arguments: Any) -> Any:
        try:
            value = function(*arguments)
        except Exception as error:
            connection.send((False, f"{type(error).__name__}: {error}"))
            return None
        connection.send((True, None if callable(value) else value))
        return value

    call = answered(make, *arguments)
    with contextlib.suppress(EOFError):
        while call:
            answered(call, *connection.recv())


def show(title: str, seconds: Mapping[str, list[float]], unit: str, amount: float) -> float:
    """Print medians and the ratio of the first contestant's to the last's; return the ratio."""
    medians = {name: float(np.median(times)) for name, times in seconds.items()}
    print(title)
    for name, median in medians.items():
        low, high = min(seconds[name]), max(seconds[name])
        print(
            f"  {name:<24} {median * 1e3:8.1f} ms  ({low * 1e3:.1f} to {high * 1e3:.1f})"
            f"  {amount / median:10,.0f} {unit}/s"
        )
    first, last = list(medians.values())[0], list(medians.values())[-1]
    print(f"  ratio {first / last:.2f}x\n", flush=True)
    return first / last


def machine() -> str:
    """The machine in a line."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            models = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
        name = models[0] if models else name
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}"
