"""How long collectives take: bytes by the links that carry them.

The one thing to know: a group's bandwidth is that of the links between its members: on a TPU one link
in each direction of each axis of the torus that the group spans, on GPUs NVLink within a host and the
network cards of all members between hosts. Latencies do not count.
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
        return chip.network if chip.platform == "cuda" and between else chip.link
    group = places[list(one.groups[0])]
    if chip.platform == "cuda":
        hosts, members = np.unique(group[:, 0], return_counts=True)
        return chip.link if len(hosts) == 1 else min(chip.link, members.min() * chip.network)
    links = 0
    for axis, length in enumerate(topology.sizes):
        spanned = len(np.unique(group[:, axis]))
        if spanned > 1:
            closed = length >= chip.ring and length % chip.ring == 0 and spanned == length
            links += 2 if closed else 1
    return chip.link * max(links, 1)
