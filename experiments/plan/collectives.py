"""What a device sends in one step: the collectives of a compiled program, by mesh axis.

Compiled programs number devices by their place in the mesh, so a group of
numbers says along which mesh axes its members differ. Bytes are those that a ring sends: an all-gather
or reduce-scatter passes on all parts but one, an all-reduce does both.
"""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.plan.hlo import Instruction, Module, Run, Shape

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
    """One collective of the program.

    Attributes:
      kind: one of ``KINDS``.
      axes: the mesh axes along which members of a group differ, in the mesh's order.
      groups: places in the mesh of those that talk to one another (of a permutation, the pairs).
      arrays: what one device gets.
      times: runs in a step.
      scope: where in the traced program it comes from.
    """

    kind: str
    axes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    arrays: tuple[Shape, ...]
    times: int
    scope: str

    @property
    def size(self) -> int:
        """Members of a group."""
        return len(self.groups[0]) if self.groups else 1

    @property
    def bytes(self) -> int:
        """Bytes of the arrays, whole: of what is scattered, those of all parts."""
        parts = self.size if self.kind == "reduce-scatter" else 1
        return parts * sum(shape.bytes for shape in self.arrays)

    @property
    def sent(self) -> float:
        """Bytes that a device sends in a step."""
        n = self.size
        if self.kind == "collective-permute":
            return self.times * self.bytes * (1 if self.axes else 0)
        share = (n - 1) / n * (2 if self.kind == "all-reduce" else 1)
        return self.times * self.bytes * share


def collectives(
    module: Module, mesh: dict[str, int], computation: str | None = None
) -> list[Collective]:
    """Every collective of a program, or of one of its computations.

    Args:
      module: the compiled program.
      mesh: the mesh's axes and sizes, in order.
    """
    listed = []
    for run in module.runs(computation):
        kind = run.instruction.opcode.removesuffix("-start")
        if kind in KINDS and not _goes_on(run):
            listed.append(_collective(run, kind, mesh))
    return [one for one in listed if one.sent > 0]


def _goes_on(run: Run) -> bool:
    """Whether this only goes on with a collective that another kernel began.

    TPUs spread a gather over several fused kernels, each with a copy of it; the first one is marked.
    """
    if not run.fused or "chain_id" not in run.instruction.attributes:
        return False
    inside = run.computation.instructions.values()
    return not any(i.target == "AsyncCollectiveStart" for i in inside)


def _collective(run: Run, kind: str, mesh: dict[str, int]) -> Collective:
    instruction, count = run.instruction, math.prod(mesh.values())
    arrays = _result(instruction)
    if kind == "collective-permute":
        groups = _pairs(instruction.attributes)
    else:
        groups = replica_groups(instruction.attributes, count)
    if kind == "all-reduce" and run.fused and "all-reduce-scatter" in run.computation.name:
        # TPUs' reduce-scatter: fused with taking this device's part.
        kind, arrays = "reduce-scatter", run.computation.root.arrays
    axes = axes_of(groups, mesh)
    return Collective(kind, axes, groups, arrays, run.times, instruction.scope)


def _result(instruction: Instruction) -> tuple[Shape, ...]:
    """What comes out; a start gives its operands, its results and counters that carry nothing."""
    arrays = tuple(s for s in instruction.arrays if s.sizes or len(instruction.arrays) == 1)
    if not instruction.opcode.endswith("-start") or instruction.opcode == "all-reduce-start":
        return arrays
    given = len(instruction.operands)
    return arrays[given : 2 * given] if len(arrays) >= 2 * given else arrays[-given:]


def replica_groups(attributes: str, count: int) -> tuple[tuple[int, ...], ...]:
    """Who talks with whom, in any of the forms that compilers print; all with all where none is given.

    ``{{0,1},{2,3}}``; ``[2,2]<=[4]`` and ``[2,2]<=[2,2]T(1,0)``: numbers in that order, cut in rows;
    ``mesh['a'=2,'b'=2] {'b'}``: those that differ along b alone.
    """
    listed = re.search(r"replica_groups=\{((?:\{[\d,]*\},?)+)\}", attributes)
    if listed:
        rows = re.findall(r"\{([\d,]*)\}", listed.group(1))
        return tuple(tuple(int(n) for n in row.split(",") if n) for row in rows)
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
    """Groups along named axes of a mesh; ``'a':(2)4`` is the part of a of size 4 after one of size 2."""
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


def _pairs(attributes: str) -> tuple[tuple[int, ...], ...]:
    listed = re.search(r"source_target_pairs=\{((?:\{[\d,]*\},?)+)\}", attributes)
    rows = re.findall(r"\{(\d+),(\d+)\}", listed.group(1)) if listed else []
    return tuple((int(a), int(b)) for a, b in rows if a != b)


def _rows(ids: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(n) for n in row) for row in ids)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def axes_of(groups: Sequence[Sequence[int]], mesh: dict[str, int]) -> tuple[str, ...]:
    """The mesh axes along which members of a group differ."""
    shape = tuple(mesh.values())
    differs: set[int] = set()
    for group in groups:
        places = np.stack(np.unravel_index(np.asarray(group, int), shape), -1)
        differs |= set(np.flatnonzero((places != places[0]).any(0)).tolist())
    return tuple(name for i, name in enumerate(mesh) if i in differs)


def totals(collectives: Sequence[Collective]) -> dict[tuple[str, str], float]:
    """Bytes that a device sends in a step, by (kind, mesh axes), most first."""
    summed: dict[tuple[str, str], float] = {}
    for one in collectives:
        where = (one.kind, "+".join(one.axes))
        summed[where] = summed.get(where, 0.0) + one.sent
    return dict(sorted(summed.items(), key=lambda item: -item[1]))


def by_shape(collectives: Sequence[Collective]) -> list[tuple[str, str, str, int, float]]:
    """(kind, mesh axes, arrays, runs in a step, bytes sent) of like collectives, most bytes first."""
    key = lambda one: (one.kind, "+".join(one.axes), ", ".join(map(str, one.arrays)))  # noqa: E731
    rows = []
    for (kind, axes, arrays), alike in itertools.groupby(sorted(collectives, key=key), key):
        same = list(alike)
        rows.append((kind, axes, arrays, sum(x.times for x in same), sum(x.sent for x in same)))
    return sorted(rows, key=lambda row: -row[-1])
