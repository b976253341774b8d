"""The fastest way to lay a run out over a topology: mesh, rematerialisation, accumulation.

The one thing to know: all layouts are estimated by arithmetic, in no time; the best few of those that seem
to fit are compiled, in order of estimate, and the compiler's figures decide. One that proves too large
leaves out all that need as much.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from crossattn.nn.stack import POLICIES
from crossattn.train.program import make_program
from crossattn.train.sharding import (
    MESH_AXES,
    MeshConfig,
    make_mesh,
    state_sharding,
    with_sharding,
)
from experiments.flops import model_flops
from experiments.plan.collectives import Collective
from experiments.plan.compiling import (
    DoesNotFit,
    MeshError,
    batch_shapes,
    compile_step,
    unread_task,
)
from experiments.plan.hlo import Shape
from experiments.plan.network import seconds
from experiments.plan.report import Plan, plan
from experiments.plan.topologies import Topology
from experiments.plan.wording import amount, mesh_of, size_of
from experiments.settings import train_config

_REMATS = (False, POLICIES[1], True)
_AGAIN = {False: 1.0, POLICIES[1]: 1.05, True: 4 / 3}  # all FLOPs over the model's
_ACCUMULATE = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Layout:
    """One way to lay a run out.

    Attributes:
      mesh: axes and sizes.
      remat: as in the config.
      accumulate: as in the config.
      memory: bytes of a device, by arithmetic.
      step: seconds, by arithmetic.
    """

    mesh: tuple[tuple[str, int], ...]
    remat: bool | str
    accumulate: int
    memory: float
    step: float

    @property
    def flags(self) -> str:
        """What makes a config's run one of this layout."""
        words = [f"--config.mesh.{axis}={size}" for axis, size in self.mesh]
        remat = str(self.remat).lower() if isinstance(self.remat, bool) else self.remat
        words += [f"--config.model.remat={remat}", f"--config.train.accumulate={self.accumulate}"]
        return " ".join(words)

    def of(self, config: Any) -> Any:
        """The config with this layout."""
        laid = config.copy_and_resolve_references()
        with laid.unlocked(), laid.ignore_type():
            laid.mesh.update(dict(self.mesh))
            laid.model.remat = self.remat
            laid.train.accumulate = self.accumulate
        return laid


@dataclass(frozen=True)
class Tried:
    """A layout and what its compiled step said; None where it does not fit, for the reason given."""

    layout: Layout
    plan: Plan | None
    reason: str = ""


_READ = (
    "model.dim", "model.num_heads", "model.mlp_dim", "model.dtype", "loss.chunks", "tokenizer.vocab_size",
)  # fmt: skip


def missing(config: Any) -> list[str]:
    """Keys that estimates are made of and a config has not."""
    flat = config.to_dict()
    return [key for key in _READ if key.split(".")[1] not in flat.get(key.split(".")[0], {})]


def search(config: Any, topology: Topology, tries: int) -> list[Tried]:
    """Compile the best layouts; those that fit come first, fastest first.

    Args:
      tries: programs that fit to be compiled at most; as many that do not may come on top.

    Raises:
      MeshError: no layout fits the devices.
    """
    candidates = layouts(config, topology)
    if not candidates:
        raise MeshError(
            f"no mesh of {len(topology.devices)} devices divides {config.data.batch_size} rows and "
            f"{config.model.num_heads} heads; change config.data.batch_size"
        )
    available = topology.chip.available
    # What seems too large comes last: the estimate of memory is the rougher one.
    candidates.sort(key=lambda one: (one.memory > available, one.step, one.memory))
    tried: list[Tried] = []
    too_large = math.inf
    for layout in candidates:
        fitting = sum(one.plan is not None for one in tried)
        if fitting == tries or len(tried) == 2 * tries:
            break
        if layout.memory >= too_large or (fitting and layout.memory > available):
            continue
        one = _try(config, topology, layout)
        tried.append(one)
        if one.plan is None:
            too_large = layout.memory
    return sorted(tried, key=lambda one: math.inf if one.plan is None else one.plan.step)


