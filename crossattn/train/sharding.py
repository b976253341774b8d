"""Placement of arrays: one mesh, and one table from logical axes to mesh axes.

One device has no mesh (None), with which every function returns its arguments unchanged.

Mesh axes: `data` and `fsdp` both split the batch; `fsdp` also splits parameters along the model
width and tables along the vocabulary, `tensor` along heads, feed-forward and vocabulary; `seq` splits
the length of the batch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import jax
import numpy as np
from jax.experimental.mesh_utils import create_hybrid_device_mesh
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from crossattn.axes import RULES, Rules, spec

MESH_AXES = ("data", "fsdp", "tensor", "seq")
_SPLIT_AXES = ("TPU v5 lite", "TPU v5e")  # axes that `jax.make_mesh` splits, too
_Devices = Annotated[int, "[-1, inf)"]


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; -1 (one axis at most) takes all that remain.

    Attributes:
      data: devices that split the batch.
      fsdp: devices that split batch and parameters.
      tensor: devices that split heads and vocabulary.
      seq: devices that split lengths.
      seed: devices that split the members of ``train.seeds`` and ``train.sweep``.
    """

    data: _Devices = -1
    fsdp: _Devices = 1
    tensor: _Devices = 1
    seq: _Devices = 1
    seed: _Devices = 1


def make_mesh(
    config: MeshConfig = MeshConfig(), devices: Sequence[Any] | None = None
) -> Mesh | None:
    """Makes a mesh of the given devices, or of all of all processes; None for one device.

    `data` splits several slices (TPU pods, hosts of GPUs), and `fsdp` those that remain: the network between
    slices is the slow one.

    Raises:
        ValueError: the sizes do not multiply to the number of devices, do not fit a TPU's torus, or do not
            split the slices by data and fsdp.
    """
    devices = jax.devices() if devices is None else devices
    sizes, count = asdict(config), len(devices)
    given = math.prod(size for size in sizes.values() if size != -1)
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) == 1 and given > 0 and count % given == 0:
        sizes[free[0]] = count // given
    if math.prod(sizes.values()) != count or min(sizes.values()) < 1:
        asked = _said(asdict(config))
        raise ValueError(f"a mesh of {asked} does not fit {count} devices; -1 takes the rest")
    if count == 1:
        return None
    names = MESH_AXES if sizes["seed"] == 1 else ("seed", *MESH_AXES)
    sizes = {name: sizes[name] for name in names}
    kinds = (AxisType.Auto,) * len(names)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    inner = sizes
    try:
        if slices == 1:
            return jax.make_mesh(tuple(inner.values()), names, kinds, devices=devices)
        outer = _over_slices(sizes, slices)
        inner = {name: size // outer[name] for name, size in sizes.items()}
        split = devices[0].device_kind in _SPLIT_AXES
        placed = create_hybrid_device_mesh(
            tuple(inner.values()), tuple(outer.values()), devices, allow_split_physical_axes=split
        )
        return Mesh(placed, names, axis_types=kinds)
    except NotImplementedError:
        sides = np.max([x.coords for x in devices], axis=0) + 1
        raise ValueError(
            f"a mesh of {_said(inner)} does not lie on a torus of {' x '.join(map(str, sides))} chips: each"
            " size has to be a product of some of its sides"
        ) from None


def _over_slices(sizes: Mapping[str, int], slices: int) -> dict[str, int]:
    """Returns how many slices each axis spans: as many as divide it along seed, then data, then fsdp."""
    outer, left = dict.fromkeys(sizes, 1), slices
    for name in ("seed", "data", "fsdp"):
        outer[name] = math.gcd(sizes.get(name, 1), left)
        left //= outer[name]
    if left > 1:
        raise ValueError(
            f"a mesh of {_said(sizes)} does not fit {slices} slices of devices: data has to split them, or"
            " data and fsdp together"
        )
    return {name: outer[name] for name in sizes}


def _said(sizes: Mapping[str, int]) -> str:
    return " x ".join(
        f"{name} {size}" for name, size in sizes.items() if name != "seed" or size != 1
    )


def placement(
    mesh: Mesh | None, rules: Rules = RULES
) -> Callable[[tuple[str | None, ...], tuple[int, ...]], NamedSharding] | None:
    """Returns (logical axes, shape) -> sharding, for ``xa.load(place=...)``; None without a mesh."""
    if mesh is None:
        return None
    return lambda axes, shape: NamedSharding(mesh, spec(axes, shape, mesh, rules))


def params_sharding(params: Any, logical_axes: Any, mesh: Mesh | None, rules: Rules = RULES) -> Any:
    """Returns a sharding for each parameter (arrays or their shapes); None without a mesh."""
    place = placement(mesh, rules)
    if place is None:
        return None
    return jax.tree.map(lambda x, axes: place(axes, x.shape), params, logical_axes)


def state_sharding(
    state: Any, logical_axes: Any, mesh: Mesh | AbstractMesh | None, rules: Rules = RULES
) -> Any:
    """Returns a sharding for each array of a TrainState (arrays or their shapes); None without a mesh.

    An array of the optimiser's state or the average with the name and shape of a parameter has its sharding.
    One with the name and rank, and size 1 along reduced axes, is split along the others. All others are
    whole on every device.
    """
    if mesh is None:
        return None
    by_name = {
        _names(path): (x.shape, axes)
        for (path, x), axes in zip(
            jax.tree_util.tree_leaves_with_path(state.params),
            jax.tree.leaves(logical_axes, is_leaf=lambda x: isinstance(x, tuple)),
            strict=True,
        )
    }
    whole = NamedSharding(mesh, PartitionSpec())

    def place(path, x):
        names = _names(path)
        for start in range(len(names)):
            shape, axes = by_name.get(names[start:], (None, ()))
            if shape is not None and _is_part(x.shape, shape):
                return NamedSharding(mesh, spec(axes, x.shape, mesh, rules))
        return whole

    return jax.tree_util.tree_map_with_path(place, state)


def on_host(sharding: Any) -> Any:
    """Returns the same shardings in the memory of the devices' hosts."""
    return jax.tree.map(lambda place: place.with_memory_kind("pinned_host"), sharding)


def _is_part(shape: tuple[int, ...], of: tuple[int, ...]) -> bool:
    """Returns whether a shape is ``of`` with any number of axes reduced to 1."""
    return len(shape) == len(of) and all(a in (1, b) for a, b in zip(shape, of, strict=True))


def _names(path: tuple) -> tuple[str, ...]:
    """Returns the dictionary keys of a tree path, which are a parameter's name."""
    return tuple(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))


