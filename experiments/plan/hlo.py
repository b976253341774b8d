"""Optimised HLO read as text: every instruction that a device runs, and how often.

A loop's body stands once in the text and runs many times, so instructions come
with the product of the trip counts of the loops around them. Where the text does not say how often a
loop runs, its counter does: what it starts from, is compared with, and grows by.
"""

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_NAME = r"%?[\w.$-]+"
_HEAD = re.compile(rf"^(?P<entry>ENTRY )?(?P<name>{_NAME}) \(.*\{{\s*$")
_LINE = re.compile(rf"^\s+(?P<root>ROOT )?(?P<name>{_NAME}) = ")
_OPCODE = re.compile(r"\s*([a-z][\w-]*)\(")
_CALLED = re.compile(
    rf"(?:calls|to_apply|body|condition|true_computation|false_computation)=({_NAME})"
    r"|(?:branch_computations|called_computations)=\{([^}]*)\}"
)
_ARRAY = re.compile(r"\b(pred|token|[a-z]+\d+\w*)\[([\d,<=]*)\](\{[^}]*\})?")
_TRIPS = re.compile(r'"?known_trip_count"?[:=]\{"?n"?:"?(\d+)"?\}')
_SPECIAL = {"pred": 8, "token": 0}


@dataclass(frozen=True)
class Shape:
    """One array: its element type, its sizes, and whether it lies in on-chip memory."""

    dtype: str
    sizes: tuple[int, ...]
    on_chip: bool = False

    @property
    def bytes(self) -> int:
        """Its size without the padding of layouts."""
        return math.ceil(math.prod(self.sizes) * _bits(self.dtype) / 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.sizes))}]"


def shapes(text: str) -> tuple[Shape, ...]:
    """The arrays of a shape, one or a tuple's."""
    return tuple(
        # Memory space 1 of a TPU is VMEM: what lies there does not pass through HBM.
        Shape(dtype, tuple(int(n.lstrip("<=")) for n in sizes.split(",") if n), "S(1)" in layout)
        for dtype, sizes, layout in _ARRAY.findall(text)
    )


@functools.cache
def _bits(dtype: str) -> int:
    if dtype in _SPECIAL:
        return _SPECIAL[dtype]
    match = re.match(r"[a-z]+(\d+)", dtype)
    return int(match.group(1)) if match else 0


@dataclass(frozen=True)
class Instruction:
    """One line: ``name = shape opcode(operands), attributes``."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool
    argument: str

    @functools.cached_property
    def arrays(self) -> tuple[Shape, ...]:
        """What it gives."""
        return shapes(self.shape)

    @functools.cached_property
    def calls(self) -> tuple[str, ...]:
        """The computations that it names."""
        names = []
        for one, several in _CALLED.findall(self.attributes):
            names += [one] if one else [name.strip() for name in several.split(",")]
        return tuple(name.lstrip("%") for name in names)

    @property
    def scope(self) -> str:
        """Where in the traced program it comes from."""
        return self.attribute(r'op_name="([^"]*)"') or ""

    @property
    def target(self) -> str:
        """Of a custom call, the kernel that it runs."""
        return self.attribute(r'custom_call_target="([^"]*)"') or ""

    def attribute(self, pattern: str) -> str | None:
        """The first group of a pattern in the attributes."""
        match = re.search(pattern, self.attributes)
        return match.group(1) if match else None


@dataclass
class Computation:
    """Instructions by name, in order."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @functools.cached_property
    def root(self) -> Instruction:
        """What it gives back."""
        return next(i for i in reversed(self.instructions.values()) if i.is_root or i is self._last)

    @property
    def _last(self) -> Instruction:
        return next(reversed(self.instructions.values()))


@dataclass(frozen=True)
class Run:
    """An instruction in its computation, ``times`` times a step, inside a fused kernel or by itself."""

    instruction: Instruction
    computation: Computation
    times: int
    fused: bool


