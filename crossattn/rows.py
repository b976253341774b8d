"""Loops whose gradients are sent once: a program for each part of a batch's rows, instead of for all of them.

Left to itself XLA sums a gradient over devices wherever a product gives one: in each microbatch, repeat and
layer. Inside ``by_rows`` an array has the rows of one part, and what is drawn at
random must not be the same for all parts; dropout knows, and ``own_rows`` is for everybody else.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class OwnTokens:
    """Devices of a mesh that read a table [V D], each for its own tokens.

    Look-ups and losses gather it and scatter its gradient in the same words, those of ``each`` and
    ``gathered``: so XLA gathers it once for all of them, and scatters the sum of their gradients.

    Attributes:
      mesh: that they lie on.
      rows: how the tokens are split.
      split: the mesh axes that split them.
      kept: mesh axes along which devices have the same tokens, and each its rows of the table.
      places: how the table is split.
      parts: the mesh axes that split each of its axes, but for those kept.
    """

    mesh: Any
    rows: PartitionSpec
    split: tuple[str, ...]
    kept: tuple[str, ...]
    places: PartitionSpec
    parts: tuple[tuple[str, ...], tuple[str, ...]]

    @classmethod
    def of(cls, table: Any, tokens: Any) -> "OwnTokens | None":
        """The devices that have these; None without a mesh, and where a device's own are given."""
        mesh = next(filter(None, map(axes.mesh_of, (table, tokens))), None)
        if mesh is None or mesh.manual_axes or not isinstance(tokens, jax.core.Tracer):
            return None
        among, names = axes.automatic(mesh), ("batch", *[None] * (tokens.ndim - 2), "length")
        rows = axes.spec(names[-tokens.ndim :], tokens.shape, mesh, among=among)
        places = axes.spec(("vocab", "embed"), table.shape, mesh, among=among)
        split = tuple(axis for entry in rows for axis in axes.several(entry))
        vocab, embed = map(axes.several, places)
        kept = tuple(itertools.takewhile(lambda axis: axis not in split, vocab))
        return cls(mesh, rows, split, kept, places, (vocab[len(kept) :], embed))

    def each(self, call: Callable, out: Any, table: Any, *tokens: Any) -> Any:
        """``call(part of the table, *tokens)`` of each device."""
        among = set(axes.automatic(self.mesh))
        return jax.shard_map(
            call,
            mesh=self.mesh,
            in_specs=(self.places, *[self.rows] * len(tokens)),
            out_specs=out,
            check_vma=False,
            # Unless told, it takes all axes, but for those that a vmap has taken.
            **({} if among == set(self.mesh.axis_names) else {"axis_names": among}),
        )(table, *tokens)

    def gathered(self, part: Any) -> Any:
        """The rows of the table that a device reads."""
        for axis, over in enumerate(self.parts):
            part = jax.lax.all_gather(part, over, axis=axis, tiled=True) if over else part
        return part

    def scattered(self, x: Any) -> Any:
        """A part of the sum of what devices have for the rows that they read."""
        for axis, over in enumerate(self.parts):
            x = jax.lax.psum_scatter(x, over, scatter_dimension=axis, tiled=True) if over else x
        others = tuple(axis for axis in self.split if axis not in (*self.parts[0], *self.parts[1]))
        return jax.lax.psum(x, others) if others else x
