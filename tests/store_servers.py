"""Object stores on this machine, as the tests need them: two servers of their own, with a bucket in each.

The one thing to know: the one for gs:// takes every write, also one on a condition that does not hold; the
one for s3:// holds to conditions as S3 does. Both keep what they are given in memory.
"""

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
import uuid

_SERVERS = {
    "gs": ("gcp_storage_emulator", "start", "-M", "-q", "--default-bucket=bucket", "--port={port}"),
    "s3": ("moto.server", "--port={port}"),
}


@contextlib.contextmanager
def serving():
    """Both servers, and what they make of the environment."""
    ports = {scheme: _free_port() for scheme in _SERVERS}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    servers = [
        subprocess.Popen(
            [sys.executable, "-m", *(word.format(port=ports[scheme]) for word in words)], **quiet
        )
        for scheme, words in _SERVERS.items()
    ]
    try:
        _answered(servers[0], f"http://127.0.0.1:{ports['gs']}/storage/v1/b", "GET")
        _answered(servers[1], f"http://127.0.0.1:{ports['s3']}/bucket", "PUT")
        yield {
            "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{ports['gs']}",
            "TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{ports['gs']}",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # which asks for credentials
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports['s3']}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        for server in servers:
            server.kill()
            server.wait()


def fresh(scheme):
    """A folder in the bucket that nobody has written to."""
    return f"{scheme}://bucket/{uuid.uuid4().hex}/run"


def _free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _answered(server, url, method, seconds=60):
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=10):
                return
        except OSError:
            assert server.poll() is None, f"{server.args[2]} ends at once: pip install '.[test]'"
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
