"""``attend`` where its operands lie: on a mesh each device computes its own part.

What is split by batch, heads or queries stays so. Keys and values that are split along their length are
read where they are and the devices' outputs merged by log-sum-exp; where queries are split over the same
mesh axis, keys and values are gathered (``attend_sharded`` sends them round a ring instead).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from crossattn.ops.backends import Ran
from crossattn.ops.call import AttentionOutput, Call, Form, Names, named, taken_apart
from crossattn.ops.masks import Mask, slices
from crossattn.ops.parallel import placement
from crossattn.ops.parallel.merge import merge_over
from crossattn.ops.parallel.placement import Split
from crossattn.ops.promotion import widened

# So many kernels of one attention, at most, for queries of as many places.
_MOST_PLACES = 16

Strategy = Literal["merge", "ring"]


@dataclass(frozen=True)
class Plan:
    """Strategy of attention, and the bytes that each device sends in one forward pass either way."""

    strategy: Strategy
    merge_bytes: int
    ring_bytes: int


def attend(run: Callable[[Call], Ran], mesh: Any, call: Call) -> Ran:
    """Runs a call on each device's part of a mesh; on the whole without one."""
    if mesh is None:
        return run(call)
    arrays, form = taken_apart(call)
    return _attend(run, mesh, form, arrays)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _attend(run: Callable[[Call], Ran], mesh: Any, form: Form, arrays: list[Any]) -> Ran:
    call = form.call(arrays)
    split = split_of(mesh, call.q, call.k, call.v)
    # Which weights are dropped goes by their place in the whole.
    if split.nested or call.dropout_key is not None:
        return _whole(run, split.without("S"), form, arrays)
    try:
        return _in_parts(run, split, form, arrays)
    except NotImplementedError:
        if "S" not in split.axes:
            raise
    # Without a log-sum-exp, or for weights, all keys must be in one place.
    return _in_parts(run, split.without("S"), form, arrays)


def plan(q: Any, k: Any, v: Any, devices: int) -> Plan:
    """Returns the strategy that moves fewer bytes; in doubt the merge, whose work is even under any mask.

    Merging gathers the queries, then reduces one float32 output, peak and sum for each query and head
    over the devices (a reduction sends what it reduces twice). The ring sends all keys and values but
    the device's own.

    Args:
      q: [*B T N H]; only shapes and dtypes are looked at, as of k [*B S K H] and v [*B S K Hv].
      k: keys.
      v: values.
      devices: how many devices hold a part of the memory each.
    """
    rows = math.prod(q.shape[:-1])
    gathered = rows * q.shape[-1] * jnp.dtype(q.dtype).itemsize
    reduced = 4 * rows * (v.shape[-1] + 2)
    memory = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in (k, v))
    merged = (devices - 1) * (gathered + 2 * reduced) // devices
    sent = (devices - 1) * memory // devices
    return Plan("merge" if merged <= sent else "ring", merged, sent)


def split_of(mesh: Any, q, k, v) -> Split:
    """Returns the mesh axes that split batch, heads, queries and keys.

    If the table would split queries and keys over the same devices, it splits those that send less:
    queries, whose devices gather the keys, or keys, whose devices merge what they found.
    """
    split = Split.of(mesh, (q, k, v), names_of(q, k, v))
    axes = split.axes.get("T", ())
    ruled = bool(axes) and set(axes) <= set(split.automatic)
    if ruled and k.shape[-3] % split.parts("T") == 0:
        if plan(q, k, v, split.parts("T")).strategy == "merge":
            others = {name: own for name, own in split.axes.items() if name != "T"}
            return replace(split, axes=others | {"S": axes})
    return split


def names_of(q, k, v) -> tuple[Names, Names, Names]:
    """Returns the names of the operands' axes."""
    return named(q, "T", "N", None), named(k, "S", "N", None), named(v, "S", "N", None)


