"""Launchers, tasks and benchmarks.

Imports of a launcher take seconds. Ctrl-C ends the process with a word until the launcher begins, instead of
the stack of an import.
"""

import os
import signal
import sys
from types import FrameType


def _stop(number: int, frame: FrameType | None) -> None:
    os.write(2, b"stopped.\n")
    os._exit(130)


def begun() -> bool:
    """Restores Ctrl-C; returns whether ``python -m experiments.NAME`` started this process."""
    if signal.getsignal(signal.SIGINT) is not _stop:
        return False
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return True


# The first argument is -m only while Python looks for the module.
if sys.argv[:1] == ["-m"]:
    signal.signal(signal.SIGINT, _stop)
