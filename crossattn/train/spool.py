"""Files that grow, for a store where nothing can be appended to.

The one thing to know: they grow on this machine and are uploaded whole, now and then in the
background, and whenever `flush` asks; a checkpoint asks before it is sealed, so that what the logs
say up to its step is in the store as soon as it is.
"""

import contextlib
import shutil
import tempfile
import threading
from pathlib import Path

from crossattn.train import storage
from crossattn.train.errors import TrainError
from crossattn.train.storage import Folder

_SECONDS = 15.0  # between uploads


class Spool:
    """A folder of this machine, `local`, whose files also lie in a folder of a store."""

    def __init__(self, folder: Folder):
        self._folder = folder
        self.local = Path(tempfile.mkdtemp(prefix="crossattn-"))
        self._uploaded: dict[str, tuple[int, int]] = {}
        self._uploading = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"spool {folder}", daemon=True)
        self._thread.start()

    def fetch(self, name: str) -> Path:
        """The file of that name here, with what the store has of it."""
        path = self.local / name
        with contextlib.suppress(FileNotFoundError):
            path.write_bytes((self._folder / name).read_bytes())
            self._uploaded[name] = _state(path)
        return path

    def flush(self) -> None:
        """Uploads what has changed.

        Raises:
            TrainError: the store does not take it.
        """
        with self._uploading:
            for path in sorted(self.local.iterdir()):
                if path.suffix == ".tmp":
                    continue
                state = _state(path)
                if self._uploaded.get(path.name) == state:
                    continue
                try:
                    (self._folder / path.name).write_bytes(path.read_bytes())
                except Exception as error:  # Each package has errors of its own.
                    said = f"{self._folder / path.name} cannot be written"
                    raise storage.refusal(said, error, self._folder) from error
                self._uploaded[path.name] = state

    def close(self) -> None:
        """Uploads the rest, then lets go. Raises as `flush` does."""
        self._closed.set()
        self._thread.join()
        try:
            self.flush()
        finally:
            shutil.rmtree(self.local, ignore_errors=True)

    def _work(self) -> None:
        while not self._closed.wait(_SECONDS):
            with contextlib.suppress(TrainError):  # Tried again; `flush` says so in the end.
                self.flush()


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
