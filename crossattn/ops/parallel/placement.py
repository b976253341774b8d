"""Sharding of operands: each device computes its own part.

On a mesh with ``AxisType.Explicit`` axes, the type of an array says which of its axes are split over which
of the mesh's; for Auto axes the table of ``crossattn.axes`` says it. ``Split`` puts the two together and
runs a computation inside ``jax.shard_map``, where a kernel sees one device's batch, heads and queries, and
nothing that is split by them is gathered.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from crossattn import axes as logical
from crossattn.ops.call import Names
from crossattn.types import Array


def mesh_of(tree: Any) -> AbstractMesh | None:
    """Returns the mesh with Explicit axes that some array of a tree lies on, if there is one."""
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.Array):
            mesh = getattr(jax.typeof(x).sharding, "mesh", None)
            if mesh is not None and AxisType.Explicit in mesh.axis_types:
                return mesh
    return None


def attended_on(tree: Any) -> AbstractMesh | None:
    """Returns the mesh that splits attention: of Explicit axes, or of Auto ones in the table."""
    return mesh_of(tree) or next(filter(None, map(logical.mesh_of, jax.tree.leaves(tree))), None)


def is_explicit(mesh: Any) -> bool:
    """Returns whether the types of arrays say how they lie on some axis of a mesh."""
    return mesh is not None and AxisType.Explicit in mesh.axis_types


@dataclass(frozen=True)
class Split:
    """Mesh axes that split the axes of operands.

    Attributes:
      mesh: the mesh that the operands lie on; where there is a context, the mesh of that.
      axes: name -> mesh axes.
      automatic: the mesh's Auto axes, where the table knows one of them; along the others XLA decides.
    """

    mesh: Any
    axes: dict[Any, tuple[str, ...]]
    automatic: tuple[str, ...] = ()

    @classmethod
    def of(cls, mesh: Any, operands: Sequence[Any], names: Sequence[Names]) -> "Split":
        """Reads the split from the types of the operands, and for Auto axes from the table.

        The first operand decides where two disagree. A mesh axis splits one of a name's axes
        at most: batch before heads before queries before keys.
        """
        mesh_axes: dict[Any, tuple[str, ...]] = {}
        taken: set[str] = set()
        pairs = list(zip(operands, names, strict=True))
        named = [each for x, own in pairs for each in zip(own, spec_of(x, mesh), strict=True)]
        for name in sorted({n for n, _ in named if n is not None}, key=_order):
            for axes in (axes for n, axes in named if n == name):
                if axes and not taken & set(axes):
                    mesh_axes[name] = axes
                    taken |= set(axes)
                    break
        automatic = _ruled(mesh)
        sizes = {n: size for x, own in pairs for n, size in zip(own, x.shape, strict=True)}
        outermost = max((n for n in sizes if isinstance(n, int)), default=None)
        batch = {outermost: "batch"}
        if outermost is not None and "mapped" in logical.rules():  # by a vmap with spmd_axis_name
            batch = {outermost: "mapped", outermost - 1: "batch"}
        for name, rule in (batch | {"N": "heads", "T": "length", "S": "length"}).items():
            if name in sizes and name not in mesh_axes:
                free = [axis for axis in automatic if axis not in taken]
                axes = logical.split_over(rule, sizes[name], mesh, free, logical.rules())
                if axes:
                    mesh_axes[name] = axes
                    taken |= set(axes)
        # Axes of one device are named too: what is not split over an axis has its gradient summed over it.
        alone = tuple(axis for axis in automatic if mesh.shape[axis] == 1 and axis not in taken)
        if alone:
            name = "N" if outermost is None else outermost
            mesh_axes[name] = (*mesh_axes.get(name, ()), *alone)
        return cls(mesh, mesh_axes, automatic)

    def without(self, *names: Any) -> "Split":
        """Returns a split with the axes of these names whole on every device."""
        kept = {n: axes for n, axes in self.axes.items() if n not in names}
        return replace(self, axes=kept)

    def parts(self, name: Any) -> int:
        """Returns the number of devices that split an axis."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes.get(name, ()))

    @property
    def nested(self) -> bool:
        """True inside another ``shard_map``: JAX (0.12) does not compile the gradient of one in the other."""
        return bool(getattr(self.mesh, "manual_axes", ()))

    def first(self, name: Any, length: int) -> Any:
        """Returns the index of this device's first member of an axis, of which it has ``length``."""
        axes = self.axes.get(name)
        return jax.lax.axis_index(axes) * length if axes else 0

    def spec(self, names: Names, shape: Sequence[int] | None = None) -> PartitionSpec:
        """Returns an array's partition; axes of size 1 of a known shape are whole, as they broadcast."""
        sizes = [0] * len(names) if shape is None else shape
        entries = [
            self.axes.get(n) if size != 1 else None for n, size in zip(names, sizes, strict=True)
        ]
        return PartitionSpec(*entries)

    def over(self, axis: str, *names: str) -> "Split":
        """Returns a split with the lengths of these names, and nothing else, over that mesh axis."""
        others = {
            n: axes for n, axes in self.axes.items() if n not in ("T", "S") and axis not in axes
        }
        return replace(self, axes=others | dict.fromkeys(names, (axis,)))

    def put(self, x: Any, names: Names) -> Any:
        """Returns the array, split so."""
        return reshard(x, self.mesh, self.spec(names, jnp.shape(x)))

    def run(self, call: Callable, arrays: tuple, names: tuple, out: Any) -> Any:
        """Runs ``call`` on each device's parts; trees of ``Names`` name the axes of arrays and results."""
        each = partial(jax.tree.map, is_leaf=_is_names)
        specs = each(lambda n, x: self.spec(n, jnp.shape(x)), names, arrays)
        arrays = each(lambda n, x: self.put(x, n), names, arrays)
        used = {axis for axes in self.axes.values() for axis in axes}
        chosen = used | _explicit(self.mesh) | set(self.automatic)
        # Unless told, it takes all axes, but for those that a vmap has taken.
        whole: Any = {} if chosen == set(self.mesh.axis_names) else {"axis_names": chosen}
        return jax.shard_map(
            call,
            mesh=self.mesh,
            in_specs=specs,
            out_specs=each(self.spec, out),
            # Inside another shard_map, as there. Kernels of other people do not say over which axes
            # their results vary.
            check_vma=any(map(varying, jax.tree.leaves(arrays))),
            **whole,
        )(*arrays)

    def run_elementwise(self, call: Callable, arrays: tuple, names: tuple, out: Any) -> Any:
        """Runs a call that is the same for parts and for the whole."""
        if self.nested:
            return self.run_whole(lambda given: call(*given), arrays, out)
        return self.run(call, arrays, names, out)

    def run_whole(self, call: Callable, arguments: Any, out: Any) -> Any:
        """Runs ``call`` on the whole arrays, which XLA cuts as it sees fit, and splits its results."""
        places = iter(jax.tree.leaves(out, is_leaf=_is_names))
        return automatically(call, self.mesh, lambda x: self.spec(next(places)))(arguments)


