"""Meshes of eight devices; tests that need them are skipped, by this name, where there are fewer."""

import jax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

needs_eight_devices = pytest.mark.skipif(
    jax.device_count() < 8,
    reason="eight devices: XLA_FLAGS=--xla_force_host_platform_device_count=8",
)


def mesh_of(*sizes, names, kind=AxisType.Auto):
    return jax.make_mesh(sizes, names, (kind,) * len(names))


def put(mesh, arrays, *specs):
    """The arrays, split over the mesh axes that each spec names; one spec serves all."""
    specs = specs * len(arrays) if len(specs) == 1 else specs
    pairs = zip(arrays, specs, strict=True)
    return [jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec))) for x, spec in pairs]
