"""Modules on a mesh with Explicit axes: a call makes the axes Auto, so that XLA shards intermediate arrays.

JAX refuses products, look-ups and sums on Explicit axes if their operands leave the sharding open.
``on_any_mesh`` enters Auto axes for one call: the batch axes of its results are split as those of the first
array that it gets.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from crossattn.nn.edits import hand_out, with_handed_out
from crossattn.ops.parallel import placement
from crossattn.ops.promotion import as_written

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def on_any_mesh(call: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorates a function of modules and arrays for operands on any mesh; it runs ``as_written``."""

    @functools.wraps(call)
    @as_written
    def placed(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_module)
        mesh = next(filter(None, map(_mesh, leaves)), None)
        if mesh is None:
            return call(*args, **kwargs)
        return _enter(call, mesh, leaves, structure)

    return placed


def _is_module(x: Any) -> bool:
    return isinstance(x, nnx.Module)


def _mesh(leaf: Any) -> Any:
    """Returns the mesh with Explicit axes of an array, or of a module's first parameter."""
    return placement.mesh_of(_first_parameter(leaf) if _is_module(leaf) else leaf)


def _first_parameter(module: Any) -> Any:
    for value in vars(module).values():
        if isinstance(value, nnx.Variable):
            return value.get_value()
        if isinstance(value, nnx.Module):
            parameter = _first_parameter(value)
            if parameter is not None:
                return parameter
    return None


def _enter(call: Callable, mesh: Any, leaves: list, structure: Any) -> Any:
    """Splits the arguments into arrays and static values, and runs the compiled call."""
    arrays: list[Any] = []
    known: list[Any] = []
    for leaf in leaves:
        graph, state = nnx.split(leaf) if _is_module(leaf) else (None, leaf)
        is_array = graph is not None or isinstance(leaf, jax.Array | np.ndarray)
        arrays.append(state if is_array else None)
        known.append(graph if is_array else (type(leaf), leaf))
    given = [
        x for x, leaf in zip(arrays, leaves, strict=True) if x is leaf and placement.mesh_of(x)
    ]
    first = (given[0].shape, placement.spec_of(given[0], mesh)) if given else ((), ())
    program = call, structure, tuple(known), mesh, first
    try:
        hash(program)
    except TypeError:  # an unhashable program is compiled for this call alone
        result, found = jax.jit(functools.partial(_run, program))(arrays)
    else:
        result, found = _compiled(program, arrays)
    hand_out(found)
    return result


def _run(program: tuple, arrays: list) -> Any:
    call, structure, known, mesh, first = program

    def inside(arrays: list) -> Any:
        leaves = [
            leaf[1] if isinstance(leaf, tuple) else x if leaf is None else nnx.merge(leaf, x)
            for leaf, x in zip(known, arrays, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(structure, leaves)
        return with_handed_out(call)(*args, **kwargs)

    return placement.automatically(inside, mesh, functools.partial(_place, *first))(arrays)


_compiled = jax.jit(_run, static_argnums=0)


def _place(shape: tuple[int, ...], split: Any, x: Any) -> PartitionSpec:
    """Returns the sharding of a result: that of the first argument, for leading axes of equal size."""
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(shape, x.shape, strict=False))
    return PartitionSpec(*(axes or None for _, axes in zip(alike, split, strict=False)))
