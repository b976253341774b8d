"""Logical axes of arrays and the mesh axes that shard them: one table for everything.

Parameters name their axes as metadata (``nnx.Param(x, axes=("embed", "heads"))``), activations by
``constrain``. Nothing here changes results, only places; on one device, and on a
mesh none of whose axes the table has, ``constrain`` returns what it was given.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

Rules = Mapping[str, tuple[str, ...]]
_ANYWHERE: Any = PartitionSpec.UNCONSTRAINED

# Logical axis -> mesh axes. A name that is not here is kept whole on every device. Of the axes of one
# array the first to ask for a mesh axis gets it: "embed" is split in parameters, and whole in
# activations, whose batch has taken "fsdp". A table is split by its rows where they divide.
RULES: Rules = {
    "batch": ("data", "fsdp"),
    "length": ("seq",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor", "fsdp"),
    "embed": ("fsdp",),
}

# Part of the key of jit's caches, so that what was placed by one table does not serve another.
_rules = jax.make_user_context(None)


@contextlib.contextmanager
def use_rules(rules: Mapping[str, Sequence[str]]) -> Iterator[None]:
    """Inside, activations and attention are placed by these rules instead of ``axes.RULES``.

        with xa.use_rules({"batch": ("dp",), "heads": ("tp",)}):
            logits = jax.jit(model)(tokens)

    It acts where code is traced, as ``xa.use_backend`` does.

    Raises:
      TypeError: a value is a string, where a tuple of mesh axes is expected.
    """
    for name, axes in rules.items():
        if isinstance(axes, str):
            raise TypeError(f"the rule of {name!r} is {axes!r}; expected a tuple, ({axes!r},).")
    with _rules(tuple((name, tuple(axes)) for name, axes in rules.items())):
        yield


def rules() -> Rules:
    """The table in force."""
    return RULES if _rules.value is None else dict(_rules.value)


def split_over(
    name: str | None, size: int, mesh: Mesh | AbstractMesh, among: Sequence[str], table: Rules
) -> tuple[str, ...]:
    """The mesh axes, of those in ``among``, over which an axis of this name and size is split.

    Takes its rule's axes in order, each one that together with those taken divides the size.
    """
    mesh_axes: tuple[str, ...] = ()
    for axis in table.get(name, ()) if name is not None else ():
        if axis in among and mesh.shape[axis] > 1:
            wider = (*mesh_axes, axis)
            if size % math.prod(mesh.shape[a] for a in wider) == 0:
                mesh_axes = wider
    return mesh_axes


def spec(
    names: Sequence[Any],
    shape: Sequence[int],
    mesh: Mesh | AbstractMesh,
    table: Rules | None = None,
    among: Sequence[str] | None = None,
) -> PartitionSpec:
    """The partition of one array, whose axes have a name, None or ``PartitionSpec.UNCONSTRAINED``.

    An axis stays whole where its size does not divide evenly over the mesh axis, or where an earlier axis of
    the array has taken that mesh axis.
    """
    table, free = rules() if table is None else table, list(mesh.shape if among is None else among)
    entries: list[Any] = []
    for name, size in zip(names, shape, strict=True):
        if name is _ANYWHERE:
            entries.append(name)
            continue
        axes = split_over(name, size, mesh, free, table)
        free = [axis for axis in free if axis not in axes]
        entries.append(axes[0] if len(axes) == 1 else axes or None)
    return PartitionSpec(*entries)


def constrain(x: Any, *names: str | EllipsisType | None) -> Any:
    """Constrains the array's sharding by the table; for activations, in traced code alone.

    Args:
      x: any array.
      names: of its axes: "batch", "length", "embed", "heads", "kv_heads", "mlp", "vocab", or None for one
        that is whole. ``...`` after "batch" is any number of further axes, and none of either where
        there are too few: ``constrain(x, "batch", ..., "length", "embed")``.
    """
    mesh = mesh_of(x)
    if mesh is None or not isinstance(x, jax.core.Tracer):
        return x
    return split(x, mesh, spec(_spelt_out(names, x.ndim), x.shape, mesh, among=automatic(mesh)))


def placed(x: Any, *names: str | None) -> Any:
    """``constrain`` of [*B T ...], batch axes and a length before the axes that are named.

    One axis before them may be either, and lies where XLA has it.
    """
    mesh, before = mesh_of(x), x.ndim - len(names)
    if before >= 2 or mesh is None or not isinstance(x, jax.core.Tracer):
        return constrain(x, "batch", ..., "length", *names)
    beside_batch = [axis for axis in automatic(mesh) if axis not in rules().get("batch", ())]
    return split(x, mesh, spec([_ANYWHERE] * before + [*names], x.shape, mesh, among=beside_batch))


def mesh_of(x: Any) -> AbstractMesh | None:
    """The mesh with Auto axes that an array's type says it lies on, if the table has one of them."""
    if not isinstance(x, jax.Array):
        return None
    context = jax.sharding.get_abstract_mesh()
    mesh = context if not context.empty else jax.typeof(x).sharding.mesh
    if mesh.empty or mesh.size == 1:
        return None
    known = {axis for axes in rules().values() for axis in axes}
    return mesh if known & set(automatic(mesh)) else None


def automatic(mesh: Any) -> list[str]:
    """The axes of a mesh along which XLA, and so the table, decides what is split."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return [name for name, kind in kinds if kind == AxisType.Auto]


def several(entry: Any) -> tuple[str, ...]:
    """The mesh axes of an entry of a ``PartitionSpec``."""
    if isinstance(entry, str):
        return (entry,)
    return entry if isinstance(entry, tuple) else ()


def split(x: Any, mesh: AbstractMesh, places: PartitionSpec) -> Any:
    """Constrains the array's sharding."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, places))


def _spelt_out(names: Sequence[Any], ndim: int) -> list[str | None]:
    """One name for each axis."""
    if ... not in names:
        return list(names)
    at = names.index(...)
    first, last = names[:at], names[at + 1 :]
    room = ndim - len(last)
    return [*first[:room], *[None] * (room - len(first)), *last]
