"""Loops whose gradients are sent once: a program for each part of a batch's rows, instead of for all of them.

Left to itself XLA sums a gradient over devices wherever a product gives one: in each microbatch, repeat and
layer. The one thing to know: inside ``by_rows`` an array has the rows of one part, and what is drawn at
random must not be the same for all parts; dropout knows, and ``own_rows`` is for everybody else.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from crossattn import axes

_ROWS = "rows of the batch"
_DRAWN = "drawn_for_all_parts"
_RANDOM = ("random_bits", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform")


def row_axes(tree: Any, rows: int) -> tuple[tuple[str, ...], int]:
    """The mesh axes whose devices have other rows of a batch and the same parameters, and their parts.

    Args:
      tree: of arrays, whose types say on which mesh they lie.
      rows: how many there are, which divide over them.
    """
    traced = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.core.Tracer)]
    mesh = next(filter(None, map(axes.mesh_of, traced)), None)
    if mesh is None or mesh.manual_axes:
        return (), 1
    others = {axis for name, rule in axes.rules().items() if name != "batch" for axis in rule}
    among = [axis for axis in axes.automatic(mesh) if axis not in others]
    found = axes.split_over("batch", rows, mesh, among, axes.rules())
    return found, math.prod(mesh.shape[axis] for axis in found)


def by_rows(call: Callable, mesh_axes: Sequence[str]) -> Callable:
    """``call`` of arrays that have one more axis, the first: of equal parts of a batch, over ``mesh_axes``.

    What is summed over rows is summed over those of a part, so that a gradient in a loop stays the own one
    of the devices that have the part, and can be sent once.
    """
    others = {n: [a for a in rule if a not in mesh_axes] for n, rule in axes.rules().items()}

    def inside(*arrays: Any) -> Any:
        with axes.use_rules(others):
            return call(*arrays)

    return jax.vmap(inside, axis_name=_ROWS, spmd_axis_name=tuple(mesh_axes))


def for_each(x: Any, mesh_axes: Sequence[str], parts: int) -> Any:
    """An array that devices have whole, as one for each of them: gradients of theirs are summed here."""
    whole = jnp.broadcast_to(x, (parts, *x.shape))
    mesh = axes.mesh_of(whole)
    others = [PartitionSpec.UNCONSTRAINED] * x.ndim
    return (
        whole if mesh is None else axes.split(whole, mesh, PartitionSpec(tuple(mesh_axes), *others))
    )


def part() -> tuple[Any, int]:
    """Which of how many parts of a batch's rows is traced, inside ``by_rows``; (0, 1) elsewhere."""
    try:
        return jax.lax.axis_index(_ROWS), jax.lax.axis_size(_ROWS)
    except NameError:
        return 0, 1


def own_rows(draw: Callable[[int], Any], rows: int) -> Any:
    """``draw(rows)``, such as random numbers; inside ``by_rows``, this part's of those for all parts.

    So what is drawn does not depend on how many parts there are.
    """
    index, parts = part()
    if parts == 1:
        return draw(rows)
    return jax.lax.dynamic_slice_in_dim(for_all_parts(draw, parts * rows), index * rows, rows)


def for_all_parts(draw: Callable[..., Any], *static: int) -> Any:
    """``draw(*static)``, the same in all parts; ``draws_rows`` knows it by its name."""
    if part()[1] == 1:
        return draw(*static)

    def drawn() -> Any:
        return draw(*static)

    drawn.__name__ = _DRAWN
    return jax.jit(drawn)()


def draws_rows(jaxpr: Any) -> bool:
    """Whether a program for a part of the rows draws random numbers otherwise than by ``own_rows``.

    They would be the same ones in each part.
    """
    for equation in jaxpr.eqns:
        if equation.primitive.name in _RANDOM:
            return True
        if _DRAWN in str(equation.params.get("name")):
            continue
        for inner in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns") and draws_rows(inner):
                return True
    return False


def of_all_rows(total: Any) -> Any:
    """A sum over rows; inside ``by_rows``, that over the rows of all parts."""
    return total if part()[1] == 1 else jax.lax.psum(total, _ROWS)
