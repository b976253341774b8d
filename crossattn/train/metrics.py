"""What a run has to show while it goes: sums over a window of steps, and where the time went.

Numbers are read back from the device some steps late, so that looking at
them never keeps it waiting; `flush` catches up before anything is evaluated or saved.
"""

import copy
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from crossattn.train.errors import NonFiniteLoss

# Steps the host may run ahead of the device: one being computed, one waiting behind it.
LAG = 2


class Meter:
    """Collects what each step returned; every `log_every` steps hands a window of it to `report`.

    report: called with (step, values) for a full window; tick: with (step, values so far) for
    every step; learning_rate: of a step, counted from 0; wall: seconds since a fixed day, for what
    one process does not see.
    """

    def __init__(
        self,
        *,
        log_every: int,
        learning_rate: Callable[[int], Any],
        report: Callable[[int, dict[str, float]], None],
        tick: Callable[[int, dict[str, float]], None],
        clock: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = time.time,
    ):
        self._log_every, self._learning_rate = log_every, learning_rate
        self._report, self._tick, self._clock = report, tick, clock
        self._wall, self._begun = wall, wall()
        self._pending: deque[tuple[int, Any, float | None]] = deque()
        self._mark = clock()
        self._window = _empty_window()
        self._totals = {"train_seconds": 0.0, "compile_seconds": 0.0}

    @contextmanager
    def waiting_for_input(self) -> Iterator[None]:
        """Around the making of a batch."""
        start = self._clock()
        yield
        self._window["input_seconds"] += self._clock() - start

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Around the first call with new shapes: counted as compilation, not as training."""
        start = self._clock()
        yield
        seconds = self._clock() - start
        self._totals["compile_seconds"] += seconds
        self._mark += seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around evaluation and saving: what is inside is not training time."""
        self.flush()
        yield
        self._mark = self._clock()

    def add(self, step: int, metrics: Mapping[str, Any], peak_seconds: float | None = None) -> None:
        """Queues what the step that ended at `step` returned.

        peak_seconds: those that its model FLOPs would take at the devices' peak; None where nobody knows.

        Raises:
            NonFiniteLoss: an earlier step's loss or gradient was not finite.
        """
        self._pending.append((step, metrics, peak_seconds))
        while len(self._pending) > LAG:
            self._take()

    def flush(self) -> None:
        """Waits for all steps given so far. Raises as `add` does."""
        while self._pending:
            self._take()

    def get_state(self) -> dict[str, Any]:
        """JSON-able; together with a checkpoint it lets the log go on as if never interrupted."""
        kept = {"window": self._window, "totals": self._totals, "begun": self._begun}
        return copy.deepcopy(kept)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``get_state`` gave."""
        self._window = copy.deepcopy(state["window"])
        self._totals = copy.deepcopy(state["totals"])
        self._begun = state.get("begun", self._begun)

    @property
    def totals(self) -> dict[str, float]:
        """train_seconds, compile_seconds and tokens (if they are counted) of the run, restarts included."""
        return dict(self._totals)

    def _take(self) -> None:
        step, metrics, peak_seconds = self._pending.popleft()
        metrics = jax.device_get(metrics)
        now = self._clock()
        seconds, self._mark = max(now - self._mark, 0.0), now
        sums = {name: float(value) for name, value in metrics["sums"].items()}
        if not bool(metrics["finite"]):
            loss = sums.get("loss", math.nan) / (sums["weight"] or 1.0)
            raise NonFiniteLoss(
                f"step {step}: the loss is {loss:.4g} and its gradient norm"
                f" {float(metrics['grad_norm']):.4g}, not finite; nothing of this step was kept"
            )
        window = self._window
        window["steps"] += 1
        window["seconds"] += seconds
        window["grad_norm"] += float(metrics["grad_norm"])
        if peak_seconds is not None:
            window["peak_seconds"] = window.get("peak_seconds", 0.0) + peak_seconds
        for name, value in sums.items():
            window["sums"][name] = window["sums"].get(name, 0.0) + value
        if "tokens" in sums:
            self._totals["tokens"] = self._totals.get("tokens", 0.0) + sums["tokens"]
        self._totals["train_seconds"] += seconds
        self._tick(step, _means(window))
        if step % self._log_every == 0:
            self._report(step, self._values(step))
            self._window = _empty_window()

    def _values(self, step: int) -> dict[str, float]:
        window, seconds = self._window, max(self._window["seconds"], 1e-9)
        share = {"mfu": window["peak_seconds"] / seconds} if "peak_seconds" in window else {}
        return {
            **_means(window),
            **share,
            "goodput": self._totals["train_seconds"] / max(self._wall() - self._begun, 1e-9),
            "grad_norm": window["grad_norm"] / window["steps"],
            "learning_rate": float(self._learning_rate(step - 1)),
            "seconds_per_step": window["seconds"] / window["steps"],
            "input_fraction": window["input_seconds"] / seconds,
            **self._totals,
        }


def _empty_window() -> dict[str, Any]:
    return {"steps": 0, "seconds": 0.0, "input_seconds": 0.0, "grad_norm": 0.0, "sums": {}}


def _means(window: Mapping[str, Any]) -> dict[str, float]:
    """The sums by their weight; tokens, which are only counted, by the time that they took."""
    sums = dict(window["sums"])
    weight, tokens = sums.pop("weight") or 1.0, sums.pop("tokens", None)
    means = {name: value / weight for name, value in sums.items()}
    if tokens is not None:
        means["tokens_per_second"] = tokens / max(window["seconds"], 1e-9)
    return means
