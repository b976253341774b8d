"""Ctrl-C and SIGTERM as a polite request: finish the step, save, leave."""

import os
import signal
import threading


class StopRequest:
    """`with StopRequest() as stop:` then look at `stop.requested` between steps: the signal's name.

    The first signal asks, the second kills at once. Outside the main thread, where Python
    allows no handlers, nothing is changed.
    """

    def __init__(self):
        self.requested: str | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _ask(self, number: int, _) -> None:
        self.requested = name = signal.Signals(number).name
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)
        # Not print: a handler may come in the middle of one.
        os.write(2, f"\n{name}: finishing the step and saving; once more to kill\n".encode())
