"""The processes of a run find each other, and say whom they wait for. Here each is a thread."""

import concurrent.futures
import logging
import socket
import threading
import time

import pytest
from crossattn.train.channel import Channel
from crossattn.train.rollcall import Place, Present, call, gather
from crossattn.train.watch import Watch

from crossattn.train import watch as watching
from crossattn.train.errors import JoinError


@pytest.fixture
def address():
    """A free port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def connection():
    """Makes the two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield lambda: (socket.create_connection(server.getsockname()), server.accept()[0])


@pytest.fixture
def started():
    """Starts functions in threads: their futures."""
    with concurrent.futures.ThreadPoolExecutor() as threads:
        yield threads.submit


def place(address, count, index):
    return Place(address, count, index, bind=address)


def test_all_learn_of_each_other_in_order_whoever_comes_first(address, started):
    others = [started(call, place(address, 4, index), 10.0) for index in (3, 1, 2)]
    time.sleep(0.1)
    hub = started(gather, place(address, 4, 0), 10.0)
    channels, present = hub.result(20)
    for channel in channels:
        channel.send(present=[{"host": each.host, "cores": each.cores} for each in present])
    assert all(other.result(20)[1] == present for other in others)
    assert present == [Present.here()] * 4
    for index, channel in enumerate(channels, 1):
        channel.send(number=index)
    own = [other.result()[0] for other in others]
    assert [channel.receive()[0]["number"] for channel in own] == [3, 1, 2]
    for channel in (*channels, *own):
        channel.close()


@pytest.mark.parametrize(
    ("of", "index", "message"),
    [
        (3, 1, "there are two processes 1 of 3"),
        (5, 4, "process 4 of 5 on .* calls on process 0 of 3 .*: give all the same number"),
    ],
)
def test_processes_with_wrong_numbers_are_told_so_all_alike(address, started, of, index, message):
    hub = started(gather, place(address, 3, 0), 10.0)
    right = started(call, place(address, 3, 1), 10.0)
    time.sleep(1.5)  # It calls every 0.5 s until process 0 is there.
    wrong = started(call, place(address, of, index), 10.0)
    for process in (hub, right, wrong):
        with pytest.raises(JoinError, match=message):
            process.result(20)


def test_who_comes_by_mistake_is_none_of_them(address, started):
    hub = started(gather, place(address, 2, 0), 10.0)
    time.sleep(0.3)
    host, port = address.split(":")
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"process": 1}\n', b""):
        with socket.create_connection((host, int(port)), 5) as stray:
            stray.sendall(noise)
    other = started(call, place(address, 2, 1), 10.0)
    (channel,), present = hub.result(20)
    channel.send(refused="enough")
    channel.close()
    with pytest.raises(JoinError, match="enough"):
        other.result(20)
    assert len(present) == 2


def test_who_did_not_come_is_named_by_all(address, started):
    hub = started(gather, place(address, 4, 0), 0.2)
    came = started(call, place(address, 4, 2), 1.0)
    for process in (hub, came):
        with pytest.raises(
            JoinError, match=r"processes 1 and 3 of 4 did not come .* there are 2 \("
        ):
            process.result(20)


def test_a_port_that_is_taken_is_told_with_who_wanted_it(address, started):
    with (
        socket.create_server(("127.0.0.1", int(address.split(":")[1]))),
        pytest.raises(JoinError, match="process 0 of 2 on .* cannot listen at .*in use"),
    ):
        gather(place(address, 2, 0), 0.1)


@pytest.mark.parametrize("answers", [False, True])
def test_process_0_that_cannot_be_reached_is_told_in_time(address, answers):
    begun = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as other:  # which takes no part in the run
        found = f"127.0.0.1:{other.getsockname()[1]}" if answers else address
        with pytest.raises(JoinError, match="process 1 of 2 on .* cannot reach process 0 at 127"):
            call(place(found, 2, 1), 1.0)
    assert time.monotonic() - begun < 5


def test_all_stop_after_the_same_step_that_none_has_passed(connection, started):
    count, asked_at = 4, 30
    pairs = [connection() for _ in range(count - 1)]
    present = [Present(f"host-{index}", (0,)) for index in range(count)]
    watches = [Watch(0, present, [Channel(hub) for hub, _ in pairs])]
    watches += [Watch(index, present, [Channel(own)]) for index, (_, own) in enumerate(pairs, 1)]
    together = threading.Barrier(count)

    def loop(watch):
        for step in range(1, 10_000):
            if step % 3 == 0:  # as collectives do, which some reach earlier than others
                together.wait(10)
            if watch.stop_after(step, "SIGTERM" if watch.index == 2 and step >= asked_at else None):
                return step
        return None

    steps = [each.result(60) for each in [started(loop, watch) for watch in watches]]
    assert len(set(steps)) == 1 and asked_at < steps[0] < 10_000
    for leaving in [started(watch.leave, logging.warning) for watch in watches]:
        leaving.result(20)


class Slow(Channel):
    """Lets the other end go before it comes back from telling it that all are done."""

    def send(self, **message):
        super().send(**message)
        if "over" in message:
            time.sleep(0.2)


def test_those_that_leave_while_others_are_still_told_are_not_taken_for_dead(
    connection, started, monkeypatch
):
    left = []
    monkeypatch.setattr(watching, "_leave", left.append)
    pairs = [connection() for _ in range(3)]
    present = [Present(f"host-{index}", (0,)) for index in range(4)]
    others = [Watch(index, present, [Channel(own)]) for index, (_, own) in enumerate(pairs, 1)]
    hub = Watch(0, present, [Slow(end) for end, _ in pairs])
    leaving = [started(watch.leave, logging.warning) for watch in others]
    time.sleep(0.2)  # process 0 is the last, and tells the others from its own thread
    for each in [started(hub.leave, logging.warning), *leaving]:
        each.result(20)
    time.sleep(0.5)
    assert not left
