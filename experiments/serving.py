"""A page that is served to the person at this machine: one page, one question at a time.

The server is that of the standard library, a thread a connection, since browsers open connections ahead and
leave them idle; the model answers one question after another. A framework would bring routes, workers and
dependencies, none of which a page for one person needs. What the library leaves to its user is done here: the
address is that of this machine alone, and a question is refused that names another host (a page elsewhere
whose name was pointed at this machine), comes from another page, or is longer than it may be.
"""

import errno
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.client import HTTP_PORT
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from crossattn.data.errors import DataError
from crossattn.viz.explore import to_json
from experiments import launch

HOST = "127.0.0.1"
_SECONDS = 20  # after which a connection that says nothing is closed
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class PageServer(ThreadingHTTPServer):
    """Server of a page and of answers to it, on 127.0.0.1 alone.

    Args:
      page: the HTML.
      answer: from the body of a question and the name of its file, if any, to data of the page; raises
        DataError, Refused or ValueError with a line for the person.
      port: 0 takes a free one; ``address`` says which.
      longest: bytes of a question.

    Raises:
      Refused: the port is taken, or not for this user.
    """

    daemon_threads = True
    allow_reuse_port = False  # a second server on the port would take turns with this one

    def __init__(
        self, page: str, answer: Callable[[bytes, str], Any], port: int, longest: int
    ) -> None:
        self.page, self.answer, self.longest = page.encode(), answer, longest
        self.asked = threading.Lock()
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            why = (
                "is taken"
                if error.errno == errno.EADDRINUSE
                else f"cannot be had: {error.strerror}"
            )
            raise launch.Refused(
                f"port {port} of {HOST} {why}; name another with --port, or any free one with --port=0."
            ) from None

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names under which a browser may ask."""
        port = self.server_port
        bare = (HOST, "localhost") if port == HTTP_PORT else ()  # browsers leave ":80" out
        return f"{HOST}:{port}", f"localhost:{port}", *bare

    @property
    def address(self) -> str:
        """The address for a browser."""
        return f"http://{HOST}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "crossattn", ""
    timeout = _SECONDS

    def do_GET(self) -> None:
        if not self._is_ours():
            return
        if self.path != "/":
            self._refuse(HTTPStatus.NOT_FOUND, "there is one page here, /")
            return
        self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)

    def do_POST(self) -> None:
        if not self._is_ours():
            return
        if self.path != "/read":
            self._refuse(HTTPStatus.NOT_FOUND, "questions go to /read")
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "the question does not say its length")
            return
        if len(length) > 12 or int(length) > self.server.longest:
            said = f"the question has {length[:12]} bytes; expected at most {self.server.longest}."
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, said)
            return
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            return  # whoever asked has gone
        name = unquote(self.headers.get("X-Name", ""))[:200]
        try:
            with self.server.asked:
                answer = self.server.answer(body, name)
        except (DataError, launch.Refused, ValueError) as error:
            self._refuse(HTTPStatus.BAD_REQUEST, " ".join(str(error).split()))
            return
        self._send(HTTPStatus.OK, "application/json", to_json(answer).encode())

    def _is_ours(self) -> bool:
        """Whether the question names this host, and comes from its page or from no page."""
        origin = self.headers.get("Origin")
        origins = (None, *(f"http://{host}" for host in self.server.hosts))
        if self.headers.get("Host") in self.server.hosts and origin in origins:
            return True
        self._refuse(HTTPStatus.FORBIDDEN, f"this page is read at {self.server.address} alone")
        return False

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._send(status, "application/json", to_json({"error": why}).encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in (_HEADERS | {"Content-Type": kind}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: what a person types is not for a log."""
