"""What a compiled program computes, reads and writes on one device, kernel by kernel.

A fused kernel reads its operands once and writes its results once, whatever it
computes between; what it takes a slice of, it reads a slice of. Bytes that stay in a TPU's on-chip
memory do not count. Bytes are those of the arrays, without the padding of tiles; products take as long as
with the padding of the chip's matrix unit.
"""

import math
import re
from dataclasses import dataclass

from experiments.chips import Chip
from experiments.plan.hlo import Computation, Instruction, Module, Run, Shape
from experiments.plan.kernels import attention_flops, fused_attention, head_size

_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call",
    "after-all", "partition-id", "replica-id", "opt-barrier", "iota", "domain", "add-dependency",
}  # fmt: skip
_SEEN_THROUGH = ("bitcast", "copy", "reshape", "convert")
_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""What writes a part of its first operand in place, and which operand that part is."""
_BLOCK = 1024
"""Of lengths in kernels of attention: it fills any matrix unit, and the size of a head may not."""


@dataclass(frozen=True)
class Cost:
    """What a program takes of one device in one call.

    Attributes:
      flops: of its products.
      bytes: read and written.
      compute: seconds that the flops take by themselves, in a matrix unit that small sides leave empty.
      memory: seconds that the bytes take by themselves.
      kernels: seconds of all kernels one after the other, each as long as the longer of its two.
    """

    flops: float
    bytes: float
    compute: float
    memory: float
    kernels: float


def cost(module: Module, chip: Chip, computation: str | None = None) -> Cost:
    """Sums over the kernels of a program, or of one of its computations."""
    total = [0.0] * 5
    flops = slow = moved = 0.0  # of the kernel at hand; slow: seconds of its products

    def close() -> None:
        memory = moved / chip.bandwidth
        for i, value in enumerate((flops, moved, slow, memory, max(slow, memory))):
            total[i] += value

    for run in module.runs(computation):
        if not run.fused:
            close()
            flops = slow = 0.0
            moved = run.times * _moved(run, module)
        if product := _product(run):
            done = run.times * product.flops
            flops += done
            slow += done / (_speed(run, chip) * product.filled(chip.unit))
    close()
    return Cost(*total)


@dataclass(frozen=True)
class _Product:
    """One kernel's matrix products, each [rows, inner] x [inner, columns]."""

    flops: float
    rows: float
    inner: float
    columns: float

    def filled(self, unit: tuple[int, int, int]) -> float:
        """The share of a matrix unit that they fill; either side may be the one that it holds."""
        rows, inner, columns = unit
        one = _share(self.rows, rows) * _share(self.columns, columns)
        other = _share(self.columns, rows) * _share(self.rows, columns)
        return _share(self.inner, inner) * max(one, other)


def _share(size: float, tile: int) -> float:
    return size / (math.ceil(size / tile) * tile)


def _product(run: Run) -> _Product | None:
    opcode, found = run.instruction.opcode, None
    if opcode == "dot":
        found = _dot(run, "lhs_{}_dims={{([\\d,]*)}}")
    elif opcode == "convolution":
        found = _convolution(run)
    elif opcode == "custom-call" and run.instruction.target.startswith("__cublas$"):
        found = _dot(run, '"lhs_{}_dimensions":\\[([^\\]]*)\\]')
    elif fused_attention(run.instruction):
        head = head_size(run)
        found = _Product(attention_flops(run), _BLOCK, head, _BLOCK) if head else None
    return found if found and found.flops else None


def _speed(run: Run, chip: Chip) -> float:
    """FLOP/s of a product of these operands."""
    dtype = next((a[0].dtype for a in _operands(run) if a), "bf16")
    if dtype != "f32":
        return chip.flops
    passes = {"high": 3, "highest": 6} if chip.platform == "tpu" else {}
    asked = run.instruction.attribute(r"operand_precision=\{(\w+)") or "default"
    return chip.float32_flops / passes.get(asked, 1)


def _operands(run: Run) -> list:
    operands = [run.computation.instructions.get(name) for name in run.instruction.operands]
    return [() if one is None else one.arrays for one in operands]


