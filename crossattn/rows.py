"""Loops whose gradients are sent once: a program for each part of a batch's rows, instead of for all of them.

By itself XLA sums a gradient over devices after each product: in each microbatch, repeat and layer. Inside
``by_rows`` an array has the rows of one part. Random numbers must differ between parts: dropout does so, and
other code calls ``own_rows`` or ``of_each_row``.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from crossattn import axes

_ROWS = "rows of the batch"
_DRAWN = "drawn_for_the_part"
_RANDOM = ("random_bits", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform")


def row_axes(tree: Any, rows: int) -> tuple[tuple[str, ...], int]:
    """Returns the mesh axes that split the rows of a batch and no parameter, and their number of parts.

    Args:
      tree: arrays, whose types have the mesh.
      rows: number of rows, which the parts divide.
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
    """Maps ``call`` over the first axis of arrays, equal parts of a batch, which ``mesh_axes`` split.

    A sum over rows is that of one part, so that the gradient of a loop stays on the devices of the part, and
    is sent once.
    """
    others = {n: [a for a in rule if a not in mesh_axes] for n, rule in axes.rules().items()}

    def inside(*arrays: Any) -> Any:
        with axes.use_rules(others):
            return call(*arrays)

    return jax.vmap(inside, axis_name=_ROWS, spmd_axis_name=tuple(mesh_axes))


def for_each(x: Any, mesh_axes: Sequence[str], parts: int) -> Any:
    """Copies an array to each of ``parts`` devices; its derivative sums their gradients."""
    whole = jnp.broadcast_to(x, (parts, *x.shape))
    mesh = axes.mesh_of(whole)
    others = [PartitionSpec.UNCONSTRAINED] * x.ndim
    return (
        whole if mesh is None else axes.split(whole, mesh, PartitionSpec(tuple(mesh_axes), *others))
    )


def part() -> tuple[Any, int]:
    """Returns the index of the traced part of a batch and the number of parts; (0, 1) outside ``by_rows``."""
    try:
        return jax.lax.axis_index(_ROWS), jax.lax.axis_size(_ROWS)
    except NameError:
        return 0, 1


def own_rows(draw: Callable[[int], Any], rows: int) -> Any:
    """Returns ``draw(rows)``; inside ``by_rows``, this part's share of the draw for all parts.

    The numbers therefore do not depend on the number of parts.
    """
    index, parts = part()
    if parts == 1:
        return draw(rows)
    return jax.lax.dynamic_slice_in_dim(for_all_parts(draw, parts * rows), index * rows, rows)


def for_all_parts(draw: Callable[..., Any], *static: int) -> Any:
    """Returns ``draw(*static)``, the same in all parts, under a name that ``draws_rows`` permits."""
    if part()[1] == 1:
        return draw(*static)

    def drawn() -> Any:
        return draw(*static)

    drawn.__name__ = _DRAWN
    return jax.jit(drawn)()


def of_each_row(draw: Callable[[jax.Array], Any], key: jax.Array, tokens: jax.Array) -> Any:
    """Returns ``draw`` of a key for each row of tokens [B T], which the row alone decides.

    A row therefore has the same numbers in any batch and part.
    """
    places = jnp.arange(1, tokens.shape[1] + 1, dtype=jnp.uint32)
    rows = (tokens.astype(jnp.uint32) * places).sum(-1)

    def drawn() -> Any:
        return jax.vmap(lambda row: draw(jax.random.fold_in(key, row)))(rows)

    drawn.__name__ = _DRAWN
    return jax.jit(drawn)()


def draws_rows(jaxpr: Any) -> bool:
    """Returns whether a program draws random numbers in its own way: the same ones in each part."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in _RANDOM:
            return True
        if _DRAWN in str(equation.params.get("name")):
            continue
        if any(map(draws_rows, programs_of(equation))):
            return True
    return False


def programs_of(equation: Any) -> Iterator[Any]:
    """Yields the programs in an equation's parameters, such as bodies, without rules of differentiation."""
    for inner in jax.tree.leaves(list(equation.params.values())):
        inner = getattr(inner, "jaxpr", inner)
        if hasattr(inner, "eqns"):
            yield inner


@dataclass(frozen=True)
class OwnTokens:
    """Devices of a mesh that read a table [V D], each for its own tokens.

    Look-ups and losses both call ``each`` and ``gathered``, so that XLA gathers the table once for all of
    them, and scatters the sum of their gradients.

    Attributes:
      mesh: the mesh of the devices.
      rows: the sharding of the tokens.
      split: the mesh axes that split the tokens.
      kept: mesh axes along which devices have the same tokens, and each its rows of the table.
      places: the sharding of the table.
      parts: the mesh axes that split each axis of the table, without ``kept``.
    """

    mesh: Any
    rows: PartitionSpec
    split: tuple[str, ...]
    kept: tuple[str, ...]
    places: PartitionSpec
    parts: tuple[tuple[str, ...], tuple[str, ...]]

    @classmethod
    def of(cls, table: Any, tokens: Any) -> "OwnTokens | None":
        """Returns the devices of a table and tokens; None without a mesh, or inside ``shard_map``."""
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
        """Runs ``call(part of the table, *tokens)`` on each device."""
        among = set(axes.automatic(self.mesh))
        return jax.shard_map(
            call,
            mesh=self.mesh,
            in_specs=(self.places, *[self.rows] * len(tokens)),
            out_specs=out,
            check_vma=False,
            # By default it takes all axes except those of an enclosing vmap.
            **({} if among == set(self.mesh.axis_names) else {"axis_names": among}),
        )(table, *tokens)

    def gathered(self, part: Any) -> Any:
        """Gathers the rows of the table that a device reads."""
        for axis, over in enumerate(self.parts):
            part = jax.lax.all_gather(part, over, axis=axis, tiled=True) if over else part
        return part

    def scattered(self, x: Any) -> Any:
        """Sums the devices' values for the rows that they read, and returns this device's part."""
        for axis, over in enumerate(self.parts):
            x = jax.lax.psum_scatter(x, over, scatter_dimension=axis, tiled=True) if over else x
        others = tuple(axis for axis in self.split if axis not in (*self.parts[0], *self.parts[1]))
        return jax.lax.psum(x, others) if others else x
