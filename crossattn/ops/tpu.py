"""Common parts of attention kernels for TPUs: blocks of whole tiles that fit a core's vector memory.

A kernel holds two of each block that comes and goes, what it sums up, and the logits
of one block; what does not fit is an error of the compiler, so it is counted here first.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from crossattn.ops import platforms
from crossattn.ops.masks.tiles import Ids
from crossattn.types import Array, Float

LANES = 128
"""Queries and keys are padded to multiples of it, and memory holds heads so."""

Blocks = tuple[tuple[int, int], ...]
"""Queries and keys of a block, for the output, for dq, and for dk and dv."""

_WIDEST = 512  # queries or keys of a block
_HELD = 2**26  # bytes of matrices that are made at a time
_MEMORY = 16 * 2**20  # bytes that a kernel may have, unless the compiler is told otherwise


def refuse_elsewhere() -> None:
    """Holds a kernel to one TPU's own arrays.

    Raises:
      NotImplementedError: it is lowered for something else.
    """
    if platforms.platform() != "tpu":
        raise NotImplementedError(f"it runs on TPU, not on {platforms.platform()}")
    if not platforms.one_device():
        raise NotImplementedError(
            "XLA cannot partition it over several devices whose mesh crossattn.axes.RULES does not know"
        )


def blocks(T: int, S: int, H: int, Hv: int, dtype: Any, exact: bool, pairs: int = 0) -> Blocks:
    """Returns the largest blocks of padded lengths that fit, for each of the three kernels.

    Args:
      T: queries.
      S: keys.
      H: head size of queries and keys.
      Hv: of values.
      dtype: of all three.
      exact: whether products keep the digits of float32.
      pairs: bytes that come or go with a query and key, of a bias or a matrix.

    Raises:
      NotImplementedError: even the smallest do not fit.
    """
    size = jnp.dtype(dtype).itemsize
    sizes = [(t, s) for t in _divisors(T) for s in _divisors(S)]
    found = []
    for of_kernel in (_of_output, _of_queries, _of_keys):
        numbers = (padded(H), padded(Hv), size, exact, pairs)
        fits = [one for one in sizes if of_kernel(*one, *numbers) <= _MEMORY]
        if not fits:
            raise NotImplementedError(
                f"heads of size {max(H, Hv)} in {jnp.dtype(dtype).name} do not fit a TPU core's vector memory"
            )
        found.append(max(fits, key=lambda one: (one[0] * one[1], one[1])))
    return tuple(found)


def _divisors(length: int) -> list[int]:
    return [n for n in range(LANES, _WIDEST + 1, LANES) if length % n == 0]


def _of_output(t: int, s: int, H: int, Hv: int, size: int, exact: bool, pairs: int) -> int:
    given, sums = t * H + s * (H + Hv), 4 * t * (Hv + 2 * LANES)
    moved = size * (given + t * Hv) + _rows(t, s) + t * s * pairs
    return 2 * moved + sums + _work(t, s, given, t * Hv, 3, exact)


def _of_queries(t: int, s: int, H: int, Hv: int, size: int, exact: bool, pairs: int) -> int:
    given, sums = (t + s) * (H + Hv), 4 * t * H
    moved = size * (given + t * H) + _rows(t, s) + 2 * t * s * pairs
    return 2 * moved + sums + _work(t, s, given, t * H, 4, exact)


def _of_keys(t: int, s: int, H: int, Hv: int, size: int, exact: bool, pairs: int) -> int:
    given, sums = (t + s) * (H + Hv), 4 * s * (H + Hv)
    moved = size * (given + s * (H + Hv)) + _rows(t, s) + t * s * pairs
    return 2 * moved + sums + _work(t, s, given, s * (H + Hv), 4, exact)


def _rows(t: int, s: int) -> int:
    """Counts segment numbers, first and last keys, peaks and sums, each along all lanes."""
    return 4 * 3 * LANES * (t + s)


def _work(t: int, s: int, given: int, made: int, matrices: int, exact: bool) -> int:
    """Counts logits and what is made of them; exact products are of operands in parts."""
    return 4 * matrices * t * s + (8 * given + 4 * made if exact else 0)


def padded(size: int) -> int:
    """Returns the next multiple of ``LANES``."""
    return -(-size // LANES) * LANES


def precision(exact: bool) -> Any:
    """Sets the precision of a kernel's products: all digits of float32, or bfloat16 in one pass.

    The caller's own setting may be one that Mosaic cannot compile for bfloat16.
    """
    return jax.default_matmul_precision("highest" if exact else "default")


def scaled(q: Array, scale: Any) -> Array:
    """Scales queries, as kernels do not: a power of two is exact, anything else is kept in float32."""
    if isinstance(scale, (int, float)) and scale and abs(math.frexp(scale)[0]) == 0.5:
        return q * jnp.asarray(scale, q.dtype)
    return q.astype(jnp.float32) * scale


def heads_first(x: Float[Array, "*B X N H"], batch: tuple[int, ...]) -> Array:
    """Returns [B N X' H], padded with zeros."""
    x = jnp.moveaxis(x.reshape(math.prod(batch), *x.shape[-3:]), -2, -3)
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[-2] % LANES), (0, 0)))


