"""How the processes of a run find each other: each calls on process 0, which waits until all have.

The one thing to know: this comes before JAX's own joining, on the same port, because that one waits without a
word and gives up with a dump. Here each side says whom it waits for, and what is wrong; the connections stay
for `watch`.
"""

import contextlib
import logging
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from crossattn.train.channel import Channel, Gone
from crossattn.train.errors import JoinError

_LOG = logging.getLogger(__name__)
_PATIENCE = 10  # times the seconds in which process 0 is reached, until all must be there
_BETWEEN = 0.5  # seconds between one attempt and the next
_ONE_ATTEMPT = 5.0  # seconds, or a machine that swallows what is sent to it takes them all


@dataclass(frozen=True)
class Place:
    """Where a process stands in its run.

    Attributes:
      address: of process 0, HOST:PORT.
      count: processes in all.
      index: of this process.
      bind: where process 0 listens.
      devices: the local ones that are its own, None for all.
    """

    address: str
    count: int
    index: int
    bind: str
    devices: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Present:
    """What a process says of itself: its machine, and the cores that it may run on."""

    host: str
    cores: tuple[int, ...]

    @classmethod
    def here(cls) -> "Present":
        """This process."""
        if hasattr(os, "sched_getaffinity"):
            cores = sorted(os.sched_getaffinity(0))
        else:
            cores = range(os.cpu_count() or 1)
        return cls(socket.gethostname(), tuple(cores))


def named(index: int, count: int, host: str) -> str:
    """How a process is called in what people read."""
    return f"process {index} of {count} on {host}"


def call(place: Place, seconds: float) -> tuple[Channel, list[Present]]:
    """The connection to process 0, once all are there, and what each of them said; for the others.

    Raises:
        JoinError: process 0 was not reached in so many seconds, or the roll was not complete in ten times
            as many.
    """
    host, port = split_address(place.address)
    deadline, cause = time.monotonic() + seconds, "there was no time to try"
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.ExitStack() as undone:
            try:
                connection = socket.create_connection((host, port), min(left, _ONE_ATTEMPT))
                undone.callback(connection.close)
                channel = Channel(connection)
                me = Present.here()
                channel.send(process=place.index, of=place.count, host=me.host, cores=me.cores)
                all_ = _answered(channel, place, seconds, deadline)
                undone.pop_all()
                return channel, all_
            except _Left:  # after it had taken this process in: it may come back
                cause, deadline = "it ended while the others came", time.monotonic() + seconds
            except (OSError, Gone) as error:
                cause = _why(error)
        time.sleep(_BETWEEN)
    me = named(place.index, place.count, socket.gethostname())
    raise JoinError(
        f"{me} cannot reach process 0 at {place.address} ({cause}; tried for {seconds:.0f} s): look"
        " whether it is started there, and whether this machine may connect to it"
    )


class _Left(Exception):
    """Process 0 has closed a connection that it had answered."""


def _answered(channel: Channel, place: Place, seconds: float, deadline: float) -> list[Present]:
    """Waits for the end of the roll call."""
    taken_in = False
    while channel.wait(deadline - time.monotonic()):
        try:
            messages = channel.receive()
        except Gone:
            if taken_in:
                raise _Left from None
            raise
        for message in messages:
            if "refused" in message:
                raise JoinError(str(message["refused"]))
            if "present" in message:
                return [_present(each) for each in message["present"]]
            if "missing" in message and not taken_in:
                taken_in = True
                # A little more than process 0 has, which knows who is missing.
                deadline = time.monotonic() + _PATIENCE * seconds + 10
            if message.get("note"):
                _LOG.warning("%s", message["note"])
    if taken_in:
        raise JoinError(f"process 0 at {place.address} has taken this process in and fell silent")
    raise Gone("it does not answer")


def _present(message: dict[str, Any]) -> Present:
    return Present(str(message["host"]), tuple(message["cores"]))


def gather(place: Place, seconds: float) -> tuple[list[Channel], list[Present]]:
    """The connections to all others (the first to process 1) and what each said; for process 0.

    Raises:
        JoinError: the port is taken, two are the same or of different runs, or some did not come in ten
            times so many seconds.
    """
    roll = _Roll(place)
    deadline = time.monotonic() + _PATIENCE * seconds
    speaks, pause = time.monotonic() + 10, 10.0
    try:
        with (
            _listening(place, seconds) as listener,
            selectors.DefaultSelector() as ready,
            contextlib.ExitStack() as strays,
        ):
            ready.register(listener, selectors.EVENT_READ)
            strays.callback(_close_strays, ready, roll)
            while missing := roll.missing():
                for key, _ in ready.select(1.0):
                    if key.fileobj is listener:
                        with contextlib.suppress(OSError):
                            ready.register(Channel(listener.accept()[0]), selectors.EVENT_READ)
                    else:
                        _read(key.fileobj, roll, ready.unregister)
                if time.monotonic() > deadline:
                    raise JoinError(
                        f"{_numbers(missing)} of {place.count} did not come to {place.address} in"
                        f" {_PATIENCE * seconds:.0f} s; {_came(roll)}"
                    )
                if time.monotonic() > speaks:
                    note = f"waiting for {_numbers(missing)} of {place.count}; {_came(roll)}"
                    _LOG.warning("%s", note)
                    roll.tell(missing=missing, note=note)
                    pause *= 2
                    speaks = time.monotonic() + pause
    except JoinError as error:
        roll.tell(refused=str(error))
        for channel in roll.channels.values():
            channel.close()
        raise
    order = [roll.channels[index] for index in range(1, place.count)]
    return order, [Present.here(), *(roll.said[index] for index in range(1, place.count))]


