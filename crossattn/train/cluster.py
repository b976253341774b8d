"""Becoming one process of several: under SLURM, Open MPI, Kubernetes, on TPU slices, or by hand.

The one thing to know: after `join`, all processes of a run come to one end. One that dies or fails takes the
others down with a line that says which (`watch`); those that are well wait for each other at the end.
"""

import atexit
import logging
import os
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import jax

from crossattn.train.coordinator import Coordinator
from crossattn.train.errors import JoinError
from crossattn.train.rollcall import Place, Present, call, gather, split_address
from crossattn.train.watch import Watch

_LOG = logging.getLogger(__name__)
BY_HAND = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_ALL_PRESENT = 120  # seconds for JAX's own joining, once all are known to be there
_ALL_DONE = 30  # seconds for JAX's own leaving, once all are known to be done
_watch: Watch | None = None


def join(seconds: float = 20.0) -> None:
    """Makes this process one of a run's; called before anything is computed, in each of them.

    What BY_HAND names is taken from the environment, and what is not there from the cluster, if JAX knows it
    (SLURM, Open MPI, Kubernetes, TPU slices). Where several share a machine's CPU, each takes its part of the
    cores for XLA.

    Args:
        seconds: in which process 0 must be reached; it waits ten times as long until all are there.

    Raises:
        JoinError: no cluster was found, process 0 was not reached, or some did not come.
    """
    global _watch
    place = _place(seconds)
    if place.count == 1:
        jax.distributed.initialize(place.address, 1, 0, cluster_detection_method="deactivate")
        return
    if place.index == 0:
        with Coordinator(place.count) as coordinator:
            channels, present = gather(place, seconds)
            try:
                coordinator.listen(place.bind)
            except RuntimeError as error:
                wrong = f"process 0 cannot serve at {place.bind}: {error}"
                for channel in channels:
                    channel.send(refused=wrong)
                raise JoinError(wrong) from None
        there = [{"host": each.host, "cores": each.cores} for each in present]
        for channel in channels:
            channel.send(present=there)
    else:
        channel, present = call(place, seconds)
        channels = [channel]
    _watch = Watch(place.index, present, channels)
    sys.excepthook = _and_fail(sys.excepthook)
    _share_cores(present[place.index], present)
    _initialize(place)
    atexit.register(_watch.leave, lambda text: _LOG.warning("%s", text))


def current() -> Watch | None:
    """What this process tells the others by; None if there are none, or it joined them in another way."""
    return _watch


def _place(seconds: float) -> Place:
    """Where this process stands, by the environment or the cluster."""
    address, count, index = map(os.environ.get, BY_HAND)
    numbers = {"JAX_NUM_PROCESSES": count, "JAX_PROCESS_ID": index}
    for name, value in numbers.items():
        if value and not value.isdigit():
            raise JoinError(f"{name} is {value!r}; expected a number")
    detected = _detected(
        address or None,
        int(count) if count else None,
        int(index) if index else None,
        round(seconds),
    )
    address, count, index, devices = detected
    if address is None or count is None or index is None:
        raise JoinError(
            f"--distributed finds no cluster that JAX knows (SLURM, Open MPI, Kubernetes, TPU slices);"
            f" outside of one, set {', '.join(BY_HAND)}"
        )
    _, port = split_address(address)
    if not 0 <= index < count:
        raise JoinError(
            f"this is process {index} of {count}; expected an index from 0 to {count - 1}"
        )
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", f"[::]:{port}")
    return Place(address, count, index, bind, None if devices is None else tuple(devices))


def _detected(
    address: str | None, count: int | None, index: int | None, seconds: int
) -> tuple[str | None, int | None, int | None, Sequence[int] | None]:
    """What is given, and for the rest what JAX's own detection says."""
    # Not public, but what jax.distributed.initialize does: who must be reached is to be known before.
    from jax._src.clusters import ClusterEnv

    given = os.environ.get("JAX_LOCAL_DEVICE_IDS")
    devices = [int(each) for each in given.split(",")] if given else None
    try:
        return ClusterEnv.auto_detect_unset_distributed_params(
            address, count, index, devices, None, seconds
        )
    except Exception as error:  # of a cluster's own interface
        raise JoinError(
            f"the cluster does not say who belongs to the run: {' '.join(str(error).split())}"
        ) from error


def _initialize(place: Place) -> None:
    """JAX's own joining, with nobody left to wait for."""
    # It would take SIGTERM for its own; here `signals` asks, and `watch` passes it on.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        place.address,
        place.count,
        place.index,
        local_device_ids=place.devices,
        cluster_detection_method="deactivate",
        initialization_timeout=_ALL_PRESENT,
        shutdown_timeout_seconds=_ALL_DONE,
        # The service that all speak to is the coordinator's; the one that JAX makes in process 0 idles.
        coordinator_bind_address="localhost:0",
    )


def _share_cores(here: Present, present: Sequence[Present]) -> None:
    """Each process of a machine computes on its part of the cores that they may use."""
    local = [each for each in present if each.host == here.host]
    cores = set().union(*(each.cores for each in local))
    share = max(1, min(len(here.cores), len(cores) // len(local)))
    os.environ.setdefault("NPROC", str(share))  # the threads of XLA's CPU backend


def _and_fail(hook: Any) -> Any:
    """What Python calls for an error that nobody caught, and then the end of all processes."""

    def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        assert _watch is not None
        _watch.wait_for_cause()
        hook(kind, error, trace)
        text = " ".join(str(error).split())
        _watch.fail(f"{kind.__name__}: {text}" if text else kind.__name__, 1)

    return say
