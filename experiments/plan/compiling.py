"""The training step of a config, compiled for a topology.

Task, optimiser, mesh and step are those of ``train``; the batch and the vocabulary have the sizes of the
config and read no data.
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
from crossattn.train.members import stacked
from crossattn.train.program import Program, make_program, refuse_offload
from crossattn.train.sharding import batch_sharding, make_mesh, row_shares
from experiments.errors import SettingsError
from experiments.launch import Refused
from experiments.plan.topologies import Topology
from experiments.settings import train_config
from experiments.tasks import make_task

# Without a GPU nothing tunes the tiles of Triton's products, and for some sizes none are found.
_OPTIONS = {"tpu": None, "cuda": {"xla_gpu_enable_triton_gemm": False}}


class DoesNotFit(Refused):
    """A program needs more memory than a device has."""


@dataclass(frozen=True)
class Planned:
    """A compiled training step.

    Attributes:
      task: the task, without data.
      batch: shapes and shardings.
      reasons: warnings of ``attend`` about kernels that refused.
      seconds: time of compilation.
    """

    config: Any
    task: Any
    topology: Topology
    mesh: Mesh | None
    program: Program
    batch: dict[str, jax.ShapeDtypeStruct]
    compiled: Any
    reasons: tuple[str, ...]
    seconds: float


def compile_step(config: Any, topology: Topology) -> Planned:
    """Compiles the training step of a config for a topology.

    Raises:
      SettingsError: the config has a value that does not fit.
      Refused: the mesh or the rows do not fit the devices.
      DoesNotFit: the compiler found no way to keep it in the memory of a device.
    """
    values: TrainConfig = train_config(config)
    task = unread_task(config)
    try:
        mesh = make_mesh(values.mesh, topology.devices)
        batch = placed(task.batch_shapes(row_shares(mesh)), mesh, topology)
        refuse_offload(values, mesh)
    except ValueError as error:
        raise Refused(f"{error}") from error
    program = make_program(task, values, mesh)
    if values.members:
        batch = stacked(batch, len(values.members), program.along)
    state = program.target if mesh is not None else placed(program.target, None, topology)
    start = time.perf_counter()
    compiled, reasons = compiled_for(topology, program.step, state, batch)
    seconds = time.perf_counter() - start
    return Planned(config, task, topology, mesh, program, batch, compiled, reasons, seconds)


def refuse_members(config: Any, flag: str) -> None:
    """Raises Refused where a plan of one run is asked of a config with several."""
    if train_config(config).members:
        raise Refused(f"{flag} plans one run; leave train.seeds and train.sweep out.")


def unread_task(config: Any) -> Any:
    """Makes the task of a config, without its data."""
    return make_task(config).without_data()


def placed(tree: Any, mesh: Mesh | None, topology: Topology) -> Any:
    """Adds shardings to shapes: rows over a mesh, or all on the first device without one."""

    def place(x: Any) -> jax.ShapeDtypeStruct:
        only = SingleDeviceSharding(topology.devices[0])
        sharding = only if mesh is None else batch_sharding(x.shape, mesh)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(place, tree)


def mesh_axes(mesh: Mesh | None) -> dict[str, int]:
    """Returns the axes and sizes of a mesh, or those of a single device."""
    return {"data": 1} if mesh is None else dict(mesh.shape)


def compiled_for(topology: Topology, function: Any, *arguments: Any) -> tuple[Any, tuple[str, ...]]:
    """Compiles a jitted function for arguments with shardings; returns also the warnings of ``attend``.

    Raises:
      DoesNotFit: the compiler found no way to keep it in the memory of a device.
      SettingsError: the compiler has no such flag.
    """
    platform = topology.chip.platform
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lowered = function.trace(*arguments).lower(lowering_platforms=(platform,))
    reasons = dict.fromkeys(f"{w.message}" for w in caught if f"{w.message}".startswith("attend "))
    try:
        return lowered.compile(_OPTIONS[platform]), tuple(reasons)
    except jax.errors.JaxRuntimeError as error:
        if refusal := xla.refusal(error):
            raise SettingsError(f"config.train.{refusal}.") from error
        if "RESOURCE_EXHAUSTED" not in str(error) and "out of memory" not in str(error):
            raise
        raise DoesNotFit(unfitting(str(error), topology.chip.name)) from error


def unfitting(message: str, chip: str) -> str:
    """Shortens a compiler's message about exhausted memory to one sentence."""
    if "vmem" in message:
        return f"a kernel needs more of the memory on the chip (vmem) than a {chip} has"
    used = re.search(
        r"(?:Used |required.*?\()([\d.]+\w)(?: of |\) exceeds available HBM \()([\d.]+\w)", message
    )
    if used is None:
        return f"the compiler for {chip} ran out of its memory"
    return f"it needs {used.group(1)}iB of the {used.group(2)}iB that a {chip} has"
