"""Launchers, tasks and benchmarks: whatever runs, beside the library that it runs on.

Importing what a launcher needs takes seconds, in which Ctrl-C would print the stack
of whatever is being imported; until a launcher begins, it ends the process with a word instead.
"""

import os
import signal
import sys
from types import FrameType


def _stop(number: int, frame: FrameType | None) -> None:
    os.write(2, b"stopped.\n")
    os._exit(130)


def begun() -> bool:
    """Give Ctrl-C back to Python; whether this process was started as ``python -m experiments.NAME``."""
    if signal.getsignal(signal.SIGINT) is not _stop:
        return False
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return True


# So it reads while Python looks for the module that -m names, and at no other time.
if sys.argv[:1] == ["-m"]:
    signal.signal(signal.SIGINT, _stop)