def _try(config: Any, topology: Topology, layout: Layout) -> Tried:
    try:
        made = plan(compile_step(layout.of(config), topology))
    except DoesNotFit as error:
        return Tried(layout, None, f"{error}")
    if not made.memory.fits:
        return Tried(layout, None, made.memory.overfull(made.chip))
    return Tried(layout, made)


def layouts(config: Any, topology: Topology) -> list[Layout]:
    """Every layout that divides rows, heads and hidden features, with its estimates."""
    return list(_Estimates(config, topology).all())


class _Estimates:
    """What does not depend on the layout, computed once."""

    def __init__(self, config: Any, topology: Topology):
        self.config, self.topology = config, topology
        values = train_config(config)
        task = unread_task(config)
        program = make_program(task, values, None)
        self.axes, self.shapes = task.logical_axes(), program.target
        self.batch = batch_shapes(task, None)
        self.flops = model_flops(task, self.shapes.params, self.batch)
        self.parameters = sum(x.size for x in jax.tree.leaves(self.shapes.params))
        self.rows = next(iter(self.batch.values())).shape[0]
        sides = [name for name in ("source", "target_in") if name in self.batch]
        self.tokens = sum(self.batch[name].size for name in sides)

    def all(self) -> Iterator[Layout]:
        """Layouts with estimates."""
        for sizes in self._meshes():
            try:
                mesh = make_mesh(MeshConfig(**sizes), self.topology.devices)
            except ValueError:  # it does not lie on the torus
                continue
            state = size_of(self.shapes)
            if mesh is not None:
                places = state_sharding(self.shapes, self.axes, mesh)
                state = size_of(with_sharding(self.shapes, places))
            for remat, accumulate in itertools.product(_REMATS, _ACCUMULATE):
                if self.rows % (accumulate * sizes["data"] * sizes["fsdp"]):
                    continue
                yield Layout(
                    tuple(sizes.items()),
                    remat,
                    accumulate,
                    state + self._activations(sizes, remat, accumulate),
                    self._step(sizes, mesh, remat, accumulate),
                )

    def _meshes(self) -> Iterator[dict[str, int]]:
        model, count = self.config.model, len(self.topology.devices)
        # Heads are split within a host of GPUs, where links are fast.
        widest = self.topology.sizes[1] if self.topology.chip.platform == "cuda" else count
        divisors = [n for n in range(1, count + 1) if count % n == 0]
        for fsdp, tensor in itertools.product(divisors, divisors):
            data = count // (fsdp * tensor)
            splits = model.num_heads % tensor == 0 and model.mlp_dim % tensor == 0
            if data * fsdp * tensor == count and splits and tensor <= min(widest, 16):
                if self.rows % (data * fsdp) == 0:
                    yield dict(zip(MESH_AXES, (data, fsdp, tensor, 1), strict=True))

    def _activations(self, sizes: Mapping[str, int], remat: bool | str, accumulate: int) -> float:
        """Bytes of what is kept for the backward pass, of gradients, logits and gathered weights."""
        model, tensor = self.config.model, sizes["tensor"]
        tokens = self.tokens / (sizes["data"] * sizes["fsdp"] * sizes["seq"] * accumulate)
        width = 2 if model.dtype != "float32" else 4
        attention = 4 * (model.get("head_dim") or model.dim // model.num_heads) * model.num_heads
        hidden = attention / tensor + 2 * model.mlp_dim / tensor
        kept = {
            False: 8 * model.dim + hidden + attention / tensor,
            POLICIES[1]: model.dim + hidden,
            True: model.dim,
        }
        depth = self._depth()
        layer = self.parameters / max(depth, 1) / tensor
        logits = 6 * tokens / self.config.loss.chunks * self._vocabulary() / tensor / 2
        gradients = 4 * self.parameters / (sizes["fsdp"] * tensor) * (2 if accumulate > 1 else 1)
        one_layer = tokens / 2 * width * (kept[False] if remat else 0)
        return tokens / 2 * depth * width * kept[remat] + one_layer + logits + gradients + 4 * layer

    def _depth(self) -> int:
        model = self.config.model
        return model.get("layers") or model.encoder_layers + model.decoder_layers

    def _vocabulary(self) -> int:
        return self.config.tokenizer.vocab_size

    def _step(
        self, sizes: Mapping[str, int], mesh: Mesh | None, remat: bool | str, accumulate: int
    ) -> float:
        chip, count = self.topology.chip, len(self.topology.devices)
        compute = self.flops * _AGAIN[remat] / (count * chip.flops)
        state = 2 * size_of(self.shapes) / (sizes["fsdp"] * sizes["tensor"]) / chip.bandwidth
        if mesh is None:
            return compute + state
        sent = list(self._sent(sizes, accumulate))
        network = seconds(sent, self.topology, list(mesh.devices.flat))
        return max(compute, network) + state

    def _sent(self, sizes: Mapping[str, int], accumulate: int) -> Iterator[Collective]:
        """What devices send each other in a step.

        Weights are gathered twice and gradients scattered for each part of the batch, gradients summed over
        those that hold the same, and sublayers summed over their heads.
        """
        weights = 2 * self.parameters / sizes["tensor"]
        rows = self.tokens / (sizes["data"] * sizes["fsdp"] * sizes["seq"])
        for axis, kind, size, times in (
            ("fsdp", "all-gather", weights, 2 * accumulate),
            ("fsdp", "reduce-scatter", weights, accumulate),
            ("data", "all-reduce", weights / sizes["fsdp"], 1),
            ("tensor", "all-reduce", rows / 2 * self.config.model.dim * 2, 5 * self._depth()),
        ):
            if sizes[axis] > 1:
                shape = Shape("s8", (int(size),))
                yield Collective(kind, (axis,), (self._group(sizes, axis),), (shape,), times, "")

    def _group(self, sizes: Mapping[str, int], axis: str) -> tuple[int, ...]:
        """Places in the mesh of those that differ from the first along one axis."""
        places = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        moved = np.moveaxis(places, list(sizes).index(axis), 0)
        return tuple(int(n) for n in moved.reshape(sizes[axis], -1)[:, 0])


def text(tried: list[Tried]) -> str:
    """What the launcher prints: a line for each, and the flags of the best."""
    lines = [
        f"{'mesh':<28} {'remat':<34} {'accumulate':>10} {'estimate':>10} {'compiled':>10} {'MFU':>7} "
        f"{'holds':>10}  bound"
    ]
    for one in tried:
        layout, made = one.layout, one.plan
        cells = (
            f"{mesh_of(dict(layout.mesh)):<28} {str(layout.remat).lower():<34} {layout.accumulate:>10} "
            f"{layout.step * 1e3:>7.1f} ms"
        )
        if made is None:
            lines.append(f"{cells} does not fit: {one.reason}")
        else:
            lines.append(
                f"{cells} {made.step * 1e3:>7.1f} ms {100 * made.mfu(made.step):>5.1f} % "
                f"{amount(made.memory.total):>10}  {made.bound}"
            )
    if tried and tried[0].plan is not None:
        lines += ["", f"best: {tried[0].layout.flags}"]
    return "\n".join(lines)


def as_dicts(tried: list[Tried]) -> list[dict[str, Any]]:
    """For JSON."""
    return [
        dict(
            mesh=dict(one.layout.mesh),
            remat=one.layout.remat,
            accumulate=one.layout.accumulate,
            estimated_step_seconds=one.layout.step,
            estimated_memory=one.layout.memory,
            flags=one.layout.flags,
            reason=one.reason,
            plan=None if one.plan is None else one.plan.as_dict(),
        )
        for one in tried
    ]
