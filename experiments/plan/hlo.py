"""Optimised HLO read as text: every instruction that a device runs, and how often.

Instructions come with the product of the trip counts of the loops around them. Where the text has no
trip count, the start, bound and step of the loop's counter give it.
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
_TRIPS = r'"?known_trip_count"?[:=]\{"?n"?:"?(\d+)"?\}'
_SPECIAL = {"pred": 8, "token": 0}
SEEN_THROUGH = ("bitcast", "copy", "reshape", "convert", "opt-barrier")


@dataclass(frozen=True)
class Shape:
    """An array's element type and sizes, and whether it lies in on-chip memory."""

    dtype: str
    sizes: tuple[int, ...]
    on_chip: bool = False

    @property
    def bytes(self) -> int:
        """The size without the padding of layouts."""
        return math.ceil(math.prod(self.sizes) * _bits(self.dtype) / 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.sizes))}]"


def shapes(text: str) -> tuple[Shape, ...]:
    """Parses the shape of an array, or of each array of a tuple."""
    return tuple(
        # Memory space 1 of a TPU is VMEM: reads and writes there do not pass through HBM.
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
    """A line ``name = shape opcode(argument), attributes``."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool
    argument: str

    @functools.cached_property
    def arrays(self) -> tuple[Shape, ...]:
        """The results."""
        return shapes(self.shape)

    @functools.cached_property
    def calls(self) -> tuple[str, ...]:
        """The names of the computations that it calls."""
        names = []
        for one, several in _CALLED.findall(self.attributes):
            names += [one] if one else [name.strip() for name in several.split(",")]
        return tuple(name.lstrip("%") for name in names)

    @property
    def scope(self) -> str:
        """The name stack of the traced program."""
        return self.attribute(r'op_name="([^"]*)"') or ""

    @property
    def target(self) -> str:
        """The kernel of a custom call."""
        return self.attribute(r'custom_call_target="([^"]*)"') or ""

    def attribute(self, pattern: str) -> str | None:
        """Returns the first group of a pattern in the attributes."""
        match = re.search(pattern, self.attributes)
        return match.group(1) if match else None


@dataclass
class Computation:
    """A computation's instructions by name, in order."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction that gives the result; the last where none is marked."""
        *_, last = self.instructions.values()
        return next((i for i in self.instructions.values() if i.is_root), last)

    def source(self, name: str | None) -> Instruction | None:
        """Returns the instruction of a name, or the one that it copies, reshapes or converts."""
        found = self.instructions.get(name or "")
        while found is not None and found.opcode in SEEN_THROUGH:
            found = self.instructions.get(found.operands[0])
        return found


@dataclass(frozen=True)
class Run:
    """An instruction that runs ``times`` times a step, inside a fused kernel or by itself."""

    instruction: Instruction
    computation: Computation
    times: int
    fused: bool

    @property
    def operands(self) -> list[tuple[Shape, ...]]:
        """The arrays of each operand, () for an operand of another computation."""
        found = map(self.computation.instructions.get, self.instruction.operands)
        return [() if one is None else one.arrays for one in found]


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
            if head := _HEAD.match(line):
                current = Computation(head["name"].lstrip("%"))
                self.computations[current.name] = current
                self.entry = current.name if head["entry"] else self.entry
            elif current is not None and (instruction := _instruction(line)):
                current.instructions[instruction.name] = instruction

    def runs(self, computation: str | None = None) -> Iterator[Run]:
        """Yields the instructions of one call of the program, or of one of its computations."""
        self.unknown_loops = 0
        yield from self._walk(computation or self.entry, 1, False)

    def _walk(self, name: str, times: int, fused: bool) -> Iterator[Run]:
        computation = self.computations.get(name)
        if computation is None:
            return
        for instruction in computation.instructions.values():
            yield Run(instruction, computation, times, fused)
            if instruction.opcode in ("reduce", "all-reduce", "sort", "map", "scatter"):
                continue  # the computations that they call are of scalars
            if instruction.opcode.endswith(("-done", "-update")):
                continue  # its start has yielded the calls
            if instruction.opcode == "conditional":
                branches = [list(self._walk(c, times, fused)) for c in instruction.calls]
                yield from max(branches, key=_sent_by, default=[])
                continue
            trips = 1
            if instruction.opcode == "while":
                known = self.trips(instruction, computation)
                self.unknown_loops += known is None
                trips = 1 if known is None else known
            for called in instruction.calls:
                yield from self._walk(
                    called, times * trips, fused or instruction.opcode == "fusion"
                )

    def trips(self, loop: Instruction, around: Computation) -> int | None:
        """Returns the number of iterations of a loop at most; None where the program does not say.

        The compiler's own count is preferred to ``for (i = start; i < end; i += step)``.
        """
        known = loop.attribute(_TRIPS)
        if known:
            return int(known)
        body, condition = (self.computations[_called(loop, c)] for c in ("body", "condition"))
        compared = self._compare(condition)
        if compared is None:
            return None
        index, end = compared
        start = _constant(_element(around, loop.operands[0], index), around) or 0
        step, grown = 1, _element(body, body.root.name, index)
        add = body.instructions.get(grown or "")
        if add is not None and add.opcode == "fusion":
            body = self.computations[add.calls[0]]
            add = body.root
        if add is not None and add.opcode == "add":
            values = [_constant(name, body) for name in add.operands]
            step = next((value for value in values if value), 1)
        return max(-(-(end - start) // step), 0)

    def _compare(self, condition: Computation) -> tuple[int, int] | None:
        """Returns the index of the counter in the loop's state, and the first value that ends the loop."""
        called = [c for i in condition.instructions.values() for c in i.calls]
        for where in (condition, *(self.computations[c] for c in called if c in self.computations)):
            outer = _outer_names(condition, where)
            for instruction in where.instructions.values():
                direction = instruction.attribute(r"direction=(\w+)")
                if instruction.opcode != "compare" or direction not in ("LT", "GT", "LE"):
                    continue
                names = [outer.get(name, name) for name in instruction.operands]
                bounds = [_constant(name, condition) for name in names]
                counters = [_index(condition, name) for name in names]
                bound = next((value for value in bounds if value is not None), None)
                counter = next((value for value in counters if value is not None), None)
                if bound is not None and counter is not None:
                    return counter, bound + (direction == "LE")
        return None


def _sent_by(runs: list[Run]) -> int:
    return sum(
        run.times * sum(s.bytes for s in run.instruction.arrays)
        for run in runs
        if run.instruction.opcode.startswith(("all-", "reduce-scatter", "collective-"))
    )


def body_of(loop: Instruction) -> str:
    """Returns the name of the computation that a loop repeats."""
    return _called(loop, "body")


def _called(loop: Instruction, role: str) -> str:
    return (loop.attribute(rf"\b{role}=({_NAME})") or "").lstrip("%")


def _constant(name: str | None, where: Computation) -> int | None:
    made = where.source(name)
    if made is None or made.opcode != "constant":
        return None
    return int(made.argument) if re.fullmatch(r"\s*-?\d+\s*", made.argument) else None


def _element(where: Computation, name: str, index: int) -> str | None:
    """Returns the name of one element of a tuple."""
    made = where.source(name)
    if made is None or made.opcode != "tuple" or index >= len(made.operands):
        return None
    return made.operands[index]


def _index(where: Computation, name: str) -> int | None:
    """Returns which element of a loop's state an instruction takes out."""
    made = where.source(name)
    if made is None or made.opcode != "get-tuple-element":
        return None
    return int(made.attribute(r"index=(\d+)") or 0)


def _outer_names(outer: Computation, inner: Computation) -> dict[str, str]:
    """Maps the parameters of a called computation to the names of the operands of its call."""
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
    """Yields lines, each joined with the further lines of its attributes."""
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
    """Returns the index of the bracket that closes the one at ``start``."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    return len(text) - 1
