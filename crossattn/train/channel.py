"""JSON objects, a line each, over one TCP connection between two processes of a run.

The one thing to know: the system itself says when the other end is gone. A process that dies is known at
once, and a machine that is cut off or loses its power after `SILENT` seconds, however busy both
processes are.
"""

import errno
import json
import selectors
import socket
import threading
from typing import Any

SILENT = 30  # seconds
_LONGEST = 2**20  # bytes of a line
_CUT_OFF = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
_OTHER = "what answers there is no process of this run"


class Gone(Exception):
    """The other end has closed the connection, or sends what is no message."""


class Silent(Gone):
    """The other end, or what lies between, has not answered for `SILENT` seconds."""


class Channel:
    """One end of a connection; any thread may send, one receives."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._received = b""
        self._sending = threading.Lock()
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", SILENT // 3),
            ("TCP_KEEPINTVL", SILENT // 6),
            ("TCP_KEEPCNT", 4),
            ("TCP_USER_TIMEOUT", 1000 * SILENT),
        ):
            if hasattr(socket, name):  # not every system has all
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        """Of the connection, so that ``select`` takes a channel."""
        return self._connection.fileno()

    def close(self) -> None:
        """End the connection; the other end is told."""
        self._connection.close()

    def send(self, **message: Any) -> None:
        """Never fails: that the other end is gone is known to who receives."""
        try:
            with self._sending:
                self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return

    def wait(self, seconds: float) -> bool:
        """Whether there is something to receive within so many seconds."""
        with selectors.DefaultSelector() as ready:
            ready.register(self, selectors.EVENT_READ)
            return bool(ready.select(max(seconds, 0)))

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come whole by now; waits until there is something.

        Raises:
            Gone: there will be no more.
        """
        try:
            some = self._connection.recv(2**16)
        except TimeoutError as error:
            raise Silent(error.strerror) from None
        except OSError as error:
            raise (Silent if error.errno in _CUT_OFF else Gone)(error.strerror) from None
        if not some:
            raise Gone("the connection was closed")
        *lines, self._received = (self._received + some).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            raise Gone(_OTHER) from None
        if len(self._received) > _LONGEST or not all(isinstance(each, dict) for each in messages):
            raise Gone(_OTHER)
        return messages
