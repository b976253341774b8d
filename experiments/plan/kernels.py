"""Which kernel computes each attention of a compiled program.

Blocks name the attention that they compute (``encoder_attention``, ``decoder_attention``,
``cross_attention``), and the compiler keeps the names beside its instructions.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.plan.hlo import Instruction, Module, Run, Shape

PLACES = ("encoder_attention", "decoder_attention", "cross_attention")

# What a custom call's target says of its kernel; of Pallas's kernels their own name says more.
_TARGETS = {
    "tpu_custom_call": "Mosaic",
    "mosaic_gpu_v2": "Mosaic",
    "mosaic_gpu": "Mosaic",
    "triton_kernel_call": "Triton",
    "__gpu$xla.gpu.triton": "Triton",
}


@dataclass(frozen=True)
class Kernel:
    """A kernel of attention in a compiled step.

    Attributes:
      name: "splash", "cuDNN", ...
      backward: whether it computes derivatives.
      runs: how often in a step.
    """

    name: str
    backward: bool
    runs: int


def attention_kernels(module: Module) -> dict[str, tuple[Kernel, ...]]:
    """The fused kernels of each place that the program has; none where XLA's own operations do it."""
    runs = list(module.runs())
    places = [p for p in PLACES if any(p in run.instruction.scope for run in runs)]
    counts: dict[str, dict[tuple[str, bool], int]] = {place: {} for place in places}
    for run in runs:
        name = fused_attention(run.instruction)
        place = next((p for p in places if p in run.instruction.scope), None)
        if name is None or place is None:
            continue
        key = name, _is_backward(run.instruction)
        counts[place][key] = counts[place].get(key, 0) + run.times
    return {
        place: tuple(Kernel(name, backward, times) for (name, backward), times in own.items())
        for place, own in counts.items()
    }


def fused_attention(instruction: Instruction) -> str | None:
    """The name of the attention kernel that a custom call runs; None of any other instruction."""
    target = instruction.target
    if instruction.opcode != "custom-call":
        return None
    if target.startswith("__cudnn$fmha"):
        return "cuDNN"
    if target in _TARGETS and "attention" in instruction.scope:
        known = re.search(r"splash|flash|ring", instruction.scope)
        return known.group(0) if known else _TARGETS[target]
    if target.startswith("crossattn"):
        return "cpu"
    return None


def attention_flops(run: Run) -> int:
    """FLOPs of an attention kernel on one device, by the shapes of its operands; masks hide nothing.

    Forward: two products of 2 T S H for each head; the kernels for derivatives make the logits again
    and have, together, five.
    """
    floats = _float_operands(run)
    if len(floats) < 2:
        return 0
    q, k = floats[0].sizes, floats[1].sizes
    longest = _length(run.instruction, k)
    whole = 2 * math.prod(q) * longest
    if not _is_backward(run.instruction):
        return 2 * whole
    scope = run.instruction.scope
    # Splash has one kernel for dq and one for dk and dv, each of which makes the logits again.
    return (
        3 * whole
        if "dq" in scope.rpartition("splash")[2]
        else 4 * whole
        if "dkv" in scope
        else 5 * whole
    )


def head_size(run: Run) -> int:
    """H of an attention kernel, by the shape of its first operand; 0 where it has none of that form."""
    floats = _float_operands(run)
    return floats[0].sizes[-1] if len(floats) >= 2 else 0


def _float_operands(run: Run) -> list[Shape]:
    operands = [run.computation.instructions.get(name) for name in run.instruction.operands]
    arrays = [i.arrays[0] for i in operands if i is not None and i.arrays]
    return [a for a in arrays if a.dtype[0] in "bf" and len(a.sizes) >= 3]


def _length(instruction: Instruction, sizes: Sequence[int]) -> int:
    """S of keys: [B S K H] for cuDNN, [.. K S H] for Pallas's kernels."""
    return sizes[-3] if instruction.target.startswith("__cudnn") else sizes[-2]


def _is_backward(instruction: Instruction) -> bool:
    """By the kernel's name where it says so; what is computed again stands among derivatives too."""
    scope = instruction.scope
    if instruction.target.startswith("__cudnn"):
        return "Backward" in instruction.target
    if kinds := re.findall(r"_(fwd|dq|dkv|bwd)", scope):
        return kinds[-1] != "fwd"
    return "transpose(" in scope and "rematted_computation" not in scope
