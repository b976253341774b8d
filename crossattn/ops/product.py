"""Products of a few rows with a matrix, as decoding makes them, by a kernel of our own on CPU.

XLA's copies the whole matrix into another layout on each call, which for few rows takes longer than
the product. Here laying out is a call of its own, which XLA takes out of a loop of decoding steps. One
row needs no other layout; XLA reads the matrix at half of what memory gives, and with one thread.
Wherever the kernel does not serve, ``dot_general`` is ``jax.lax.dot_general``.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossattn.ops import backends, derivative, native
from crossattn.types import Array, Float

_ROWS = (1, *range(12, 97))
_SMALLEST = 1 << 14
"""Elements of a matrix below which XLA is as fast."""
_PANEL = 64
"""Columns that a panel of the kernel has, or a multiple of them."""


def dot_general(
    lhs: Array,
    rhs: Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    **options: Any,
) -> Array:
    """Computes ``jax.lax.dot_general``, for ``nnx.LinearGeneral`` and the like; float32 by the kernel.

    The kernel takes over where the trailing axes of ``lhs`` meet the leading ones of ``rhs``, or the
    trailing ones, and ``lhs`` has few rows.
    """
    (left, right), (batch, _) = dimension_numbers
    count = len(left)
    rows = lhs.shape[: lhs.ndim - count]
    asked = (precision, preferred_element_type)
    transposed = _which(lhs, rhs, dimension_numbers, asked)
    if transposed is None:
        kept = {name: value for name, value in options.items() if value is not None}
        if _one_axis_of_rows(lhs, rhs, left, batch):
            lhs = lhs.reshape(math.prod(rows), *lhs.shape[lhs.ndim - count :])
            dimension_numbers = (range(1, count + 1), right), ((), ())
        out = jax.lax.dot_general(lhs, rhs, dimension_numbers, *asked, **kept)
        return out if lhs.ndim == len(rows) + count else out.reshape(*rows, *out.shape[1:])
    shape = rhs.shape[:-count] if transposed else rhs.shape[count:]
    inner = int(np.prod(lhs.shape[-count:]))
    matrix = rhs.reshape((-1, inner) if transposed else (inner, -1))
    out = _product(lhs.reshape(-1, inner), matrix, transposed)
    return out.reshape(*lhs.shape[:-count], *shape)


def _one_axis_of_rows(lhs: Array, rhs: Array, left: Sequence[int], batch: Sequence[int]) -> bool:
    """Returns whether the leading axes of ``lhs`` become one.

    Of several, XLA's CPU compiler can lay out the cotangent anew for the gradient of ``rhs``, which takes
    longer than the product. On a mesh they stay apart, as they may be split over different devices.
    """
    if not _trailing(lhs, left, batch) or lhs.ndim - len(left) < 2:
        return False
    meshes = (jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in (lhs, rhs)))
    return backends.chosen() in (None, "cpu") and all(
        mesh.empty or mesh.size == 1 for mesh in meshes
    )


def _trailing(lhs: Array, left: Sequence[int], batch: Sequence[int]) -> bool:
    """Returns whether the trailing axes of ``lhs`` are multiplied, and those before them are rows."""
    return not batch and tuple(left) == tuple(range(lhs.ndim - len(left), lhs.ndim))


def _which(lhs: Array, rhs: Array, dimension_numbers: Any, asked: tuple) -> bool | None:
    """Returns whether the kernel reads ``rhs`` transposed; None where it does not serve."""
    (left, right), (batch, _) = dimension_numbers
    right, count = tuple(right), len(left)
    if not _trailing(lhs, left, batch):
        return None
    if right not in (tuple(range(count)), tuple(range(rhs.ndim - count, rhs.ndim))):
        return None
    if {lhs.dtype, rhs.dtype} != {jnp.dtype("float32")} or asked[1] not in (None, jnp.float32):
        return None
    if backends.chosen() not in (None, "cpu"):
        return None
    rows = lhs.size // max(1, int(np.prod(lhs.shape[lhs.ndim - count :])))
    if asked[0] is not None or rows not in _ROWS or rhs.size < _SMALLEST:
        return None
    return right != tuple(range(count))


def _product(
    x: Float[Array, "M K"], w: Float[Array, "..."], transposed: bool
) -> Float[Array, "M N"]:
    """Multiplies by the kernel, where the target has it."""
    run, rule = partial(_lowered, transposed), partial(_derivative, transposed)
    return derivative.call("CrossattnProduct", run, rule, x, w)


def _lowered(transposed: bool, x, w):
    try:
        native.load()
    except NotImplementedError:
        return _plain(transposed)(x, w)
    return _call(transposed)(x, w)


def _derivative(transposed, primals, tangents):
    (x, w), (d_x, d_w) = primals, tangents
    return _product(x, w, transposed), _plain(transposed)(d_x, w) + _plain(transposed)(x, d_w)


def _plain(transposed: bool):
    return lambda x, w: x @ (w.T if transposed else w)


def _call(transposed: bool):
    @jax.custom_batching.custom_vmap
    def product(x, w):
        inner, columns = w.shape[::-1] if transposed else w.shape
        panels = jax.ShapeDtypeStruct((-(-columns // _PANEL) * _PANEL, inner), jnp.float32)
        out = jax.ShapeDtypeStruct((x.shape[0], columns), jnp.float32)
        if x.shape[0] == 1:
            return jax.ffi.ffi_call("CrossattnRow", out)(x, w, transposed=transposed)
        packed = jax.ffi.ffi_call("CrossattnPack", panels)(w, transposed=transposed)
        return jax.ffi.ffi_call("CrossattnProduct", out)(x, packed)

    @product.def_vmap
    def batched(axis_size, in_batched, x, w):
        del axis_size
        axes = tuple(0 if each else None for each in in_batched)
        return jax.vmap(_plain(transposed), axes)(x, w), True

    return product
