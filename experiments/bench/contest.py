"""Implementations timed in turn, so that a machine whose speed drifts is fair to all of them."""

import contextlib
import multiprocessing
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from experiments.launch import keep_heap

_made: dict[str, Callable[..., Any]] = {}


def alternate(
    contestants: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Times each call in the order A B A B ..., after ``warmup`` rounds that do not count.

    Each call waits until the threads of the call before have stopped spinning for more work.
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
    """Yields the function that ``make(*arguments)`` returns, which runs in a new process.

    Threads and caches of one contestant do not affect another, and each keeps freed memory as our launchers
    do. The process ends with this one, however that ends. Arguments and results of calls must pickle; a call
    in a process that died raises BrokenProcessPool.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        process.submit(_make, make, arguments).result()
        yield lambda *given: process.submit(_call, *given).result()


def _make(make: Callable, arguments: tuple) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    keep_heap()
    _made["function"] = make(*arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _call(*arguments: Any) -> Any:
    return _made["function"](*arguments)


def show(title: str, seconds: Mapping[str, list[float]], unit: str, amount: float) -> None:
    """Prints medians, and the ratio of the first contestant's to the last's."""
    medians = {name: float(np.median(times)) for name, times in seconds.items()}
    print(title)
    for name, median in medians.items():
        low, high = min(seconds[name]), max(seconds[name])
        print(
            f"  {name:<24} {median * 1e3:8.1f} ms  ({low * 1e3:.1f} to {high * 1e3:.1f})"
            f"  {amount / median:10,.0f} {unit}/s"
        )
    first, *_, last = medians.values()
    print(f"  ratio {first / last:.2f}x\n", flush=True)


def memory(name: str, process: int | str = "self") -> int:
    """Reads VmRSS or its peak, VmHWM, in bytes from Linux; 0 for a process that has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    fields = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(fields[0]) * 1024 if fields else 0


def machine() -> str:
    """Names processor, cores and Python in one line."""
    name, known = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if known.exists():
        models = [x for x in known.read_text(encoding="utf-8").splitlines() if "model name" in x]
        name = models[0].split(":", 1)[1].strip() if models else name
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}"
