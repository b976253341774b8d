"""Bytes and meshes in words, and what a device has of placed arrays."""

import math
from collections.abc import Mapping
from typing import Any

import jax

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def amount(count: float) -> str:
    """Bytes, in the largest unit of which there is one."""
    for unit, size in _UNITS:
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def mesh_of(axes: Mapping[str, int]) -> str:
    """The axes that split anything."""
    return " x ".join(f"{name}={size}" for name, size in axes.items() if size > 1) or "one device"


def size_of(tree: Any) -> int:
    """Bytes that one device has of arrays, or of their shapes, where they lie."""

    def part(x: Any) -> int:
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        return math.prod(shape) * x.dtype.itemsize

    return sum(part(x) for x in jax.tree.leaves(tree))
