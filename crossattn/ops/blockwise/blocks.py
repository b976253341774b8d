"""The matrix [T, S] in blocks: how large they are, which hold something to read, and a loop over those.

Attention in memory linear in length, and the statistics of its weights, are such loops; what a block
holds is in ``scores.py``. Block sizes come from a table that ``experiments/bench/block_sizes.py`` measures.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from crossattn.ops import platforms
from crossattn.ops.call import is_symbolic
from crossattn.ops.integers import HIGHEST, LOWEST
from crossattn.ops.masks import Mask
from crossattn.ops.masks.ranges import Limits, Ranges, ranges
from crossattn.types import Array, Bool, Int

# Queries and keys of a block, by platform and by what a mask lets a loop skip: "nothing", "half" (one end
# of each query's row, as a causal mask does), "most" (both ends, or places anywhere). On CPU, forward and
# with backward, 512 x 256 was faster than 64 x 64 by up to 1.8 times, and heads of 32, 64 and 128 agree but
# for the backward pass with heads of 32; where a mask hides much, small blocks skip more of it. On
# accelerators few steps of the loops count (those sizes are estimates, not measured).
_SIZES = {
    "cpu": {"nothing": (512, 256), "half": (512, 256), "most": (64, 64)},
    "gpu": dict.fromkeys(("nothing", "half", "most"), (512, 1024)),
    "tpu": dict.fromkeys(("nothing", "half", "most"), (512, 1024)),
}
# The logits of all examples' and heads' blocks together.
_MOST_LOGITS = {"cpu": 1 << 22, "gpu": 1 << 26, "tpu": 1 << 26}
# With fewer queries or keys large blocks gain nothing, nor did more of the other side in them.
_SHORT = 256
# With a smaller T times S, large blocks lose more on the diagonal of a causal mask than they gain.
_LONG = 1 << 22
_LEAST, _MOST_BLOCKS = 64, 1024


class Plan(NamedTuple):
    """Sizes of a matrix of ``T`` queries and ``S`` keys and of its blocks, ``queries`` by ``keys``."""

    T: int
    S: int
    queries: int
    keys: int

    @property
    def shape(self) -> tuple[int, int]:
        """Number of blocks along queries and keys."""
        return -(-self.T // self.queries), -(-self.S // self.keys)


class Visits(NamedTuple):
    """Blocks of keys to visit for each block of queries: the first ``count`` of ``order``."""

    order: Int[Array, "I J"]
    count: Int[Array, " I"]


class Span(NamedTuple):
    """Neighbouring queries or keys.

    The last span of a length that is not a multiple reaches back into the one before it; ``fresh``
    says which of its members are new, None that all are.
    """

    start: Any
    indices: Int[Array, " X"]
    fresh: Bool[Array, " X"] | None

    def of(self, x: Any, axis: int) -> Any:
        """Returns these members of an axis; all of an axis of size 1."""
        if x.shape[axis] == 1:
            return x
        return jax.lax.dynamic_slice_in_dim(x, self.start, len(self.indices), axis)

    def put(self, x: Array, new: Array, axis: int) -> Array:
        """Returns ``x`` with the fresh members written."""
        if self.fresh is not None:
            fresh = self.fresh.reshape(-1, *(1,) * (-axis - 1))
            new = jnp.where(fresh, new, self.of(x, axis))
        return jax.lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), self.start, axis)

    def add(self, x: Array, new: Array, axis: int) -> Array:
        """Returns ``x`` with ``new`` added to these members."""
        total = self.of(x, axis) + new
        return jax.lax.dynamic_update_slice_in_dim(x, total, self.start, axis)


def plan(T: int, S: int, rows: int, mask: Mask | None = None, platform: str | None = None) -> Plan:
    """Returns block sizes for ``rows`` matrices (examples times heads) [T, S] under a mask, on a platform.

    Lengths are cut evenly, so that no block is nearly empty. With many rows blocks shrink; very long
    sequences have larger ones, because what is kept for each block grows with their product.
    """
    platform = platform or platforms.platform()
    skipped = _skipped(mask, T, S)
    if min(T, S) < _SHORT or skipped == "half" and T * S < _LONG:
        skipped = "most"
    queries, keys = _SIZES[platform][skipped]
    area = queries * keys
    queries, keys = min(queries, T), min(keys, S)
    if skipped == "nothing":  # a side of less than a block leaves room for more of the other
        queries, keys = min(T, area // keys), min(S, area // queries)
    rows = 1 if is_symbolic(rows) else rows
    while rows * queries * keys > _MOST_LOGITS[platform] and max(queries, keys) > _LEAST:
        queries, keys = (queries, -(-keys // 2)) if keys > queries else (-(-queries // 2), keys)
    return Plan(T, S, _even(T, max(_LEAST, queries)), _even(S, max(_LEAST, keys)))


def plan_of_symbols(T: Any, S: Any) -> Plan:
    """Returns blocks of a fixed size for unknown lengths, and the lengths that whole blocks fill."""
    size = _LEAST

    def filled(length: Any) -> tuple[Any, int]:
        if is_symbolic(length):
            return -(-length // size) * size, size
        return length, _even(length, size)

    (T, queries), (S, keys) = filled(T), filled(S)
    return Plan(T, S, queries, keys)


def _skipped(mask: Mask | None, T: int, S: int) -> str:
    """Returns how much of the matrix a mask of this structure lets a loop skip; its values may be traced.

    A mask that hides the same keys from every query (lengths, padding) leaves large blocks as good.
    """
    if mask is None:
        return "nothing"
    ends, limits = jax.eval_shape(lambda: _bounds(ranges(mask, T, S)))
    ends = [end is not None and end.shape[-1] > 1 for end in ends]
    if all(ends) or any(limit.shape[-1] > 1 for limit in limits):
        return "most"
    return "half" if any(ends) else "nothing"


def _bounds(bounds: Ranges) -> Any:
    limits = [bound for limits in bounds.limits for bound in (limits.low, limits.high)]
    return (bounds.first, bounds.last), limits


def _even(length: int, size: int) -> int:
    """Returns the size of equal parts of at most ``size``, a multiple of 16 if possible."""
    parts = min(-(-length // size), _MOST_BLOCKS)
    part = -(-length // parts)
    return min(-(-part // 16) * 16, length)


def visits(mask: Mask | None, plan: Plan) -> Visits | None:
    """Returns the blocks with a key that some query of some example may read; None: all of them.

    A block that the mask's intervals and limits cannot rule out is visited, so it may still be empty.
    """
    bounds = None if mask is None else ranges(mask, plan.T, plan.S)
    if bounds is None or (bounds.first is None and bounds.last is None and not bounds.limits):
        return None
    conditions = [_meets_limits(limits, plan) for limits in bounds.limits]
    if bounds.first is not None or bounds.last is not None:
        conditions.append(_meets_interval(bounds.first, bounds.last, plan))
    read = jnp.ones((1, 1), bool)
    for condition in conditions:
        read = read & condition
    read = _of_any(jnp.broadcast_to(read, (*read.shape[:-2], *plan.shape)))
    order = jnp.argsort(~read, axis=-1, stable=True).astype(jnp.int32)
    return Visits(order, read.sum(-1, dtype=jnp.int32))


def _meets_interval(first: Any, last: Any, plan: Plan) -> Bool[Array, "*#B #I J"]:
    """Returns whether a block's keys overlap those between the first and last of its queries."""
    first = jnp.asarray(0 if first is None else first)
    last = jnp.asarray(plan.S if last is None else last)
    empty = first >= last
    first = _by_block(jnp.where(empty, plan.S, first), plan.T, plan.queries).min(-1)
    last = _by_block(jnp.where(empty, 0, last), plan.T, plan.queries).max(-1)
    begin = jnp.arange(plan.shape[1]) * plan.keys
    return (begin < last[..., None]) & (begin + plan.keys > first[..., None])


