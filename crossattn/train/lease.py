"""Whose a work directory in an object store is: a lock there is none, so a lease that is renewed.

The one thing to know: whoever trains rewrites the object `.lock` every few seconds, on the condition
that it is still the one that it wrote before (gs:// and s3:// both promise that). A newcomer who finds
a lease takes it over when its process is known to be dead, or when it has not changed for a while.
"""

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crossattn.train import storage
from crossattn.train.errors import TrainError, WorkdirBusy
from crossattn.train.storage import Folder

_LOG = logging.getLogger(__name__)
_KEY = ".lock"
_BEAT = 10.0  # seconds between renewals
_STALE = 45.0  # seconds after which a lease that has not changed is nobody's
# The generation of what is read, where a store tells none, as emulators of gs:// do.
_UNTOLD = bytes(9)


class Lease:
    """A lease that this process holds, renewed in the background until it is given back."""

    def __init__(self, folder: Folder):
        self._folder = folder
        self._objects = _open(folder)
        self._own = {"token": uuid.uuid4().hex, **_identity()}
        self._beats = 0
        self._lost = False
        self._generation = self._taken()
        self._given_back = threading.Event()
        self._thread = threading.Thread(target=self._renew, name=f"lease {folder}", daemon=True)
        self._thread.start()

    def confirm(self) -> None:
        """Asks the store whether the lease is still this process's own.

        Raises:
            WorkdirBusy: another one has it.
        """
        if self._lost or not self._is_own(self._read()[0]):
            raise WorkdirBusy(
                f"another process has taken over {self._folder}, because nothing was heard of this one"
                f" for {_STALE:.0f} s; nothing more is written there"
            )

    def give_back(self) -> None:
        """Ends the renewal; whoever comes next need not wait."""
        self._given_back.set()
        self._thread.join(_BEAT)
        if self._lost or self._thread.is_alive():  # In a store that is away it will be found stale.
            return
        with contextlib.suppress(Exception):
            self._objects.write(_KEY, None, if_equal=self._generation).result()

    def _taken(self) -> Any:
        """The generation of the object by which the lease was taken."""
        seen, since = None, time.monotonic()
        while True:
            holder, generation = self._read()
            if self._is_own(holder):  # The answer to the first try to write it was lost.
                return generation
            stale = seen is not None and time.monotonic() - since > _STALE
            if holder and not _is_dead(holder) and not stale:
                if _is_here(holder) or seen not in (None, holder):
                    raise self._busy(holder)
                if seen is None:
                    self._tell(holder)
                seen = holder
                time.sleep(_BEAT / 2)
            elif (taken := self._write(generation)) is not None:
                return taken

    def _tell(self, holder: dict[str, Any]) -> None:
        _LOG.warning(
            "%s is claimed by process %s on %s: waiting %.0f s to see whether that one lives",
            *(self._folder, holder.get("pid"), holder.get("host"), _STALE),
        )

    def _busy(self, holder: dict[str, Any]) -> WorkdirBusy:
        return WorkdirBusy(
            f"another process ({holder.get('pid')} on {holder.get('host')}) is training in"
            f" {self._folder}; wait for it or use another workdir"
        )

    def _renew(self) -> None:
        while not self._given_back.wait(_BEAT):
            # A store that is away for a while answers again; whose the lease is by then, it says.
            with contextlib.suppress(TrainError):
                holder, generation = self._read()
                self._lost = not self._is_own(holder)
                if self._lost:
                    return
                if (renewed := self._write(self._generation)) is not None:
                    self._generation = renewed
                else:  # It is of this process, so the answer to the last renewal was lost.
                    self._generation = generation

    def _is_own(self, holder: dict[str, Any]) -> bool:
        return holder.get("token") == self._own["token"]

    def _read(self) -> tuple[dict[str, Any], Any]:
        """What the object says, nothing where there is none, and which generation of it."""
        try:
            content = self._objects.read(_KEY).result()
            # Empty is the lock of a run that was copied there from a disk.
            held = json.loads(content.value) if content.value else {}
        except json.JSONDecodeError:
            held = {"damaged": True}
        except Exception as error:  # tensorstore raises ValueError for whatever a store answers.
            raise self._unwritable(error) from error
        return held, content.stamp.generation

    def _write(self, generation: Any) -> Any:
        """The new generation; None when the object was no longer of the one given."""
        self._beats += 1
        if generation == _UNTOLD:
            generation = None
        text = json.dumps({**self._own, "beats": self._beats})
        try:
            written = self._objects.write(_KEY, text.encode(), if_equal=generation).result()
        except Exception as error:
            raise self._unwritable(error) from error
        return written.generation or None

    def _unwritable(self, error: Exception) -> TrainError:
        said = f"the work directory {self._folder} cannot be written"
        return storage.refusal(said, error, self._folder, "; name another with --workdir")


@contextlib.contextmanager
def held(folder: Folder) -> Iterator[Lease]:
    """The lease of a folder of a store.

    Raises:
        WorkdirBusy: another process has it.
        TrainError: the store does not let it be written.
    """
    lease = Lease(folder)
    try:
        yield lease
    finally:
        lease.give_back()


def _open(folder: Folder) -> Any:
    import tensorstore

    spec = storage.kvstore(folder)
    return tensorstore.KvStore.open(spec | {"path": f"{spec['path'].rstrip('/')}/"}).result()


def _identity() -> dict[str, Any]:
    """What a lease says of the process that holds it.

    Host and pid are for people; ``place`` is where process ids are told apart, ``started`` tells apart
    processes of one id.
    """
    place = None
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        place = f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "place": place, "started": _started(pid)}


def _started(pid: int) -> int | None:
    """When a process of this machine began, in ticks since the machine did; None if it is no more."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # One that ended and that nobody has asked for yet is still listed.
        return None if state in "ZX" else int(rest[18])
    except (OSError, ValueError, IndexError):
        return None


def _is_here(holder: dict[str, Any]) -> bool:
    """Whether the holder is a process that can be looked for from here."""
    return holder.get("place") is not None and holder["place"] == _identity()["place"]


def _is_dead(holder: dict[str, Any]) -> bool:
    return _is_here(holder) and _started(int(holder["pid"])) != holder.get("started")