def automatically(call: Callable, mesh: Any, place: Callable[[Any], PartitionSpec]) -> Callable:
    """Wraps ``call`` of one argument so that Explicit axes are Auto inside; ``place`` splits a result."""
    explicit = _explicit(mesh)
    inside = mesh.update_axis_types(dict.fromkeys(explicit, AxisType.Auto))

    def entered(arguments: Any) -> Any:
        with jax.sharding.use_abstract_mesh(inside):
            results = call(jax.tree.map(lambda x: _retyped(x, inside), arguments))
        return jax.tree.map(lambda x: reshard(x, mesh, place(x)), results)

    return entered


def _retyped(x: Any, mesh: Any) -> Any:
    """Returns an array on Explicit axes as one on this mesh, where it stays."""
    if mesh_of(x) is None:
        return x
    return jax.reshard(x, NamedSharding(mesh, PartitionSpec(*[None] * x.ndim)))


def reshard(x: Any, mesh: Any, spec: PartitionSpec) -> Any:
    """Returns an array split so over the Explicit axes of the mesh; others are as XLA sees fit."""
    explicit = _explicit(mesh)
    if not explicit:
        return x
    kept = [
        tuple(axis for axis in logical.several(entry) if axis in explicit) or None for entry in spec
    ]
    return jax.reshard(x, NamedSharding(mesh, PartitionSpec(*kept)))


def in_force(mesh: Any) -> Any:
    """Returns the context's mesh, which knows manual axes inside ``jax.shard_map``; else this one."""
    context = jax.sharding.get_abstract_mesh()
    return mesh if context.empty else context


def _explicit(mesh: Any) -> set[str]:
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in kinds if kind == AxisType.Explicit}


def spec_of(x: Any, mesh: Any) -> tuple[tuple[str, ...], ...]:
    """Returns the Explicit mesh axes that split each axis of an array."""
    sharding = jax.typeof(x).sharding if isinstance(x, jax.Array) else None
    if sharding is None or sharding.mesh.empty:
        return ((),) * jnp.ndim(x)
    explicit = _explicit(mesh)
    entries = [*sharding.spec, *[None] * (jnp.ndim(x) - len(sharding.spec))]
    return tuple(tuple(axis for axis in logical.several(e) if axis in explicit) for e in entries)


def _ruled(mesh: Any) -> tuple[str, ...]:
    """Returns the Auto axes of a mesh of which the table knows one; a kernel takes none for itself."""
    automatic = logical.automatic(mesh)
    known = {axis for axes in logical.rules().values() for axis in axes}
    return tuple(automatic) if known & set(automatic) else ()


def _order(name: Any) -> tuple[int, int]:
    return (0, name) if isinstance(name, int) else (1 + "NKTS".index(name), 0)


def _is_names(x: Any) -> bool:
    return isinstance(x, Names)


def alike(tree: Any) -> Any:
    """Makes every array vary over the mesh axes of ``shard_map`` that any of them varies over.

    Varying and unvarying arrays meet in loops and in ``custom_vjp``, where JAX requires a cast.
    """
    leaves, structure = jax.tree.flatten(tree)
    owns = [varying(x) for x in leaves]
    every = frozenset[str]().union(*owns)
    leaves = [_vary(x, every - own) for x, own in zip(leaves, owns, strict=True)]
    return jax.tree.unflatten(structure, leaves)


def full_like(x: Array, value: Any, shape: tuple[int, ...] | None = None) -> Array:
    """Returns a constant of x's dtype that varies over mesh axes as ``x`` does."""
    return _vary(jnp.full(x.shape if shape is None else shape, value, x.dtype), varying(x))


def varying(x: Any) -> frozenset[str]:
    """Returns the mesh axes of ``shard_map`` that an array varies over."""
    kind: Any = jax.typeof(x)
    # JAX has moved this attribute, and a key array may have neither.
    return kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", frozenset())


def _vary(x: Any, axes: frozenset[str]) -> Any:
    return jax.lax.pcast(x, tuple(axes), to="varying") if axes else x
