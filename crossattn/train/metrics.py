"""Metrics of a run: means over a window of steps, and the time spent on each part.

The host reads numbers some steps late, so that it never keeps the device waiting; `flush` catches up before
an evaluation or a checkpoint.
"""

import copy
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from crossattn.train.errors import NonFiniteLoss
from crossattn.train.members import Member, spread
from crossattn.train.writers import Writer

# Steps the host may run ahead of the device: one being computed, one waiting behind it.
LAG = 2


class Meter:
    """Collector of the steps' metrics, which writes windows of `log_every` steps to a log.

    learning_rate: of a step, counted from 0; members: runs with values of their own; wall: seconds since
    the epoch, for goodput over restarts.
    """

    def __init__(
        self,
        log: Writer,
        log_every: int,
        learning_rate: Callable[[int], Any],
        members: Sequence[Member] = (),
        clock: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = time.time,
    ):
        self._log, self._log_every, self._learning_rate = log, log_every, learning_rate
        self._members = members
        self._clock, self._wall, self._begun = clock, wall, wall()
        self._pending: deque[tuple[int, Any, float | None]] = deque()
        self._mark = clock()
        self._window = _empty_window()
        self._totals = {"train_seconds": 0.0, "compile_seconds": 0.0}

    @contextmanager
    def waiting_for_input(self) -> Iterator[None]:
        """Counts the time inside as waiting for input."""
        start = self._clock()
        yield
        self._window["input_seconds"] += self._clock() - start

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Counts the time inside, of the first call with new shapes, as compilation."""
        start = self._clock()
        yield
        seconds = self._clock() - start
        self._totals["compile_seconds"] += seconds
        self._mark += seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time inside, of evaluation and saving."""
        self.flush()
        yield
        self._mark = self._clock()

    def add(self, step: int, metrics: Mapping[str, Any], peak_seconds: float | None = None) -> None:
        """Queues the metrics of a step.

        peak_seconds: the time of its model FLOPs at the devices' peak, for MFU; None is unknown.

        Raises:
            NonFiniteLoss: an earlier step's loss or gradient was not finite.
        """
        self._pending.append((step, metrics, peak_seconds))
        while len(self._pending) > LAG:
            self._take()

    def flush(self) -> None:
        """Waits for all queued steps. Raises as `add` does."""
        while self._pending:
            self._take()

    def get_state(self) -> dict[str, Any]:
        """Returns a JSON-able state, with which a resumed run continues its log."""
        kept = {"window": self._window, "totals": self._totals, "begun": self._begun}
        return jax.tree.map(lambda x: np.asarray(x).tolist(), kept)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a state of ``get_state``."""
        self._window = copy.deepcopy(state["window"])
        self._totals = copy.deepcopy(state["totals"])
        self._begun = state.get("begun", self._begun)

    @property
    def totals(self) -> dict[str, float]:
        """The run's train_seconds, compile_seconds and tokens (if counted), restarts included."""
        return dict(self._totals)

    def _take(self) -> None:
        step, metrics, peak_seconds = self._pending.popleft()
        metrics = jax.device_get(metrics)
        now = self._clock()
        seconds, self._mark = max(now - self._mark, 0.0), now
        sums, finite = metrics["sums"], np.asarray(metrics["finite"])
        if not finite.all():
            raise self._not_finite(step, metrics)
        window = self._window
        window["steps"] += 1
        window["seconds"] += seconds
        window["grad_norm"] = np.asarray(window["grad_norm"]) + metrics["grad_norm"]
        if peak_seconds is not None:
            window["peak_seconds"] = window.get("peak_seconds", 0.0) + peak_seconds
        for name, value in sums.items():
            window["sums"][name] = np.asarray(window["sums"].get(name, 0.0)) + np.float64(value)
        if "tokens" in sums:
            self._totals["tokens"] = self._totals.get("tokens", 0.0) + float(np.sum(sums["tokens"]))
        self._totals["train_seconds"] += seconds
        self._log.tick(step, self._means(window))
        if step % self._log_every == 0:
            self._log.write(step, "train", self._values(step))
            self._window = _empty_window()

    def _values(self, step: int) -> dict[str, float]:
        window, seconds = self._window, max(self._window["seconds"], 1e-9)
        share = {"mfu": window["peak_seconds"] / seconds} if "peak_seconds" in window else {}
        return {
            **self._means(window),
            **share,
            "goodput": self._totals["train_seconds"] / max(self._wall() - self._begun, 1e-9),
            **self._each("grad_norm", window["grad_norm"] / window["steps"]),
            **self._each("learning_rate", self._learning_rate(step - 1)),
            "seconds_per_step": window["seconds"] / window["steps"],
            "input_fraction": window["input_seconds"] / seconds,
            **self._totals,
        }

    def _means(self, window: Mapping[str, Any]) -> dict[str, float]:
        """Divides sums by their weight; tokens, which are only counted, by the seconds."""
        sums = dict(window["sums"])
        weight, tokens = np.asarray(sums.pop("weight")), sums.pop("tokens", None)
        means: dict[str, float] = {}
        for name, value in sums.items():
            means |= self._each(name, np.asarray(value) / np.where(weight == 0, 1.0, weight))
        if tokens is not None:
            means["tokens_per_second"] = float(np.sum(tokens)) / max(window["seconds"], 1e-9)
        return means

    def _each(self, name: str, value: Any) -> dict[str, float]:
        """Returns a value by its name; of members the mean, and each member's."""
        if not self._members:
            return {name: float(value)}
        return spread(name, np.broadcast_to(value, len(self._members)).tolist(), self._members)

    def _not_finite(self, step: int, metrics: Mapping[str, Any]) -> NonFiniteLoss:
        sums, wrong = metrics["sums"], np.flatnonzero(~np.asarray(metrics["finite"]))[0]
        loss, weight, norm = (
            np.ravel(x)[wrong] for x in (sums["loss"], sums["weight"], metrics["grad_norm"])
        )
        name = f" of {self._members[wrong].name}" if self._members else ""
        return NonFiniteLoss(
            f"step {step}: the loss{name} is {loss / (weight or 1.0):.4g} and its gradient norm"
            f" {norm:.4g}, not finite; nothing of this step was kept"
        )


def _empty_window() -> dict[str, Any]:
    return {"steps": 0, "seconds": 0.0, "input_seconds": 0.0, "grad_norm": 0.0, "sums": {}}