def _dot(run: Run, pattern: str) -> _Product | None:
    operands, instruction = _operands(run), run.instruction
    if not operands or not operands[0]:
        return None
    left, out = operands[0][0].sizes, math.prod(instruction.arrays[0].sizes)

    def along(kind: str) -> int:
        listed = instruction.attribute(pattern.format(kind)) or ""
        return math.prod(left[int(n)] for n in re.findall(r"\d+", listed))

    inner, batch = along("contracting"), along("batch")
    rows = math.prod(left) / (inner * batch)
    return _Product(2.0 * out * inner, rows, inner, out / (batch * rows))


def _convolution(run: Run) -> _Product | None:
    """TPUs write every product as a convolution; padding and holes are not multiplied.

    A window of one place for each place of the output counts products; any other is a part of what is summed.
    """
    instruction = run.instruction
    labels = instruction.attribute(r"dim_labels=(\S+?)(?:,|\s|$)") or ""
    match = re.fullmatch(r"(\w+)_(\w+)->(\w+)", labels)
    operands = _operands(run)
    if not match or len(operands) < 2 or not operands[0] or not operands[1]:
        return None
    left, kernel, out = match.groups()
    sizes = [operands[0][0].sizes, operands[1][0].sizes, instruction.arrays[0].sizes]
    window = instruction.attribute(r"window=\{([^}]*)\}") or ""
    spatial = [c for c in out if c.isdigit()]
    pairs = places = window_places = 1
    for i, c in enumerate(sorted(spatial)):
        size, taps, made = (
            own[names.index(c)] for own, names in zip(sizes, (left, kernel, out), strict=True)
        )
        pairs *= _pairs(size, taps, made, window, i)
        places, window_places = places * made, window_places * taps
    batch, features = sizes[2][out.index("b")], sizes[2][out.index("f")]
    groups = int(instruction.attribute(r"batch_group_count=(\d+)") or 1)
    inner = sizes[1][kernel.index("i")]
    many = pairs == places > 1 and window_places > 1  # products, not places of one
    return _Product(
        2.0 * batch * features * inner * pairs / groups,
        batch if many else batch * places,
        inner if many else inner * max(1, pairs // places) / groups,
        features,
    )


def _pairs(size: int, kernel: int, out: int, window: str, axis: int) -> int:
    """Pairs of an output's and a kernel's place on one axis that meet an element of the input."""

    def option(name: str, default: int) -> int:
        match = re.search(rf"\b{name}=(\S+)", window)
        return int(match.group(1).split("x")[axis]) if match else default

    match = re.search(r"\bpad=(\S+)", window)
    low = int(match.group(1).split("x")[axis].split("_")[0]) if match else 0
    stride, holes, spread = option("stride", 1), option("lhs_dilate", 1), option("rhs_dilate", 1)
    last = (size - 1) * holes
    count = 0
    for k in range(kernel):
        start = k * spread - low  # the place of output 0 in the dilated input
        if holes == 1:
            first = max(0, -(start // stride))
            count += max(0, min(out - 1, (last - start) // stride) - first + 1)
        else:
            places = (start + o * stride for o in range(out))
            count += sum(0 <= p <= last and p % holes == 0 for p in places)
    return count


def _moved(run: Run, module: Module) -> float:
    """Bytes between a kernel and HBM."""
    instruction = run.instruction
    if instruction.opcode in _FREE or instruction.opcode.endswith(("-done", "-update")):
        return 0.0
    if instruction.opcode in ("copy-start", "slice-start", "async-start"):
        return _copied(instruction)
    results = instruction.arrays
    if instruction.opcode.endswith("-start"):
        results = results[:1]
    if instruction.target.startswith("__cublas"):
        results = results[:1]  # beside it stands room to work in, written as far as it is needed
    fused = instruction.opcode == "fusion" and instruction.calls
    called = module.computations.get(instruction.calls[0]) if fused else None
    read = sum(
        _read(number, arrays, called, instruction, module)
        for number, arrays in enumerate(_operands(run))
    )
    if instruction.opcode in _UPDATES:
        return 2.0 * sum(a.bytes for a in _operands(run)[_UPDATES[instruction.opcode]])
    return _written(results, called, module) + read


def _copied(start: Instruction) -> float:
    """Of source and copy, whichever lies in HBM; a slice's source is larger than what is copied."""
    arrays = [a for a in start.arrays if a.sizes]
    size = min((a.bytes for a in arrays), default=0)
    return float(size * sum(not a.on_chip for a in arrays))


def _written(results: tuple[Shape, ...], called: Computation | None, module: Module) -> float:
    """Results; of one that is written in place, the part that is."""
    roots = [] if called is None else _roots(called.root, called)
    if len(roots) != len(results):
        return float(sum(a.bytes for a in results if not a.on_chip))
    parts = (
        a.bytes if update is None else min(update, a.bytes)
        for a, update in zip(results, (_update(*root, module) for root in roots), strict=True)
        if not a.on_chip
    )
    return float(sum(parts))


def _roots(root: Instruction, where: Computation) -> list[tuple[Instruction | None, Computation]]:
    if root.opcode == "tuple":
        return [(where.instructions.get(name), where) for name in root.operands]
    return [(root, where)]


def _update(root: Instruction | None, where: Computation, module: Module) -> int | None:
    """Bytes that are written into an array that was there before; None where all of it is new."""
    while root is not None and root.opcode in _SEEN_THROUGH:
        root = where.instructions.get(root.operands[0])
    if root is None:
        return None
    if root.opcode == "fusion" and root.calls:
        inner = module.computations[root.calls[0]]
        return _update(inner.root, inner, module)
    if root.opcode not in _UPDATES:
        return None
    update = where.instructions.get(root.operands[_UPDATES[root.opcode]])
    return None if update is None else sum(a.bytes for a in update.arrays)


def _read(
    number: int,
    arrays: tuple[Shape, ...],
    called: Computation | None,
    by: Instruction,
    module: Module,
) -> float:
    """An operand, or the part of it that is used."""
    whole = float(sum(a.bytes for a in arrays if not a.on_chip))
    if by.opcode in _SLICES and number == 0:
        return min(whole, sum(a.bytes for a in by.arrays))
    if called is None or not whole:
        return whole
    return min(whole, _used(number, called, module, whole))


def _used(number: int, where: Computation, module: Module, whole: float) -> float:
    """Bytes of a parameter that a fused kernel looks at."""
    parameters = (i for i in where.instructions.values() if i.opcode == "parameter")
    name = next((i.name for i in parameters if int(i.argument) == number), None)
    return whole if name is None else _looked_at(name, where, module, whole)


def _looked_at(name: str, where: Computation, module: Module, whole: float) -> float:
    if where.root.name == name:
        return whole  # given back, by a kernel that copies or converts
    total = 0.0
    for user in where.instructions.values():
        if name not in user.operands:
            continue
        if user.opcode in _SEEN_THROUGH or _passes(user, name, module):
            total += _looked_at(user.name, where, module, whole)
        elif user.opcode == "fusion" and user.calls:
            inner = module.computations[user.calls[0]]
            total += _used(user.operands.index(name), inner, module, whole)
        elif user.operands[0] == name and user.opcode in _SLICES:
            total += sum(a.bytes for a in user.arrays)
        elif user.operands[0] == name and user.opcode in _UPDATES:
            continue  # written in place: what was there is not read
        else:
            return whole
    return total


def _passes(fusion: Instruction, operand: str, module: Module) -> bool:
    """Whether a kernel within a kernel gives an operand on as it is, for another to look at."""
    if fusion.opcode != "fusion" or not fusion.calls:
        return False
    inner = module.computations[fusion.calls[0]]
    made: Instruction | None = inner.root
    while made is not None and made.opcode in _SEEN_THROUGH:
        made = inner.instructions.get(made.operands[0])
    number = fusion.operands.index(operand)
    return made is not None and made.opcode == "parameter" and int(made.argument) == number
