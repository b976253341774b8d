"""The step of a run, compiled for devices that are not here.

Task, optimiser, mesh, places and step are made by what ``train`` makes them with;
only the batch and the vocabulary are taken from the config's numbers instead of from data.
"""

import re
import time
import warnings
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from crossattn.train import xla
from crossattn.train.config import TrainConfig
from crossattn.train.program import Program, make_program, refuse_offload
from crossattn.train.sharding import batch_sharding, make_mesh, row_shares
from experiments.errors import SettingsError
from experiments.plan.topologies import Topology
from experiments.settings import train_config
from experiments.tasks import make_task

# Without a GPU nothing tunes the tiles of Triton's products, and for some sizes none are found.
_OPTIONS = {"tpu": None, "cuda": {"xla_gpu_enable_triton_gemm": False}}


class MeshError(Exception):
    """A mesh does not fit the devices, or a batch the mesh."""


class DoesNotFit(Exception):
    """A program needs more memory than a device has."""


@dataclass(frozen=True)
class Planned:
    """A step that was compiled, with what it was compiled from.

    reasons: what ``attend`` said of kernels that refused; seconds: that compiling took.
    """

    config: Any
    topology: Topology
    mesh: Mesh | None
    program: Program
    batch: dict[str, jax.ShapeDtypeStruct]
    compiled: Any
    text: str
    reasons: tuple[str, ...]
    seconds: float

    @property
    def axes(self) -> dict[str, int]:
        """The mesh's axes and sizes."""
        return {"data": 1} if self.mesh is None else dict(self.mesh.shape)


def compile_step(config: Any, topology: Topology) -> Planned:
    """Compile the training step of a config for a topology's devices.

    Raises:
      SettingsError: the config has a value that does not fit.
      MeshError: the mesh or the rows do not fit the devices.
    """
    values: TrainConfig = train_config(config)
    task = unread_task(config)
    try:
        mesh = make_mesh(values.mesh, topology.devices)
        batch = batch_shapes(task, mesh)
        refuse_offload(values, mesh)
    except ValueError as error:
        raise MeshError(f"{error}") from error
    program = make_program(task, values, mesh)
    state = program.target
    if mesh is None:
        only = SingleDeviceSharding(topology.devices[0])
        state, batch = (jax.tree.map(lambda x: _placed(x, only), tree) for tree in (state, batch))
    start = time.perf_counter()
    compiled, reasons = compiled_for(topology, program.step, state, batch)
    seconds = time.perf_counter() - start
    text = compiled.as_text()
    return Planned(config, topology, mesh, program, batch, compiled, text, reasons, seconds)


def unread_task(config: Any) -> Any:
    """The task of a config, without its data."""
    return make_task(config).without_data()


def compiled_for(topology: Topology, function: Any, *arguments: Any) -> tuple[Any, tuple[str, ...]]:
    """A jitted function, compiled for arguments that say where they lie, and what ``attend`` warned of.

    Raises:
      DoesNotFit: the compiler found no way to keep it in the memory of a device.
      SettingsError: the compiler has no such flag.
    """
    platform = topology.chip.platform
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        lowered = function.trace(*arguments).lower(lowering_platforms=(platform,))
    reasons = dict.fromkeys(f"{w.message}" for w in said if f"{w.message}".startswith("attend "))
    try:
        return lowered.compile(_OPTIONS[platform]), tuple(reasons)
    except jax.errors.JaxRuntimeError as error:
        if said := xla.refusal(error):
            raise SettingsError(f"config.train.{said}.") from error
        if "RESOURCE_EXHAUSTED" not in str(error) and "out of memory" not in str(error):
            raise
        raise DoesNotFit(unfitting(str(error), topology.chip.name)) from error


def unfitting(said: str, chip: str) -> str:
    """What a compiler said of memory that it ran out of, in one sentence."""
    if "vmem" in said:
        return f"a kernel needs more of the memory on the chip (vmem) than a {chip} has"
    used = re.search(
        r"(?:Used |required.*?\()([\d.]+\w)(?: of |\) exceeds available HBM \()([\d.]+\w)", said
    )
    if used is None:
        return f"the compiler for {chip} ran out of its memory"
    return f"it needs {used.group(1)}iB of the {used.group(2)}iB that a {chip} has"


def batch_shapes(task: Any, mesh: Mesh | None) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a task's batch of training, of the largest where there are several, and their places."""

    def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return x if mesh is None else _placed(x, batch_sharding(x.shape, mesh))

    return {name: placed(x) for name, x in task.batch_shapes(row_shares(mesh)).items()}


def _placed(x: jax.ShapeDtypeStruct, place: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
