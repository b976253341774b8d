"""The kernel of each attention in a compiled program.

Blocks name the attention that they compute (``encoder_attention``, ``decoder_attention``,
``cross_attention``), and the compiler keeps the names beside its instructions.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass

from experiments.plan.hlo import Instruction, Module, Run

PLACES = ("encoder_attention", "decoder_attention", "cross_attention")

# Kernels by the target of a custom call; the name stack tells Pallas's kernels apart.
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
    """Lists the fused kernels of each place in the program; () where XLA's own operations compute it."""
    counts: dict[str, Counter] = {}
    for run in module.runs():
        place = next((p for p in PLACES if p in run.instruction.scope), None)
        if place is None:
            continue
        kernels, name = counts.setdefault(place, Counter()), fused_attention(run.instruction)
        if name is not None:
            kernels[name, _is_backward(run.instruction)] += run.times
    return {
        place: tuple(Kernel(name, back, times) for (name, back), times in counts[place].items())
        for place in PLACES
        if place in counts
    }


def fused_attention(instruction: Instruction) -> str | None:
    """Returns the name of the attention kernel of a custom call; None for any other instruction."""
    target = instruction.target
    if instruction.opcode != "custom-call":
        return None
    if target.startswith("__cudnn$fmha"):
        return "cuDNN"
    if target in _TARGETS and "attention" in instruction.scope:
        known = re.search(r"splash|flash|ring", instruction.scope)
        return known.group(0) if known else _TARGETS[target]
    return "cpu" if target.startswith("crossattn") else None


def attention_work(run: Run) -> tuple[int, int]:
    """Returns FLOPs of an attention kernel on one device, masks ignored, and its head size; 0, 0 if unknown.

    A forward kernel has two products of 2 T S H for each head; the kernels for derivatives compute the logits
    again and have, together, five.
    """
    arrays = [operand[0] for operand in run.operands if operand]
    floats = [a.sizes for a in arrays if a.dtype[0] in "bf" and len(a.sizes) >= 3]
    if len(floats) < 2:
        return 0, 0
    q, k = floats[:2]
    # Keys are [B S K H] for cuDNN, [.. K S H] for Pallas's kernels.
    keys = k[-3] if run.instruction.target.startswith("__cudnn") else k[-2]
    scope, products = run.instruction.scope, 2
    if _is_backward(run.instruction):
        # Splash has one kernel for dq and one for dk and dv, each of which computes the logits again.
        is_dq = "dq" in scope.rpartition("splash")[2]
        products = 3 if is_dq else 4 if "dkv" in scope else 5
    return products * 2 * math.prod(q) * keys, q[-1]


def _is_backward(instruction: Instruction) -> bool:
    """Tells by the kernel's name, or else by the scope; derivatives also have rematerialised kernels."""
    scope = instruction.scope
    if instruction.target.startswith("__cudnn"):
        return "Backward" in instruction.target
    if kinds := re.findall(r"_(fwd|dq|dkv|bwd)", scope):
        return kinds[-1] != "fwd"
    return "transpose(" in scope and "rematted_computation" not in scope