class _Roll:
    """Who has come to process 0."""

    def __init__(self, place: Place):
        self._place = place
        self.channels: dict[int, Channel] = {}
        self.said: dict[int, Present] = {}

    def missing(self) -> list[int]:
        return [each for each in range(1, self._place.count) if each not in self.channels]

    def tell(self, **message: Any) -> None:
        for channel in list(self.channels.values()):
            channel.send(**message)

    def take_in(self, channel: Channel, message: dict[str, Any]) -> None:
        """Raises KeyError, TypeError: that is no process of a run; JoinError: it is one too many."""
        index, count, said = message["process"], message["of"], _present(message)
        if count != self._place.count or index not in range(1, self._place.count):
            wrong = (
                f"{named(index, count, said.host)} calls on {named(0, self._place.count, _host())}: give"
                " all the same number of processes, and each its own index below it"
            )
        elif index in self.channels:
            wrong = (
                f"there are two processes {index} of {count}, on {self.said[index].host} and on"
                f" {said.host}: give each its own index"
            )
        else:
            self.channels[index], self.said[index] = channel, said
            channel.send(missing=self.missing())
            return
        channel.send(refused=wrong)
        raise JoinError(wrong)

    def leave(self, channel: Channel) -> None:
        for index, known in list(self.channels.items()):
            if known is channel:
                del self.channels[index], self.said[index]


def _read(channel: Any, roll: _Roll, forget: Callable[[Any], object]) -> None:
    """What one who came says; who goes again, or says nothing of use, is forgotten."""
    try:
        for message in channel.receive():
            roll.take_in(channel, message)
    except (Gone, KeyError, TypeError, ValueError):
        roll.leave(channel)
        forget(channel)
        channel.close()


def _close_strays(ready: selectors.BaseSelector, roll: _Roll) -> None:
    """Those that came and did not say who they are."""
    for key in list(ready.get_map().values()):
        if isinstance(key.fileobj, Channel) and key.fileobj not in roll.channels.values():
            key.fileobj.close()


@contextlib.contextmanager
def _listening(place: Place, seconds: float):
    """The listening socket; a run that was here before may take a moment to let the port go."""
    host, port = split_address(place.bind)
    everywhere = host in ("", "::", "0.0.0.0")
    both = everywhere and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or (":" in host and not everywhere) else socket.AF_INET
    deadline = time.monotonic() + seconds
    while True:
        try:
            listener = socket.create_server(
                ("" if everywhere else host, port),
                family=family,
                backlog=place.count,
                dualstack_ipv6=both,
            )
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise JoinError(
                    f"{named(0, place.count, _host())} cannot listen at {place.bind}"
                    f" ({_why(error)}; tried for {seconds:.0f} s): is another run there?"
                ) from None
        time.sleep(_BETWEEN)
    with listener:
        yield listener


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT in two; [::1]:PORT as well.

    Raises:
        JoinError: it is something else.
    """
    host, _, port = address.rpartition(":")
    if not port.isdigit() or not 0 < int(port) < 2**16:
        raise JoinError(f"the address of process 0 is {address!r}; expected HOST:PORT")
    return host.strip("[]"), int(port)


def _numbers(indices: Iterable[int]) -> str:
    """In words: process 3, or processes 1, 2 and 5; many are cut short."""
    texts = [str(each) for each in indices]
    if len(texts) > 8:
        texts = [*texts[:7], f"{len(texts) - 7} more"]
    if len(texts) == 1:
        return f"process {texts[0]}"
    return f"processes {', '.join(texts[:-1])} and {texts[-1]}"


def _came(roll: _Roll) -> str:
    there = [f"{index} ({said.host})" for index, said in sorted(roll.said.items())]
    if not there:
        return "none of the others is there"
    return f"there are {', '.join(there[:8])}{' and more' if len(there) > 8 else ''}"


def _host() -> str:
    return socket.gethostname()


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer from there"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
