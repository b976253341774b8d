"""The FLOPs and bytes of a compiled program on one device, kernel by kernel.

A fused kernel reads its operands once, or the slice of one that it uses, and writes its results once. Bytes
that stay in a TPU's on-chip memory do not count. Bytes are those of the arrays, without the padding of tiles;
products take as long as with the padding of the chip's matrix unit.
"""

import math
import re
from dataclasses import dataclass

from experiments.chips import Chip
from experiments.plan.hlo import SEEN_THROUGH, Computation, Instruction, Module, Run, Shape
from experiments.plan.kernels import attention_work, fused_attention

_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call",
    "after-all", "partition-id", "replica-id", "opt-barrier", "iota", "domain", "add-dependency",
}  # fmt: skip
_SLICES = ("dynamic-slice", "slice", "gather")
# Operations that write in place a part of their first operand, and the operand that is this part.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
_BLOCK = 1024  # lengths in kernels of attention: they fill any matrix unit, and the size of a head may not


@dataclass(frozen=True)
class Cost:
    """The cost of one call of a program on one device.

    Attributes:
      flops: FLOPs of its products.
      bytes: bytes read and written.
      compute: seconds of the products, in a matrix unit that small sides leave empty.
      memory: seconds of the bytes.
      kernels: seconds of all kernels one after the other, each the longer of its compute and memory.
    """

    flops: float
    bytes: float
    compute: float
    memory: float
    kernels: float


def cost(module: Module, chip: Chip, computation: str | None = None) -> Cost:
    """Sums the kernels of a program, or of one of its computations."""
    total = [0.0] * 5
    flops = slow = moved = 0.0  # FLOPs, seconds of the products and bytes of the current kernel

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
    """Matrix products of a kernel, each [rows, inner] x [inner, columns]."""

    flops: float
    rows: float
    inner: float
    columns: float

    def filled(self, unit: tuple[int, int, int]) -> float:
        """Returns the share of a matrix unit that they fill; it may hold either side."""
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
        flops, head = attention_work(run)
        found = _Product(flops, _BLOCK, head, _BLOCK)
    return found if found and found.flops else None


def _speed(run: Run, chip: Chip) -> float:
    """Returns the FLOP/s of a product of these operands."""
    dtype = next((a[0].dtype for a in run.operands if a), "bf16")
    if dtype != "f32":
        return chip.flops
    passes = {"high": 3, "highest": 6} if chip.platform == "tpu" else {}
    asked = run.instruction.attribute(r"operand_precision=\{(\w+)") or "default"
    return chip.float32_flops / passes.get(asked, 1)


def _dot(run: Run, pattern: str) -> _Product | None:
    operands, instruction = run.operands, run.instruction
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
    """Counts a convolution, by which TPUs write every product; padding and holes are not multiplied.

    A window with one place for each place of the output counts products; any other is a part of the sum.
    """
    instruction = run.instruction
    labels = instruction.attribute(r"dim_labels=(\S+?)(?:,|\s|$)") or ""
    match = re.fullmatch(r"(\w+)_(\w+)->(\w+)", labels)
    operands = run.operands
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
    many = pairs == places > 1 and window_places > 1  # several products, not places of one
    return _Product(
        2.0 * batch * features * inner * pairs / groups,
        batch if many else batch * places,
        inner if many else inner * max(1, pairs // places) / groups,
        features,
    )


def _pairs(size: int, kernel: int, out: int, window: str, axis: int) -> int:
    """Counts the pairs of an output's and a kernel's place on one axis that meet an element of the input."""

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
    """Counts the bytes between a kernel and HBM."""
    instruction, operands = run.instruction, run.operands
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith(("-done", "-update")):
        return 0.0
    if opcode in ("copy-start", "slice-start", "async-start"):
        # Source and copy, where they lie in HBM; the source of a slice is larger than the copy.
        arrays = [a for a in instruction.arrays if a.sizes]
        size = min((a.bytes for a in arrays), default=0)
        return float(size * sum(not a.on_chip for a in arrays))
    if opcode in _UPDATES:
        return 2.0 * sum(a.bytes for a in operands[_UPDATES[opcode]])
    results = instruction.arrays
    if opcode.endswith("-start") or instruction.target.startswith("__cublas"):
        results = results[:1]  # cuBLAS also has room to work in, written as far as it is needed
    fused = opcode == "fusion" and instruction.calls
    called = module.computations.get(instruction.calls[0]) if fused else None
    moved = _written(results, called, module)
    for number, arrays in enumerate(operands):
        whole = float(sum(a.bytes for a in arrays if not a.on_chip))
        if opcode in _SLICES and number == 0:
            whole = min(whole, sum(a.bytes for a in instruction.arrays))
        elif called is not None and whole:
            whole = min(whole, _used(number, called, module, whole))
        moved += whole
    return moved


def _written(results: tuple[Shape, ...], called: Computation | None, module: Module) -> float:
    """Counts the bytes of results; of one that is written in place, those of the written part."""
    roots: list[str] = []
    if called is not None:
        root = called.root
        roots = list(root.operands) if root.opcode == "tuple" else [root.name]
    total = 0.0
    for number, array in enumerate(results):
        if array.on_chip:
            continue
        update = None
        if called is not None and len(roots) == len(results):
            update = _update(called.source(roots[number]), called, module)
        total += array.bytes if update is None else min(update, array.bytes)
    return total


def _update(root: Instruction | None, where: Computation, module: Module) -> int | None:
    """Counts the bytes that are written into an existing array; None for a new array."""
    if root is None:
        return None
    if root.opcode == "fusion" and root.calls:
        inner = module.computations[root.calls[0]]
        return _update(inner.source(inner.root.name), inner, module)
    if root.opcode not in _UPDATES:
        return None
    update = where.instructions.get(root.operands[_UPDATES[root.opcode]])
    return None if update is None else sum(a.bytes for a in update.arrays)


def _used(number: int, where: Computation, module: Module, whole: float) -> float:
    """Counts the bytes of a parameter that a fused kernel reads."""
    parameters = (i for i in where.instructions.values() if i.opcode == "parameter")
    name = next((i.name for i in parameters if int(i.argument) == number), None)
    return whole if name is None else _read(name, where, module, whole)


def _read(name: str, where: Computation, module: Module, whole: float) -> float:
    """Counts the bytes of an instruction's result that its users read."""
    if where.root.name == name:
        return whole  # returned by a kernel that copies or converts
    total = 0.0
    for user in where.instructions.values():
        if name not in user.operands:
            continue
        if user.opcode in SEEN_THROUGH or _passes(user, name, module):
            total += _read(user.name, where, module, whole)
        elif user.opcode == "fusion" and user.calls:
            inner = module.computations[user.calls[0]]
            total += _used(user.operands.index(name), inner, module, whole)
        elif user.operands[0] == name and user.opcode in _SLICES:
            total += sum(a.bytes for a in user.arrays)
        elif user.operands[0] == name and user.opcode in _UPDATES:
            continue  # written in place: the old values are not read
        else:
            return whole
    return total


def _passes(fusion: Instruction, operand: str, module: Module) -> bool:
    """Returns whether a kernel within a kernel returns an operand as it is, for another to read."""
    if fusion.opcode != "fusion" or not fusion.calls:
        return False
    inner = module.computations[fusion.calls[0]]
    made, number = inner.source(inner.root.name), fusion.operands.index(operand)
    return made is not None and made.opcode == "parameter" and int(made.argument) == number
