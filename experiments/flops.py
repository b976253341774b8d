"""Model FLOPs, by which MFU is measured (Chowdhery et al. 2022, "PaLM", appendix B).

The products and convolutions of the traced forward pass count three times, since the backward pass has two
for each; attention counts whole, whatever its mask hides, and rematerialised products count once.
"""

import math
from collections.abc import Callable
from typing import Any

import jax

from crossattn import use_backend
from crossattn.rows import programs_of
from crossattn.train.config import Task
from experiments.chips import CHIPS, KINDS


def model_flops(task: Task, params: Any, batch: Any, members: int = 0) -> int:
    """Counts the FLOPs of a training step on the whole batch, forward and backward.

    Args:
      task: the task with the loss.
      params: shapes.
      batch: shapes.
      members: runs that are trained as one, by the first axis of both; 0 is one run without that axis.
    """

    def loss(params, batch):
        return task.loss(params, batch, jax.random.key(0))

    first = 1 if members else 0
    unplaced = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[first:], x.dtype), (params, batch)
    )
    # Only this backend has whole products for calls with dropout or weights.
    with use_backend("reference"):
        return 3 * max(members, 1) * products(jax.make_jaxpr(loss)(*unplaced))


def at_peak(task: Task, members: int = 0) -> Callable[[Any, Any], float] | None:
    """Returns (params, batch) -> seconds of a step at the peak of all devices; None for an unknown device."""
    devices = jax.devices()
    chip = CHIPS.get(KINDS.get(devices[0].device_kind, "unknown"))
    if chip is None:
        return None
    peak = len(devices) * chip.flops
    return lambda params, batch: model_flops(task, params, batch, members) / peak


def products(jaxpr: Any) -> int:
    """Counts the FLOPs of products, convolutions and attention in a program, loops as often as they run.

    The longest of a conditional's branches counts; the body of a loop without a known end counts once.
    """
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            total += _dot(eqn)
        elif eqn.primitive.name == "conv_general_dilated":
            total += _convolution(eqn)
        elif eqn.primitive.name == "attend":
            total += _attention(eqn)
        elif eqn.primitive.name == "cond":
            total += max(products(branch) for branch in eqn.params["branches"])
        else:
            times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            total += times * sum(products(inner) for inner in programs_of(eqn))
    return total


def _dot(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left, (out,) = eqn.invars[0].aval.shape, eqn.outvars
    return 2 * math.prod(out.aval.shape) * math.prod(left[i] for i in contracted)


def _convolution(eqn: Any) -> int:
    """Counts 2 * outputs * places of the window * input features / groups, padding too."""
    kernel, out = eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
    outputs = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2 * math.prod(out) * math.prod(kernel) // outputs


def _attention(eqn: Any) -> int:
    q, k, v = (x.aval.shape for x in eqn.invars[:3])  # [B T N H], [B S K H], [B S K Hv]
    return 2 * math.prod(q[:-1]) * k[-3] * (q[-1] + v[-1])
