"""How long collectives take: bytes by the links that carry them.

A group's bandwidth is that of the links between its members: on a TPU one link
in each direction of each axis of the torus that the group spans, on GPUs NVLink within a host, and between
slices or hosts the network cards of all members. Latencies do not count.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.plan.collectives import Collective
from experiments.plan.topologies import Topology


def seconds(collectives: Sequence[Collective], topology: Topology, devices: Sequence[Any]) -> float:
    """Of all collectives, one after the other.

    Args:
      collectives: of the step.
      topology: where they run.
      devices: of the mesh, in its order.
    """
    places = topology.places(devices)
    return sum(one.sent / bandwidth(one, topology, places) for one in collectives)


def bandwidth(one: Collective, topology: Topology, places: np.ndarray) -> float:
    """Bytes/s that a device of the group sends, one way."""
    chip = topology.chip
    if one.kind == "collective-permute":  # to one neighbour, by one link
        between = any((places[a] != places[b])[0] for a, b in one.groups)
        return chip.network if between else chip.link
    group = places[list(one.groups[0])]
    hosts, members = np.unique(group[:, 0], return_counts=True)
    inside = chip.link if chip.platform == "cuda" else _links(group, topology) * chip.link
    return inside if len(hosts) == 1 else min(inside, members.min() * chip.network)


def _links(group: np.ndarray, topology: Topology) -> int:
    """Links of a torus over which a device of the group sends at once."""
    links, ring = 0, topology.chip.ring
    for axis, length in enumerate(topology.sizes, start=1):
        spanned = len(np.unique(group[:, axis]))
        if spanned > 1:
            closed = length >= ring and length % ring == 0 and spanned == length
            links += 2 if closed else 1
    return max(links, 1)
