"""JAX's coordination service in a process of its own, which runs this file.

The one thing to know: JAX ends a process with a dump from its C++ the moment that this service is gone. In
process 0, as JAX has it, the service dies with it, and none of the others gets to say which has died; here
it lives on for a while, in which they do (`watch`).
"""

import os
import signal
import subprocess
import sys
import time
from types import TracebackType

_LINGERS = 3.0  # seconds after process 0, for the others to end in


class Coordinator:
    """The service for so many processes, as a process beside this one, which is process 0."""

    def __init__(self, count: int):
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(count)],  # found wherever this one found it
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # or Ctrl-C in a terminal would reach it
        )

    def __enter__(self) -> "Coordinator":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Left by an error, it goes; else it stays as long as this process."""
        if error is not None:
            self._process.kill()
            self._process.wait()

    def listen(self, address: str) -> None:
        """Serves at HOST:PORT from here on.

        Raises:
            RuntimeError: it cannot.
        """
        pipes = self._process.stdin, self._process.stdout
        assert pipes[0] is not None and pipes[1] is not None
        try:
            print(address, file=pipes[0], flush=True)
            answer = pipes[1].readline().strip()
        except BrokenPipeError:
            answer = ""
        if answer != "listening":
            raise RuntimeError(answer or "the coordination service did not start")


def _serve(count: int) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):  # which are for the training beside it
        signal.signal(number, signal.SIG_IGN)
    from jaxlib import _jax  # as jax.distributed does, whose own function would also take part

    address = sys.stdin.readline().strip()
    if not address:
        return
    try:
        service = _jax.get_distributed_runtime_service(address, count)
    except Exception as error:
        print(" ".join(str(error).split()), flush=True)
        return
    print("listening", flush=True)
    sys.stdin.read()  # until process 0 is gone
    time.sleep(_LINGERS)
    del service
    os._exit(0)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
