"""Trace of some steps by ``jax.profiler``, for XProf, TensorBoard or Perfetto."""

import contextlib
from collections.abc import Callable

import jax

from crossattn.train import processes, storage
from crossattn.train.storage import Folder


class Trace:
    """Trace of the main process and its devices, in a folder.

    first: the first step, counted from 1; None is no trace. steps: number of steps; settle: waits for the
    steps that the devices are computing.
    """

    def __init__(self, folder: Folder, first: int | None, steps: int, settle: Callable[[], None]):
        self._folder, self._settle = folder, settle
        self._steps = range(0) if first is None else range(first, first + steps)
        self._running = contextlib.ExitStack()
        self._begun = False

    def before(self, step: int) -> None:
        """Begins the trace at its first step."""
        if not self._begun and step in self._steps and processes.is_main():
            self._begun = True
            self._settle()
            folder = self._running.enter_context(storage.filled(self._folder))
            self._running.enter_context(jax.profiler.trace(folder))

    def after(self, step: int) -> None:
        """Ends the trace after its last step."""
        if self._begun and step + 1 == self._steps.stop:
            self._settle()
            self.close()

    def close(self) -> None:
        """Writes the trace as far as it is."""
        self._running.close()