def data_shard(mesh: Mesh | None) -> tuple[int, int]:
    """Returns (index, count) of this process's share of the rows of every batch.

    Processes that differ only along `tensor` or `seq` hold the same rows, and have the same index.
    """
    if mesh is None:
        return 0, 1
    places = [mesh.axis_names.index(name) for name in ("data", "fsdp")]
    devices = np.moveaxis(mesh.devices, places, (0, 1))
    rows = devices.reshape(mesh.shape["data"] * mesh.shape["fsdp"], -1)
    owners = [frozenset(device.process_index for device in row) for row in rows]
    groups = list(dict.fromkeys(owners))
    mine = [index for index, group in enumerate(groups) if jax.process_index() in group]
    # A process with rows of several groups has those of all.
    return (mine[0], len(groups)) if len(mine) == 1 else (0, 1)


def put_batch(
    batch: Any, mesh: Mesh | None, members: bool = False, along: str | None = None
) -> Any:
    """Makes global arrays from this process's rows: axis 0 over data and fsdp, axis 1 over seq.

    Arrays of members have their axis before these, along a mesh axis if there is one.

    Raises:
        ValueError: the rows do not divide over the devices.
    """
    if mesh is None:
        return batch
    count = data_shard(mesh)[1]

    def put(rows: np.ndarray) -> jax.Array:
        lead, own = (rows.shape[:1], rows.shape[1:]) if members else ((), rows.shape)
        shape = (own[0] * count, *own[1:])
        place = batch_sharding(shape, mesh)
        if members:
            place = NamedSharding(mesh, PartitionSpec(along, *place.spec))
        return jax.make_array_from_process_local_data(place, rows, (*lead, *shape))

    return jax.tree.map(lambda x: put(np.asarray(x)), batch)


def spread_batch(batch: Any, mesh: Mesh | None) -> Any:
    """Makes global arrays, placed as by `put_batch`, from a batch that every process has whole."""
    if mesh is None:
        return batch

    def put(whole: np.ndarray) -> jax.Array:
        place = batch_sharding(whole.shape, mesh)
        return jax.make_array_from_callback(whole.shape, place, lambda index: whole[index])

    return jax.tree.map(lambda x: put(np.asarray(x)), batch)


def row_shares(mesh: Mesh | None) -> int:
    """Returns the number of parts of a batch's rows, which divides the rows of every batch."""
    return 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]


def rows_on(mesh: Mesh | None, rows: int) -> int:
    """Rounds a number of rows up to a multiple of `row_shares`."""
    return -(-rows // row_shares(mesh)) * row_shares(mesh)


def mesh_of(tree: Any) -> Mesh | None:
    """Returns the mesh of the arrays of a tree; None for one device."""
    for x in jax.tree.leaves(tree):
        place = getattr(x, "sharding", None)
        if isinstance(place, NamedSharding) and isinstance(place.mesh, Mesh):
            return place.mesh if place.mesh.size > 1 else None
    return None


def everywhere(mesh: Mesh | None) -> NamedSharding | None:
    """Returns the sharding of an array that is whole on every device; None without a mesh."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


def with_sharding(shapes: Any, sharding: Any) -> Any:
    """Adds the shardings of `params_sharding` or `state_sharding` to shapes."""
    if sharding is None:
        return shapes
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, sharding
    )


def batch_sharding(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array of a batch: axis 0 over data and fsdp, axis 1 over seq if it divides.

    Raises:
        ValueError: the rows do not divide over the devices.
    """
    if shape[0] % row_shares(mesh):
        raise ValueError(
            f"a batch of {shape[0]} rows does not divide over data x fsdp = {row_shares(mesh)}"
            f" devices; use a multiple of {row_shares(mesh)}"
        )
    along_seq = len(shape) > 1 and shape[1] % mesh.shape["seq"] == 0
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp"), *(["seq"] if along_seq else [])))