def _meets_limits(limits: Limits, plan: Plan) -> Bool[Array, "*#B #I J"]:
    """Returns whether the range of a block's key numbers overlaps its queries' limits."""
    empty = limits.low > limits.high
    low = _by_block(jnp.where(empty, HIGHEST, limits.low), plan.T, plan.queries).min(-1)
    high = _by_block(jnp.where(empty, LOWEST, limits.high), plan.T, plan.queries).max(-1)
    numbers = _by_block(limits.numbers, plan.S, plan.keys)
    least, greatest = numbers.min(-1)[..., None, :], numbers.max(-1)[..., None, :]
    return (least <= high[..., None]) & (greatest >= low[..., None])


def _by_block(x: Array, length: int, size: int) -> Array:
    """Returns the members of each span, [*#B #X] -> [*#B blocks size]; [*#B 1 1] if shared by all."""
    if x.shape[-1] == 1:
        return x[..., None]
    starts = jnp.minimum(jnp.arange(0, length, size), length - size)
    return x[..., starts[:, None] + jnp.arange(size)]


@jax.custom_batching.custom_vmap
def _of_any(read: Bool[Array, "*B I J"]) -> Bool[Array, "I J"]:
    """Returns the union over the batch and mapped axes: a shared trip count keeps loops from masking."""
    return read.any(tuple(range(read.ndim - 2)))


@_of_any.def_vmap
def _of_any_mapped(axis_size, in_batched, read):
    return _of_any(read), False


def sweep(
    plan: Plan,
    visits: Visits | None,
    state: Any,
    begin: Callable[[Span], Any],
    step: Callable[[Span, Span, Any, Any], tuple[Any, Any]],
    end: Callable[[Span, Any, Any], Any],
) -> Any:
    """Returns the state after all blocks that hold something to read.

    Args:
      plan: how the matrix is cut.
      visits: which blocks are visited.
      state: a pytree that all blocks change in turn.
      begin: from a span of queries, a carry for it.
      step: from spans of queries and keys, carry and state, both anew.
      end: from a span of queries, its carry and the state, the state.
    """

    def one_row(i: Any, state: Any) -> Any:
        queries = _span(i, plan.queries, plan.T)

        def one_block(n: Any, carried: Any) -> Any:
            j = n if visits is None else visits.order[i, n]
            return step(queries, _span(j, plan.keys, plan.S), *carried)

        count = plan.shape[1] if visits is None else visits.count[i]
        carry, state = jax.lax.fori_loop(0, count, one_block, (begin(queries), state))
        return end(queries, carry, state)

    return jax.lax.fori_loop(0, plan.shape[0], one_row, state)


def _span(i: Any, size: int, length: int) -> Span:
    start = jnp.minimum(i * size, length - size)
    indices = start + jnp.arange(size)
    return Span(start, indices, None if length % size == 0 else indices >= i * size)


def whole(length: int) -> Span:
    """Returns one span of everything."""
    return Span(0, jnp.arange(length), None)
