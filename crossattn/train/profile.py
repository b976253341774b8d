"""A trace of some steps by ``jax.profiler``, for XProf, TensorBoard or Perfetto."""

import contextlib
from collections.abc import Callable

import jax

from crossattn.train import processes, storage
from crossattn.train.storage import Folder


class Trace:
    """What the main process and its devices do in some steps, kept in a folder.

    first: the step, counted from 1, before which it begins; None is no trace. steps: how many; settle: waits
    for the steps that a device has been given.
    """

    def __init__(self, folder: Folder, first: int | None, steps: int, settle: Callable[[], None]):
        self._folder, self._settle = folder, settle
        self._steps = range(0) if first is None else range(first, first + steps)
        self._running = contextlib.ExitStack()
        self._begun = False

    def before(self, step: int) -> None:
        """Begins where this is the first step."""
        if not self._begun and step in self._steps and processes.is_main():
            self._begun = True
            self._settle()
            folder = self._running.enter_context(storage.filled(self._folder))
            self._running.enter_context(jax.profiler.trace(folder))

    def after(self, step: int) -> None:
        """Ends where this was the last step."""
        if self._begun and step + 1 == self._steps.stop:
            self._settle()
            self.close()

    def close(self) -> None:
        """Writes what there is of it."""
        self._running.close()
