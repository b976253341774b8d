"""A server of gs:// on this machine, as the tests need it, with one bucket, kept in memory."""

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
import uuid

_SERVER = ("gcp_storage_emulator", "start", "-M", "-q", "--default-bucket=bucket")


@contextlib.contextmanager
def serving():
    """The server, and the variables of gcsfs, tensorstore and Google's client that lead to it."""
    address = f"http://127.0.0.1:{(port := _free_port())}"
    server = subprocess.Popen(
        [sys.executable, "-m", *_SERVER, f"--port={port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _answered(server, f"{address}/storage/v1/b")
        yield {
            "STORAGE_EMULATOR_HOST": address,
            "TENSORSTORE_GCS_HTTP_URL": address,
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # which asks for credentials
            "GOOGLE_CLOUD_PROJECT": "tests",
        }
    finally:
        server.kill()
        server.wait()


def fresh():
    """A folder in the bucket that nobody has written to."""
    return f"gs://bucket/{uuid.uuid4().hex}/run"


def _free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _answered(server, url, seconds=60):
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10):
                return
        except OSError:
            assert server.poll() is None, f"{server.args[2]} ends at once: pip install '.[test]'"
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