def heads_of(split: Split, q, k, v) -> tuple[Split, Any, Any]:
    """Returns keys and values of which each device has the heads that its query heads read."""
    parts, K = split.parts("N"), k.shape[-2]
    if K in (1, q.shape[-2]) or K % parts == 0:
        return split, k, v
    if parts % K:
        return split.without("N"), k, v
    each = split.without("N")
    whole = (each.put(x, named(x, "S", "N", None)) for x in (k, v))
    k, v = (jnp.repeat(x, parts // K, axis=-2) for x in whole)
    return split, k, v


def _whole(run: Callable, split: Split, form: Form, arrays: list[Any]) -> Ran:
    """Runs the whole at once, which XLA cuts."""
    split, *keys = heads_of(split, *arrays[:3])
    ran: list[Ran] = []

    def everything(arrays: list[Any]) -> AttentionOutput:
        ran.append(run(form.call(arrays)))
        return ran[-1].attended

    arrays = [arrays[0], *keys, *arrays[3:]]
    output = split.run_whole(everything, arrays, _named_output(form.call(arrays), split))
    return replace(ran[-1], attended=output)


def _in_parts(run: Callable, split: Split, form: Form, arrays: list[Any]) -> Ran:
    """Runs each device's own part; merges outputs where it has a part of the keys."""
    split, *keys = heads_of(split, *arrays[:3])
    arrays = [arrays[0], *keys, *arrays[3:]]
    merged, ran = split.axes.get("S"), []
    if merged and form.call(arrays).return_weights:
        raise NotImplementedError("no device has the weights of all keys")

    def part(arrays: list[Any]) -> AttentionOutput:
        call = form.call(arrays)
        if merged:
            ran.append(_merged(run, split, call))
        elif call.mask is not None and "T" in split.axes:
            ran.append(_by_place(run, split, call))
        else:
            ran.append(run(call))
        attended = ran[-1].attended
        if call.return_rows and not merged and attended.rows is None:
            # Of a backend that does not reuse them; every device has some.
            rows = *call.q.shape[:-3], call.q.shape[-2], call.q.shape[-3]
            nothing = jnp.zeros(rows, widened(call.q.dtype))
            attended = attended._replace(
                rows=tuple(placement.alike((nothing, nothing, call.q))[:2])
            )
        return attended

    names = [Names() if name is None else name for name in form.names(arrays)]
    output = split.run(part, (arrays,), (names,), _named_output(form.call(arrays), split))
    return replace(ran[-1], attended=output)


def _named_output(call: Call, split: Split) -> AttentionOutput:
    out = named(call.q, "T", "N", None)
    rows = Names((*out[:-3], "N", "T"))
    return AttentionOutput(
        out,
        Names((*rows, None)) if call.return_weights else None,
        rows if call.return_lse else None,
        (rows, rows) if call.return_rows and "S" not in split.axes else None,
    )


def _merged(run: Callable, split: Split, call: Call) -> Ran:
    """Runs each device's own keys and merges the outputs."""
    (T, S), mask = call.lengths, call.mask
    if mask is not None:
        mask = slices.shift(mask, split.first("T", T), split.first("S", S))
    # Rounding is for the whole, as is what is known.
    own = dict(mask=mask, return_lse=True, return_rows=False, known=None, wide=True)
    ran = run(replace(call, **own))
    out, lse = merge_over(ran.attended.out, ran.attended.lse, split.axes["S"])
    out = out if call.wide else out.astype(call.q.dtype)
    return replace(ran, attended=AttentionOutput(out, None, lse if call.return_lse else None))


def _by_place(run: Callable, split: Split, call: Call) -> Ran:
    """Runs each device's own queries, with the mask shifted to their place.

    A kernel that goes by index must know the place when it is compiled: then every device has the kernels
    of all places, and runs its own.
    """
    mask = Mask(()) if call.mask is None else call.mask
    T, parts = call.q.shape[-3], split.parts("T")

    def at(first: Any) -> Ran:
        return run(replace(call, mask=slices.shift(mask, first)))

    first = split.first("T", T)
    traced, known = (jax.eval_shape(partial(at, place)) for place in (first, T))
    if (traced.backend, traced.skipped) == (known.backend, known.skipped) or parts > _MOST_PLACES:
        return at(first)
    places = [lambda place=place: at(place * T).attended for place in range(parts)]
    return replace(known, attended=jax.lax.switch(jax.lax.axis_index(split.axes["T"]), places))