def segment_ids(
    ids: Ids, T: int, S: int, batch: tuple[int, ...], always: bool = True
) -> tuple[Array, Array] | None:
    """Returns each example's numbers, [B T'] and [B S'], 0 in the padding; None where they hide nothing.

    With ``always`` even if only the padding needs them.
    """
    if ids.q is None or ids.k is None:
        if padded(S) == S or not always:
            return None
        return segment_ids(Ids(jnp.ones((T,), jnp.int32), jnp.ones((S,), jnp.int32)), T, S, batch)

    def of_each(x: Array) -> Array:
        x = jnp.broadcast_to(x, (*batch, x.shape[-1])).reshape(math.prod(batch), -1)
        return jnp.pad(x, ((0, 0), (0, -x.shape[-1] % LANES)))

    return of_each(ids.q), of_each(ids.k)


def with_lse(out: Array, v: Array, d_out: Array, d_lse: Array) -> tuple[Array, Array, Array]:
    """Returns output, values and cotangent whose backward pass has the gradient of both.

    The logits' gradient is P (dP - sum(out d_out) + d_lse): one more column changes that sum, and of the
    values, where it is 0, nothing.
    """
    column = out.astype(jnp.float32), -d_lse[..., None].astype(jnp.float32)
    values = jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, 1)])
    ones = jnp.ones_like(d_out[..., :1])
    return jnp.concatenate(column, -1), values, jnp.concatenate([d_out, ones], -1)


def in_parts(
    function: Callable[..., Any], operands: tuple, held: int, like: Array | None = None
) -> tuple[Any, Any]:
    """Runs a function of a few examples at a time, of which it makes matrices.

    Args:
      function: gives what each example has, and a sum over them in the shape of ``like``, or None.
      operands: arrays with an example a row, or one row that all examples share; queries first.
      held: bytes that it makes of each example.
      like: of the sum.
    """
    examples = operands[0].shape[0]
    fits = [n for n in range(1, examples + 1) if examples % n == 0 and n * held <= _HELD]
    size = max(fits, default=1)
    if size == examples:
        return function(*operands)
    leaves, form = jax.tree.flatten(operands)
    own = [x.shape[0] == examples for x in leaves]
    parts = [x.reshape(-1, size, *x.shape[1:]) for x, o in zip(leaves, own, strict=True) if o]

    def step(sums, part):
        part = iter(part)
        given = [next(part) if o else x for x, o in zip(leaves, own, strict=True)]
        results, more = function(*form.unflatten(given))
        return None if like is None else sums + more, results

    sums, results = jax.lax.scan(step, None if like is None else jnp.zeros_like(like), parts)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results), sums
