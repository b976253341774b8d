"""The mesh that a config describes."""

from typing import Any

from jax.sharding import Mesh

from crossattn.train.sharding import MeshConfig, make_mesh
from experiments.settings import build, section_of


def config_mesh(config: Any) -> Mesh | None:
    """As ``make_mesh`` of the section ``mesh``: None when there is one device.

    Raises:
      SettingsError: a key is unknown.
      ValueError: the sizes do not multiply to the number of devices.
    """
    return make_mesh(build(MeshConfig, "mesh", section_of(config, "mesh")))
