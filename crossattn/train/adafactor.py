"""Adafactor: the second moment of a matrix, stored as means over its rows and over its columns.

The axes of rows and columns are given, not guessed from sizes as optax does: an attention kernel
[embed, heads, head_dim] has columns of two axes, and is factored although no two of its axes are large;
layers stacked for a scan are separate matrices. A mean has the rank of its parameter, with size 1 along the
reduced axes, so the sharding rules of the parameter place it too.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

_LEAST = 128  # rows and columns of a matrix to factor
_EPSILON = 1e-30  # added to squared gradients
_SMALLEST = 1e-3  # least root mean square of a parameter
_DECAY = 0.8


@dataclass(frozen=True)
class Sides:
    """Axes of a parameter.

    Attributes:
      rows: axes of a matrix's rows; () for a parameter that is no matrix.
      columns: axes of a matrix's columns, likewise.
      stacked: axes that count parameters, each of which is scaled separately.
    """

    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    stacked: tuple[int, ...] = ()

    def of_large(self, shape: tuple[int, ...]) -> "Sides":
        """Returns the sides without rows and columns if these are few."""
        sizes = [math.prod(shape[axis] for axis in side) for side in (self.rows, self.columns)]
        factored = bool(self.rows and self.columns) and min(sizes) >= _LEAST
        return self if factored else Sides(stacked=self.stacked)


class FactoredMoments(NamedTuple):
    """Second moments.

    Attributes:
      count: updates made.
      rows: means of squared gradients over columns; for a parameter that is no matrix, its squared gradients.
      columns: means over rows.
    """

    count: Any
    rows: Any
    columns: Any


def scale_by_adafactor(sides: Any) -> optax.GradientTransformation:
    """Scales gradients to steps relative to the size of each parameter, at most about 1.

    sides: a ``Sides`` for each parameter, in the parameters' structure.
    Source: Shazeer and Stern 2018, algorithms 4 and 5, https://arxiv.org/abs/1804.04235, without momentum,
    as in T5.
    """

    def init(params: Any) -> FactoredMoments:
        def rows(own: Sides, x: jax.Array) -> jax.Array:
            return _zeros(x.shape, own.of_large(x.shape).columns)

        def columns(own: Sides, x: jax.Array) -> jax.Array:
            return _zeros(x.shape, own.of_large(x.shape).rows or tuple(range(x.ndim)))

        return FactoredMoments(
            count=jnp.zeros((), jnp.int32),
            rows=jax.tree.map(rows, sides, params),
            columns=jax.tree.map(columns, sides, params),
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, FactoredMoments]:
        if params is None:
            raise ValueError("adafactor needs the parameters; call update(grads, state, params)")
        past = 1.0 - (state.count + 1.0) ** -_DECAY

        def moments(own: Sides, grad: jax.Array, rows: jax.Array, columns: jax.Array) -> tuple:
            own, square = own.of_large(grad.shape), jnp.square(grad.astype(jnp.float32)) + _EPSILON
            if not own.rows:
                return past * rows + (1.0 - past) * square, columns
            by_row, by_column = (
                square.mean(axes, keepdims=True) for axes in (own.columns, own.rows)
            )
            return past * rows + (1 - past) * by_row, past * columns + (1 - past) * by_column

        both = jax.tree.map(moments, sides, updates, state.rows, state.columns)
        rows, columns = (jax.tree.map(lambda _, pair, i=i: pair[i], sides, both) for i in (0, 1))
        steps = jax.tree.map(_step, sides, updates, rows, columns, params)
        return steps, FactoredMoments(optax.safe_increment(state.count), rows, columns)

    return optax.GradientTransformation(init, update)


def _zeros(shape: tuple[int, ...], over: tuple[int, ...]) -> jax.Array:
    return jnp.zeros([1 if axis in over else size for axis, size in enumerate(shape)], jnp.float32)


def _step(
    own: Sides, grad: jax.Array, rows: jax.Array, columns: jax.Array, param: jax.Array
) -> jax.Array:
    """Divides the gradient by the root of its second moment, clips it, and scales it by the parameter."""
    own = own.of_large(grad.shape)
    axes = tuple(axis for axis in range(grad.ndim) if axis not in own.stacked)
    step = grad * jax.lax.rsqrt(rows)
    if own.rows:
        step = step * jnp.sqrt(rows.mean(own.rows, keepdims=True)) * jax.lax.rsqrt(columns)
    step = step / jnp.maximum(1.0, _size(step, axes))
    return (step * jnp.maximum(_size(param, axes), _SMALLEST)).astype(grad.dtype)


def _size(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Returns the root mean square over some axes."""
    return jnp.sqrt(jnp.square(x.astype(jnp.float32)).mean(axes, keepdims=True))