class Module:
    """A compiled program.

    Args:
      text: ``compiled.as_text()``.
    """

    def __init__(self, text: str):
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        self.unknown_loops = 0
        current: Computation | None = None
        for line in _whole_lines(text):
            head = _HEAD.match(line)
            if head:
                current = Computation(head["name"].lstrip("%"))
                self.computations[current.name] = current
                self.entry = current.name if head["entry"] else self.entry
                continue
            instruction = None if current is None else _instruction(line)
            if current is not None and instruction is not None:
                current.instructions[instruction.name] = instruction

    def runs(self, computation: str | None = None) -> Iterator[Run]:
        """Everything that a device runs in one call of the program, or of one of its computations."""
        self.unknown_loops = 0
        yield from self._walk(computation or self.entry, 1, False)

    def _walk(self, name: str, times: int, fused: bool) -> Iterator[Run]:
        computation = self.computations.get(name)
        if computation is None:
            return
        for instruction in computation.instructions.values():
            yield Run(instruction, computation, times, fused)
            if instruction.opcode in ("reduce", "all-reduce", "sort", "map", "scatter"):
                continue  # what they call is a scalar's worth
            if instruction.opcode.endswith(("-done", "-update")):
                continue  # the start has run it
            if instruction.opcode == "while":
                trips = self.trips(instruction, computation)
                for called in instruction.calls:
                    yield from self._walk(called, times * trips, fused)
            elif instruction.opcode == "conditional":
                branches = [list(self._walk(c, times, fused)) for c in instruction.calls]
                yield from max(branches, key=_sent_by, default=[])
            else:
                inside = fused or instruction.opcode == "fusion"
                for called in instruction.calls:
                    yield from self._walk(called, times, inside)

    def trips(self, loop: Instruction, around: Computation) -> int:
        """How often a loop's body runs; 1 where nothing says, which ``unknown_loops`` counts."""
        said = self.said_trips(loop, around)
        if said is None:
            self.unknown_loops += 1
            return 1
        return said

    def said_trips(self, loop: Instruction, around: Computation) -> int | None:
        """How often a loop's body runs at most; None where nothing says."""
        known = _TRIPS.search(loop.attributes)
        return int(known.group(1)) if known else self._counted(loop, around)

    def _counted(self, loop: Instruction, around: Computation) -> int | None:
        """From ``for (i = start; i < end; i += step)``, as compilers write it."""
        condition = self.computations[_of(loop, "condition")]
        body = self.computations[body_of(loop)]
        compared = self._compare(condition)
        if compared is None:
            return None
        index, end, inclusive = compared
        start = self._constant(_element(around, loop.operands[0], index), around) or 0
        step = 1
        grown = self._inside(body, _element(body, body.root.name, index))
        if grown is not None:
            computation, add = grown
            values = [self._constant(name, computation) for name in add.operands]
            step = next((value for value in values if value), 1) if add.opcode == "add" else 1
        return max(-(-(end + inclusive - start) // step), 0)

    def _compare(self, condition: Computation) -> tuple[int, int, int] | None:
        """(index of the counter in the loop's state, its bound, 1 where it is reached)."""
        for where in (condition, *self._called(condition)):
            for instruction in where.instructions.values():
                if instruction.opcode != "compare":
                    continue
                outer = _outer_names(condition, where)
                names = [outer.get(name, name) for name in instruction.operands]
                bounds = [self._constant(name, condition) for name in names]
                counters = [_index(condition, name) for name in names]
                direction = instruction.attribute(r"direction=(\w+)")
                bound = next((value for value in bounds if value is not None), None)
                counter = next((value for value in counters if value is not None), None)
                if bound is not None and counter is not None and direction in ("LT", "GT", "LE"):
                    return counter, bound, int(direction == "LE")
        return None

    def _called(self, computation: Computation) -> list[Computation]:
        names = [c for i in computation.instructions.values() for c in i.calls]
        return [self.computations[name] for name in names if name in self.computations]

    def _constant(self, name: str | None, where: Computation) -> int | None:
        """The number that an instruction holds, seen through copies."""
        instruction = where.instructions.get(name or "")
        while instruction is not None and instruction.opcode in ("copy", "bitcast", "convert"):
            instruction = where.instructions.get(instruction.operands[0])
        if instruction is None or instruction.opcode != "constant":
            return None
        match = re.fullmatch(r"\s*(-?\d+)\s*", instruction.argument)
        return int(match.group(1)) if match else None

    def _inside(
        self, where: Computation, name: str | None
    ) -> tuple[Computation, Instruction] | None:
        """The instruction of that name, or what a fusion of that name computes."""
        instruction = where.instructions.get(name or "")
        if instruction is None:
            return None
        if instruction.opcode == "fusion":
            inner = self.computations[instruction.calls[0]]
            return inner, inner.root
        return where, instruction


def _sent_by(runs: list[Run]) -> int:
    return sum(
        run.times * sum(s.bytes for s in run.instruction.arrays)
        for run in runs
        if run.instruction.opcode.startswith(("all-", "reduce-scatter", "collective-"))
    )


def body_of(loop: Instruction) -> str:
    """The computation that a loop repeats."""
    return _of(loop, "body")


def _of(loop: Instruction, what: str) -> str:
    return (loop.attribute(rf"\b{what}=({_NAME})") or "").lstrip("%")


def _element(where: Computation, name: str, index: int) -> str | None:
    """The name of one element of a tuple."""
    made = where.instructions.get(name)
    while made is not None and made.opcode in ("copy", "opt-barrier"):
        made = where.instructions.get(made.operands[0])
    if made is None or made.opcode != "tuple" or index >= len(made.operands):
        return None
    return made.operands[index]


def _index(where: Computation, name: str) -> int | None:
    """Which element of a loop's state an instruction takes out."""
    made = where.instructions.get(name)
    while made is not None and made.opcode in ("copy", "bitcast"):
        made = where.instructions.get(made.operands[0])
    if made is None or made.opcode != "get-tuple-element":
        return None
    return int(made.attribute(r"index=(\d+)") or 0)


def _outer_names(outer: Computation, inner: Computation) -> dict[str, str]:
    """What the parameters of a called computation are called outside."""
    if outer is inner:
        return {}
    caller = next((i for i in outer.instructions.values() if inner.name in i.calls), None)
    if caller is None:
        return {}
    return {
        i.name: caller.operands[int(i.argument)]
        for i in inner.instructions.values()
        if i.opcode == "parameter" and int(i.argument) < len(caller.operands)
    }


def _whole_lines(text: str) -> Iterator[str]:
    """Lines, with those that an attribute of several lines goes on in."""
    whole = ""
    for line in text.splitlines():
        if _LINE.match(line) or _HEAD.match(line) or line in ("", "}"):
            yield whole
            whole = line
        else:
            whole += line
    yield whole


def _instruction(line: str) -> Instruction | None:
    head = _LINE.match(line)
    if not head:
        return None
    rest = line[head.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else len(rest.split(" ", 1)[0])
    opcode = _OPCODE.match(rest, end)
    if not opcode:
        return None
    stop = _closing(rest, opcode.end() - 1)
    argument = rest[opcode.end() : stop]
    names = re.findall(r"%([\w.$-]+)", argument)
    if not names:  # the short form names operands without a sign
        names = [word for word in re.findall(r"[\w.$-]+", argument) if not word[0].isdigit()]
    return Instruction(
        name=head["name"].lstrip("%"),
        shape=rest[:end],
        opcode=opcode.group(1),
        operands=tuple(names),
        attributes=rest[stop + 1 :],
        is_root=bool(head["root"]),
        argument=argument,
    )


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at ``start`` is closed."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    return len(text) - 1
