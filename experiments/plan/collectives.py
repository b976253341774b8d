"""The collectives of a compiled program by mesh axis: the bytes that a device sends, and how long they take.

Compiled programs number devices by their place in the mesh, so the numbers of a group tell along which
mesh axes its members differ. Bytes are those that a ring sends: an all-gather or reduce-scatter passes on all
parts but one, an all-reduce does both. The bandwidth of a group is that of the links between its members: on
a TPU one link in each direction of each axis of the torus that the group spans, on GPUs NVLink within a host,
and between slices or hosts the network cards of all members. Latencies do not count.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from experiments.plan.hlo import Instruction, Module, Run, Shape
from experiments.plan.topologies import Topology

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclass(frozen=True)
class Collective:
    """A collective of a compiled program.

    Attributes:
      kind: one of ``KINDS``.
      axes: the mesh axes along which members of a group differ, in the mesh's order.
      groups: places in the mesh of the members of each group, or the pairs of a permutation.
      arrays: the results on one device.
      times: runs in a step.
      scope: name stack of the traced program.
    """

    kind: str
    axes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    arrays: tuple[Shape, ...]
    times: int
    scope: str

    @property
    def sent(self) -> float:
        """Bytes that a device sends in a step."""
        size = self.times * sum(shape.bytes for shape in self.arrays)
        if self.kind == "collective-permute":
            return size if self.axes else 0
        members = len(self.groups[0]) if self.groups else 1
        if self.kind == "reduce-scatter":
            size *= members  # the result is one part of the array
        return size * (members - 1) / members * (2 if self.kind == "all-reduce" else 1)


def collectives(
    module: Module, mesh: dict[str, int], computation: str | None = None
) -> list[Collective]:
    """Lists the collectives of a program, or of one of its computations.

    Args:
      module: the compiled program.
      mesh: the mesh's axes and sizes, in order.
      computation: its name.
    """
    listed = []
    for run in module.runs(computation):
        kind = run.instruction.opcode.removesuffix("-start")
        if kind in KINDS and not _is_continued(run):
            listed.append(_collective(run, kind, mesh))
    return [one for one in listed if one.sent > 0]


def _is_continued(run: Run) -> bool:
    """Returns whether this continues a collective that another kernel began.

    TPUs spread a gather over several fused kernels, each with a copy of it; the first one is marked.
    """
    if not run.fused or "chain_id" not in run.instruction.attributes:
        return False
    inside = run.computation.instructions.values()
    return not any(i.target == "AsyncCollectiveStart" for i in inside)


def _collective(run: Run, kind: str, mesh: dict[str, int]) -> Collective:
    instruction = run.instruction
    arrays = _results(instruction)
    if kind == "collective-permute":
        pairs = instruction.attribute(r"source_target_pairs=\{((?:\{[\d,]*\},?)+)\}") or ""
        groups = tuple(p for p in _groups(pairs) if p[0] != p[1])
    else:
        groups = replica_groups(instruction.attributes, math.prod(mesh.values()))
    if kind == "all-reduce" and run.fused and "all-reduce-scatter" in run.computation.name:
        # A TPU's reduce-scatter is an all-reduce, fused with taking the device's part.
        kind, arrays = "reduce-scatter", run.computation.root.arrays
    axes = axes_of(groups, mesh)
    return Collective(kind, axes, groups, arrays, run.times, instruction.scope)


def _results(instruction: Instruction) -> tuple[Shape, ...]:
    """Returns the results; a start also lists its operands and counters of no bytes."""
    arrays = tuple(s for s in instruction.arrays if s.sizes or len(instruction.arrays) == 1)
    if not instruction.opcode.endswith("-start") or instruction.opcode == "all-reduce-start":
        return arrays
    given = len(instruction.operands)
    return arrays[given : 2 * given] if len(arrays) >= 2 * given else arrays[-given:]


def replica_groups(attributes: str, count: int) -> tuple[tuple[int, ...], ...]:
    """Parses groups in each form that compilers print; without any, all devices are one group.

    ``{{0,1},{2,3}}``; ``[2,2]<=[4]`` and ``[2,2]<=[2,2]T(1,0)``: numbers in that order, cut in rows;
    ``mesh['a'=2,'b'=2] {'b'}``: members of a group differ along b alone.
    """
    listed = re.search(r"replica_groups=\{((?:\{[\d,]*\},?)+)\}", attributes)
    if listed:
        return _groups(listed.group(1))
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        return _rows(_iota(iota.group(2), iota.group(3)).reshape(_ints(iota.group(1))))
    named = re.search(r"replica_groups=@?mesh\[([^\]]*)\]([^{]*)\{([^}]*)\}", attributes)
    if named:
        return _named(*named.groups())
    return (tuple(range(count)),)


def _iota(sizes: str, order: str | None) -> np.ndarray:
    ids = np.arange(math.prod(_ints(sizes))).reshape(_ints(sizes))
    return ids.transpose(_ints(order)) if order else ids


def _named(axes: str, order: str, chosen: str) -> tuple[tuple[int, ...], ...]:
    """Parses groups along named axes; ``'a':(2)4`` is the part of a of size 4 after one of size 2."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", axes)}
    listed = re.search(r"device_ids=\(?\[([\d,]+)\](?:T\(([\d,]+)\))?(?:<=)?", order)
    ids = np.arange(math.prod(sizes.values()))
    if listed and listed.group(2):
        ids = _iota(listed.group(1), listed.group(2)).reshape(-1)
    elif listed:
        ids = np.asarray(_ints(listed.group(1)))
    names, shape = [], []
    parts = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", chosen)
    for name, size in sizes.items():
        cut = next(((int(a), int(b)) for own, a, b in parts if own == name and a), None)
        pieces = [size] if cut is None else [cut[0], cut[1], size // (cut[0] * cut[1])]
        names += [name if cut is None or i == 1 else None for i in range(len(pieces))]
        shape += pieces
    wanted = {name for name, *_ in parts}
    inner = [i for i, name in enumerate(names) if name in wanted]
    outer = [i for i in range(len(names)) if i not in inner]
    grouped = ids.reshape(shape).transpose(outer + inner)
    return _rows(grouped.reshape(-1, math.prod(shape[i] for i in inner)))


def _groups(listed: str) -> tuple[tuple[int, ...], ...]:
    return tuple(_ints(row) for row in re.findall(r"\{([\d,]*)\}", listed))


def _rows(ids: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(n) for n in row) for row in ids)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def axes_of(groups: Sequence[Sequence[int]], mesh: dict[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes along which members of a group differ."""
    shape = tuple(mesh.values())
    differs: set[int] = set()
    for group in groups:
        places = np.stack(np.unravel_index(np.asarray(group, int), shape), -1)
        differs |= set(np.flatnonzero((places != places[0]).any(0)).tolist())
    return tuple(name for i, name in enumerate(mesh) if i in differs)


def totals(collectives: Sequence[Collective]) -> dict[tuple[str, str], float]:
    """Sums the bytes that a device sends in a step by (kind, mesh axes), most first."""
    summed: dict[tuple[str, str], float] = {}
    for one in collectives:
        where = (one.kind, "+".join(one.axes))
        summed[where] = summed.get(where, 0.0) + one.sent
    return dict(sorted(summed.items(), key=lambda item: -item[1]))


def seconds(collectives: Sequence[Collective], topology: Topology, mesh: Mesh | None) -> float:
    """Estimates the time of all collectives of a step, one after the other."""
    if mesh is None:
        return 0.0
    places = topology.places(list(mesh.devices.flat))
    return sum(one.sent / bandwidth(one, topology, places) for one in collectives)


def bandwidth(one: Collective, topology: Topology, places: np.ndarray) -> float:
    """Returns the bytes/s that a device of the group sends, one way.

    Args:
      one: the collective.
      topology: the topology that it runs on.
      places: ``topology.places`` of the mesh's devices.
    """
    chip = topology.chip
    if one.kind == "collective-permute":  # to one neighbour, by one link
        between = any((places[a] != places[b])[0] for a, b in one.groups)
        return chip.network if between else chip.link
    group = places[list(one.groups[0])]
    hosts, members = np.unique(group[:, 0], return_counts=True)
    inside = chip.link if chip.platform == "cuda" else _links(group, topology) * chip.link
    return inside if len(hosts) == 1 else min(inside, members.min() * chip.network)


def _links(group: np.ndarray, topology: Topology) -> int:
    """Counts the links of a torus over which a device of the group sends at once."""
    links, ring = 0, topology.chip.ring
    for axis, length in enumerate(topology.sizes, start=1):
        spanned = len(np.unique(group[:, axis]))
        if spanned > 1:
            closed = length >= ring and length % ring == 0 and spanned == length
            links += 2 if closed else 1
    return max(links, 1)
