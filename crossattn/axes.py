"""Logical axes of arrays, and one table of the mesh axes that shard them.

Parameters name their axes as metadata (``nnx.Param(x, axes=("embed", "heads"))``), activations by
``constrain``, which changes the sharding, never results. On one device, and on a mesh whose axes the table
lacks, it returns its argument.
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

# Logical axis -> mesh axes. Every device has an axis of another name whole. The first axis of an array takes
# a mesh axis that several ask for: parameters split "embed"; activations, whose batch takes "fsdp", do not. A
# table splits its rows where they divide.
RULES: Rules = {
    "batch": ("data", "fsdp"),
    "length": ("seq",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor", "fsdp"),
    "embed": ("fsdp",),
}

# Part of the key of jit's caches: each table has programs of its own.
_rules = jax.make_user_context(None)


@contextlib.contextmanager
def use_rules(rules: Mapping[str, Sequence[str]]) -> Iterator[None]:
    """Shards activations and attention inside by these rules instead of ``axes.RULES``.

        with xa.use_rules({"batch": ("dp",), "heads": ("tp",)}):
            logits = jax.jit(model)(tokens)

    It applies while code is traced, as ``xa.use_backend`` does.

    Raises:
      TypeError: a value is a string, where a tuple of mesh axes is expected.
    """
    for name, axes in rules.items():
        if isinstance(axes, str):
            raise TypeError(f"the rule of {name!r} is {axes!r}; expected a tuple, ({axes!r},).")
    with _rules(tuple((name, tuple(axes)) for name, axes in rules.items())):
        yield


def rules() -> Rules:
    """Returns the current table."""
    return RULES if _rules.value is None else dict(_rules.value)


def split_over(
    name: str | None, size: int, mesh: Mesh | AbstractMesh, among: Sequence[str], table: Rules
) -> tuple[str, ...]:
    """Returns the mesh axes, of those in ``among``, that split an axis of this name and size.

    These are the axes of its rule in order, without those whose product with the ones before would not
    divide the size.
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
    """Returns the partition of an array whose axes have a name, None or ``PartitionSpec.UNCONSTRAINED``.

    An axis stays whole if the mesh axis does not divide its size, or if an earlier axis of the array has
    taken the mesh axis.
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
      names: of its axes: "batch", "length", "embed", "heads", "kv_heads", "mlp", "vocab", or None for a
        whole axis. ``...`` after "batch" is any number of further axes; an array with fewer axes has neither:
        ``constrain(x, "batch", ..., "length", "embed")``.
    """
    mesh = mesh_of(x)
    if mesh is None or not isinstance(x, jax.core.Tracer):
        return x
    return split(x, mesh, spec(_spelt_out(names, x.ndim), x.shape, mesh, among=automatic(mesh)))


def placed(x: Any, *names: str | None) -> Any:
    """Constrains an array [*B T ...]: batch axes and a length come before the named axes.

    A single axis before them may be either, and XLA chooses its sharding.
    """
    mesh, before = mesh_of(x), x.ndim - len(names)
    if before >= 2 or mesh is None or not isinstance(x, jax.core.Tracer):
        return constrain(x, "batch", ..., "length", *names)
    beside_batch = [axis for axis in automatic(mesh) if axis not in rules().get("batch", ())]
    return split(x, mesh, spec([_ANYWHERE] * before + [*names], x.shape, mesh, among=beside_batch))


def mesh_of(x: Any) -> AbstractMesh | None:
    """Returns the mesh of an array's type, if the table has one of its Auto axes."""
    if not isinstance(x, jax.Array):
        return None
    context = jax.sharding.get_abstract_mesh()
    mesh = context if not context.empty else jax.typeof(x).sharding.mesh
    if mesh.empty or mesh.size == 1:
        return None
    known = {axis for axes in rules().values() for axis in axes}
    return mesh if known & set(automatic(mesh)) else None


def automatic(mesh: Any) -> list[str]:
    """Returns the Auto axes of a mesh, along which XLA chooses shardings."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return [name for name, kind in kinds if kind == AxisType.Auto]


def several(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of an entry of a ``PartitionSpec``."""
    if isinstance(entry, str):
        return (entry,)
    return entry if isinstance(entry, tuple) else ()


def split(x: Any, mesh: AbstractMesh, places: PartitionSpec) -> Any:
    """Constrains the array's sharding."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, places))


def _spelt_out(names: Sequence[Any], ndim: int) -> list[str | None]:
    """Replaces ``...`` by a None for each further axis."""
    if ... not in names:
        return list(names)
    at = names.index(...)
    first, last = names[:at], names[at + 1 :]
    room = ndim - len(last)
    return [*first[:room], *[None] * (room - len(first)), *last]
