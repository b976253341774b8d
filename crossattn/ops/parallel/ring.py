"""Ring attention: queries, keys and values split over devices, keys and values travelling round.

Each device keeps its queries and merges what it reads of each block that comes by. The backward pass
sends the blocks round again and computes each part anew, so that a device never holds more of the
memory than two blocks; the gradients of a block travel with it.

Under a causal mask a device late in the ring reads more than an early one; blocks are not reordered to
even that out (Brandon et al. 2023, "Striped Attention").

Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers"; the backward pass, Dao et al.
2022, "FlashAttention", section B.2.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from crossattn.ops import derivative
from crossattn.ops.attend import run
from crossattn.ops.call import by_query
from crossattn.ops.derivative import Derivative
from crossattn.ops.masks import Mask, slices
from crossattn.ops.parallel.merge import base_of, merge, weight_of
from crossattn.ops.promotion import widened

# q [*B T N H], k [*B S K H], v [*B S K Hv], bias [*#B #N #T #S'] of all keys S' or None, traced numbers.
Operands = tuple[Any, Any, Any, Any, dict[str, Any]]


@dataclass(frozen=True)
class Setting:
    """Static part of a call: the mesh axis, its size, the backend, plain numbers."""

    axis: str
    devices: int
    backend: str | None
    numbers: tuple[tuple[str, Any], ...]

    def attend(self, q, k, v, mask: Mask, **options) -> Any:
        """Attends to one part, in float32 at least: rounding is for the whole."""
        options |= dict(self.numbers)
        ran = run(q, k, v, mask, self.backend, return_lse=True, wide=True, **options)
        return ran.attended.out, ran.attended.lse

    def source(self, step) -> Any:
        """Returns the device whose block is here after so many steps."""
        return (jax.lax.axis_index(self.axis) - step) % self.devices

    def pass_on(self, blocks: Any) -> Any:
        """Sends every block to the next device."""
        round_ = [(i, (i + 1) % self.devices) for i in range(self.devices)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, round_), blocks)


def attend_ring(setting: Setting, operands: Operands, mask: Mask) -> Any:
    """Computes output [*B T N Hv] and log-sum-exp [*B N T] of this device's queries, inside ``shard_map``.

    The mask's arrays, and the bias, are of this device's queries and of all keys.
    """
    *arrays, numbers = operands
    numbers = jax.tree.map(lambda x: x.astype(widened(x.dtype)), numbers)
    # Apart, because JAX puts placeholders of its own into what it differentiates.
    terms, form = jax.tree.flatten(mask)
    output = _ring(setting, form, (*arrays, numbers), terms)
    out, lse = output
    return out.astype(operands[0].dtype), lse


def _ring(setting: Setting, form: Any, operands: Operands, terms: list[Any]) -> Any:
    """Computes ``_round``, differentiably."""

    def run(operands, terms):
        return _round(setting, operands, jax.tree.unflatten(form, terms))

    return derivative.call(
        "ring attention", run, partial(_ring_jvp, setting, form), operands, terms
    )


def _round(setting: Setting, operands: Operands, mask: Mask) -> Any:
    q, k, v, bias, numbers = operands

    def read(merged, block, step):
        return merge(*merged, *_part(setting, mask, step, (q, *block, bias, numbers)))

    def turn(carry, step):
        merged, block = carry
        return (read(merged, block, step), setting.pass_on(block)), None

    rows = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    nothing = jnp.zeros((*q.shape[:-1], v.shape[-1]), widened(q.dtype)), jnp.full(rows, -jnp.inf)
    last = setting.devices - 1
    (merged, block), _ = jax.lax.scan(turn, (nothing, (k, v)), jnp.arange(last))
    return read(merged, block, last)


def _part(setting: Setting, mask: Mask, step, operands: Operands) -> Any:
    """Attends from this device's queries to the block that is here."""
    q, k, v, bias, numbers = operands
    T, S = q.shape[-3], k.shape[-3]
    block = (setting.source(step) * S, S)
    local = slices.part(mask, keys=block)
    local = slices.shift(local, first_query=jax.lax.axis_index(setting.axis) * T)
    if bias is not None:
        bias = slices.cut_axis(bias, slices.matrix_axes(bias)[1], block)
    return setting.attend(q, k, v, local, bias=bias, **numbers)


def _ring_jvp(setting: Setting, form: Any, primals, tangents) -> Any:
    whole: Any = _ring(setting, form, *primals)
    at = (*primals, whole)
    return whole, derivative.linear(_derivative(setting, form), at, tangents[0], whole)


def _derivative(setting: Setting, form: Any) -> Derivative:
    """Returns the derivative of ``_ring``; the backward pass goes round the ring again."""

    def forward(residuals, tangents):
        operands, terms, _ = residuals
        mask = jax.tree.unflatten(form, terms)
        return jax.jvp(lambda given: _round(setting, given, mask), (operands,), (tangents,))[1]

    def backward(residuals, cotangents):
        operands, terms, whole = residuals
        return _back(setting, operands, jax.tree.unflatten(form, terms), whole, cotangents)

    return Derivative(forward, backward, forward)


def _back(setting: Setting, operands: Operands, mask: Mask, whole: Any, cotangents: Any) -> Any:
    q, k, v, bias, numbers = operands

    def add(sums, block, step):
        """Adds the gradients of one part: of what stays here, and of the block."""
        operands = (q, *block, bias, numbers)
        output, pull = jax.vjp(partial(_part, setting, mask, step), operands)
        (output,) = pull(_of_part(output, whole, cotangents))
        return jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, output)

    def turn(carry, step):
        block, (dq, dk, dv, *rest) = carry
        dq, dk, dv, *rest = add((dq, dk, dv, *rest), block, step)
        block, dk, dv = setting.pass_on((block, dk, dv))
        return (block, (dq, dk, dv, *rest)), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, widened(x.dtype)), operands)
    last = setting.devices - 1
    (block, sums), _ = jax.lax.scan(turn, ((k, v), zeros), jnp.arange(last))
    dq, dk, dv, *rest = add(sums, block, last)
    dk, dv = setting.pass_on((dk, dv))
    return jax.tree.map(lambda total, x: total.astype(x.dtype), (dq, dk, dv, *rest), operands)


def _of_part(part: Any, whole: Any, cotangents: Any) -> Any:
    """Returns cotangents of a part's output and log-sum-exp from those of the whole's."""
    (part_out, part_lse), (out, lse), (d_out, d_lse) = part, whole, cotangents
    weight = weight_of(part_lse, base_of(lse))
    off = jnp.moveaxis(((part_out - out) * d_out).sum(-1), -1, -2)
    d_part_lse = jnp.where(part_lse == -jnp.inf, 0, weight * (off + d_lse))
    return (by_query(weight) * d_out).astype(part_out.dtype), d_part_lse
