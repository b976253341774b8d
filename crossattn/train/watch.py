"""What the processes of a run tell each other outside of XLA: who died, who failed, who was asked to stop.

The one thing to know: whoever waits in a collective for a process that is gone cannot be woken, so a thread
ends this process: it writes one line that says who is gone, and leaves with an exit code that tells a
scheduler to start the run again (`LOST`).

Each process has one connection, to process 0, which passes on what the others must know.
"""

import os
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from crossattn.train.channel import SILENT, Channel, Gone, Silent
from crossattn.train.rollcall import Present, named

LOST = 75  # EX_TEMPFAIL of sysexits.h: start again
_NEWS_TRAVELS = 1.0  # seconds in which all know of one that is gone
_SPEAKS_AFTER = 10.0  # seconds of waiting for the others to end


class Watch:
    """The connections of one process: of process 0 to all others, of another one to process 0.

    index: of this process; present: all of them, in order; channels: to process 1, 2, ... or to process 0.
    """

    def __init__(self, index: int, present: Sequence[Present], channels: Sequence[Channel]):
        self.index = index
        self._names = [named(each, len(present), there.host) for each, there in enumerate(present)]
        others = range(1, len(present)) if index == 0 else [0]
        self._channels = dict(zip(others, channels, strict=True))
        self._ends = threading.Lock()
        self._changed = threading.Condition()
        self._step = -1  # this process's last
        self._last: int | None = None  # the one that all stop after
        self._asking = self._agreeing = self._over = False
        self._steps: dict[int, int] = {}
        self._done: set[int] = set()
        threading.Thread(target=self._listen, name="watch", daemon=True).start()

    def stop_after(self, step: int, asked: str | None) -> bool:
        """Whether all processes stop after this step; each calls this after each step.

        asked: what asked this process to stop ("SIGTERM"), if anything did. All learn of it at once and
        agree on the step after the last that any of them has made.
        """
        with self._changed:
            self._step = step
            if asked and not self._asking:
                self._asking = True
                self._to_hub(stop=asked)
            self._changed.wait_for(lambda: not self._agreeing)
            return self._last is not None and step >= self._last

    def fail(self, text: str, code: int) -> NoReturn:
        """Ends this process with this exit code, and the others with it; they say who failed, and why."""
        with self._ends:
            self._tell_all(failed=self.index, text=text, code=code)
            _leave(code)

    def wait_for_cause(self) -> None:
        """Gives the thread a moment to end this process, if another is gone: errors follow from that."""
        time.sleep(_NEWS_TRAVELS)

    def leave(self, note: Callable[[str], None]) -> None:
        """Waits until all processes have come to their end."""
        self._to_hub(done=True)
        with self._changed:
            if not self._changed.wait_for(lambda: self._over, _SPEAKS_AFTER):
                note(f"{self._names[self.index]} has ended and waits for the others")
                self._changed.wait_for(lambda: self._over)

    def _listen(self) -> None:
        with selectors.DefaultSelector() as ready:
            for index, channel in self._channels.items():
                ready.register(channel, selectors.EVENT_READ, index)
            while not self._over:
                for key, _ in ready.select():
                    self._take(key.data)
        with self._changed:  # who ends them all still tells them so
            for channel in self._channels.values():
                channel.close()

    def _take(self, index: int) -> None:
        """What comes from one of the others, or that it is gone, as all are once they are done."""
        try:
            for message in self._channels[index].receive():
                self._heard(index, message)
        except Gone as gone:
            if not self._over:
                silent = isinstance(gone, Silent)
                self._lost(index, f"has not answered for {SILENT} s" if silent else "died")

    def _heard(self, index: int, message: dict[str, Any]) -> None:
        match message:
            case {"lost": int(lost), "how": str(how)}:
                self._lost(lost, how)
            case {"failed": int(failed), "text": str(text), "code": int(code)}:
                self._failed(failed, text, code)
            case {"stop": str(reason)}:
                self._asked_by(index, reason)
            case {"stopping": int(who), "reason": str(reason)}:
                self._report(who, reason)
            case {"at": int(step)}:
                self._collect(index, step)
            case {"until": int(last)}:
                self._agreed(last)
            case {"done": _}:
                self._count_done(index)
            case {"over": _}:
                self._end()

    def _lost(self, index: int, how: str) -> None:
        line = (
            f"{self._names[index]} {how}; the others end with it: start the run again, and it goes on from"
            " its last checkpoint"
        )
        self._say_and_leave(line, LOST, lost=index, how=how)

    def _failed(self, index: int, text: str, code: int) -> None:
        self._pass_on(index, failed=index, text=text, code=code)
        self._say_and_leave(f"{self._names[index]} failed: {text}", code)

    def _say_and_leave(self, line: str, code: int, **message: Any) -> NoReturn:
        with self._ends:
            if message:
                self._tell_all(**message)
            os.write(2, f"error: {line}\n".encode("utf-8", "backslashreplace"))
            _leave(code)

    # How all agree on a step. Process 0 asks; each says which step it has made last, and holds its loop
    # after the next one until process 0 has named one that none of them has passed.

    def _asked_by(self, index: int, reason: str) -> None:
        with self._changed:
            if not self._steps:
                self._tell_all(stopping=index, reason=reason)
                self._report(index, reason)

    def _report(self, who: int, reason: str) -> None:
        with self._changed:
            self._asking = self._agreeing = True
            step = self._step
        if who != self.index:
            os.write(2, f"note: {self._names[who]} was asked to stop ({reason})\n".encode())
        self._to_hub(at=step)

    def _collect(self, index: int, step: int) -> None:
        with self._changed:
            self._steps[index] = step
            if len(self._steps) == len(self._names):
                last = max(self._steps.values()) + 1
                self._tell_all(until=last)
                self._agreed(last)

    def _agreed(self, last: int) -> None:
        with self._changed:
            self._last, self._agreeing = last, False
            self._changed.notify_all()

    def _count_done(self, index: int) -> None:
        with self._changed:
            self._done.add(index)
            if len(self._done) == len(self._names):
                self._end()  # first: whoever is told so leaves at once, and is not lost
                self._tell_all(over=True)

    def _end(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _to_hub(self, **message: Any) -> None:
        if self.index == 0:
            self._heard(0, message)
        else:
            self._channels[0].send(**message)

    def _tell_all(self, **message: Any) -> None:
        for channel in self._channels.values():
            channel.send(**message)

    def _pass_on(self, origin: int, **message: Any) -> None:
        for index, channel in self._channels.items():
            if self.index == 0 and index != origin:
                channel.send(**message)


def _leave(code: int) -> NoReturn:
    """At once: what would be tidied up first waits for the others."""
    os._exit(code)
