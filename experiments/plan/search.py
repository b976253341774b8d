"""The fastest layout of a run over a topology: mesh, rematerialisation, accumulation.

All layouts are estimated by arithmetic, in no time; the best few of those that seem to fit are compiled, in
order of estimate, and the compiler's figures decide. A layout that proves too large excludes all that need
as much.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

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
from experiments.launch import Refused
from experiments.plan.collectives import Collective, seconds
from experiments.plan.compiling import DoesNotFit, compile_step, unread_task
from experiments.plan.hlo import Shape
from experiments.plan.report import Plan, amount, mesh_of, plan, size_of
from experiments.plan.topologies import Topology
from experiments.settings import train_config

_REMATS = (False, POLICIES[1], True)
_AGAIN = {False: 1.0, POLICIES[1]: 1.05, True: 4 / 3}  # hardware FLOPs over model FLOPs
_ACCUMULATE = (1, 2, 4, 8, 16)
_SUMMED = ("heads", "head_dim", "mlp")  # axes over which the last product of a sublayer sums


@dataclass(frozen=True)
class Layout:
    """A layout of a run.

    Attributes:
      mesh: axes and sizes.
      remat, accumulate: as in the config.
      memory: estimated bytes of a device.
      step: estimated seconds.
      plan: the plan of the compiled step; None before it is compiled, and where it does not fit.
      reason: why it does not fit.
    """

    mesh: dict[str, int]
    remat: bool | str
    accumulate: int
    memory: float
    step: float
    plan: Plan | None = None
    reason: str = ""

    @property
    def flags(self) -> str:
        """The flags that give a config this layout."""
        words = [f"--config.mesh.{axis}={size}" for axis, size in self.mesh.items()]
        remat = str(self.remat).lower() if isinstance(self.remat, bool) else self.remat
        words += [f"--config.model.remat={remat}", f"--config.train.accumulate={self.accumulate}"]
        return " ".join(words)

    def of(self, config: Any) -> Any:
        """Returns the config with this layout."""
        return _changed(config, self.mesh, self.remat, self.accumulate)


def search(config: Any, topology: Topology, tries: int) -> list[Layout]:
    """Compiles the best layouts; those that fit come first, fastest first.

    Args:
      config: the run.
      topology: its devices.
      tries: the most programs that fit; as many that do not fit may come on top.

    Raises:
      Refused: no layout fits the devices.
    """
    candidates = list(_Estimates(config, topology).layouts())
    if not candidates:
        raise Refused(
            f"no mesh of {len(topology.devices)} devices divides {config.data.batch_size} rows, the model's "
            "heads and the texts' lengths; change config.data.batch_size"
        )
    available = topology.chip.available
    # Layouts that seem too large come last: the estimate of memory is the rougher one. Ties: the plainest.
    candidates.sort(
        key=lambda one: (one.memory > available, one.step, _AGAIN[one.remat], one.accumulate)
    )
    tried: list[Layout] = []
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


def _try(config: Any, topology: Topology, layout: Layout) -> Layout:
    try:
        made = plan(compile_step(layout.of(config), topology))
    except DoesNotFit as error:
        return replace(layout, reason=f"{error}")
    if not made.memory.fits:
        return replace(layout, reason=made.memory.overfull(made.chip))
    return replace(layout, plan=made)


class _Estimates:
    """The sizes of a run that all its estimates share.

    They hold for any model: JAX tells what the backward pass reads by the shapes of a loss's residuals, the
    FLOPs of a step are counted, and the parameters' names of axes tell which axes are split.
    """

    def __init__(self, config: Any, topology: Topology):
        self.config, self.topology = config, topology
        task = unread_task(config)
        self.shapes = make_program(task, train_config(config), None).target
        self.axes = task.logical_axes()
        batch = task.batch_shapes(1)
        self.rows = next(iter(batch.values())).shape[0]
        self.lengths = [x.shape[1] for x in batch.values() if len(x.shape) == 2]
        self.flops = model_flops(task, self.shapes.params, batch)
        parameters = jax.tree.leaves(self.shapes.params)
        names = jax.tree.leaves(self.axes, is_leaf=lambda axes: isinstance(axes, tuple))
        self.named = [(x.shape, axes) for x, axes in zip(parameters, names, strict=True)]
        self.parameters = sum(x.size for x in parameters)
        # A token meets a parameter in two FLOPs forward and four backward.
        self.tokens = self.flops / (6 * self.parameters)
        self.kept = {remat: self._kept(remat, batch) for remat in _REMATS}

    def layouts(self) -> Iterator[Layout]:
        """Yields the layouts that divide rows, heads and hidden features, with their estimates."""
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
                    sizes,
                    remat,
                    accumulate,
                    state + self._activations(sizes, remat, accumulate),
                    self._step(sizes, mesh, remat, accumulate),
                )

    def _meshes(self) -> Iterator[dict[str, int]]:
        count = len(self.topology.devices)
        # Heads and lengths are split within a host of GPUs, where links are fast.
        widest = self.topology.sizes[1] if self.topology.chip.platform == "cuda" else count
        heads = (self._sizes("heads") | self._sizes("mlp")) - {1}  # one head is whole everywhere
        for data, fsdp, tensor in itertools.product(_divisors(count), repeat=3):
            seq = count // (data * fsdp * tensor)
            if data * fsdp * tensor * seq != count or self.rows % (data * fsdp):
                continue
            if tensor > 1 and (tensor > min(widest, 16) or any(n % tensor for n in heads)):
                continue
            if seq > 1 and (seq > widest or not self.lengths or any(n % seq for n in self.lengths)):
                continue
            yield dict(zip(MESH_AXES, (data, fsdp, tensor, seq), strict=True))

    def _sizes(self, name: str) -> set[int]:
        """Returns the sizes of the axes of a name."""
        pairs = (pair for shape, axes in self.named for pair in zip(shape, axes, strict=True))
        return {n for n, axis in pairs if axis == name}

    def _kept(self, remat: bool | str, batch: Any) -> tuple[float, float]:
        """Counts the bytes of residuals of a batch: those that ``tensor`` splits, and the rest."""
        task = unread_task(_changed(self.config, {}, remat))

        def residuals(params: Any, batch: Any) -> Any:
            loss = lambda params: task.loss(params, batch, jax.random.key(0))  # noqa: E731
            return jax.vjp(loss, params, has_aux=True)[1]

        def shapes(rows: int) -> list[Any]:
            some = {
                n: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for n, x in batch.items()
            }
            return jax.tree.leaves(jax.eval_shape(residuals, self.shapes.params, some))

        split = {(n,) for n in self._sizes("mlp") - self._sizes("embed")}
        heads = self._sizes("heads") | self._sizes("kv_heads")
        split |= set(itertools.product(heads, self._sizes("head_dim")))
        parts = [0.0, 0.0]
        # Residuals that grow with the rows are activations, the others weights.
        for one, two in zip(shapes(self.rows), shapes(2 * self.rows), strict=True):
            whole = two.shape[-1:] not in split and two.shape[-2:] not in split
            parts[whole] += size_of(two) - size_of(one)
        return parts[0], parts[1]

    def _activations(self, sizes: Mapping[str, int], remat: bool | str, accumulate: int) -> float:
        """Counts the bytes of residuals, of gradients and of a chunk's logits."""
        tensor, parts = sizes["tensor"], sizes["data"] * sizes["fsdp"] * sizes["seq"] * accumulate
        split, whole = self.kept[remat]
        chunks = self.config.get("loss", {}).get("chunks", 1)
        # In float32, with their gradient in the type of the products.
        logits = 6 * self.rows * max(self.lengths, default=0) * max(self._sizes("vocab"), default=0)
        gradients = 4 * self.parameters / (sizes["fsdp"] * tensor) * (2 if accumulate > 1 else 1)
        return (split / tensor + whole + logits / chunks / tensor) / parts + gradients

    def _step(
        self, sizes: Mapping[str, int], mesh: Any, remat: bool | str, accumulate: int
    ) -> float:
        chip, count = self.topology.chip, len(self.topology.devices)
        compute = self.flops * _AGAIN[remat] / (count * chip.flops)
        state = 2 * size_of(self.shapes) / (sizes["fsdp"] * sizes["tensor"]) / chip.bandwidth
        network = seconds(list(self._sent(sizes, accumulate)), self.topology, mesh)
        return max(compute, network) + state

    def _sent(self, sizes: Mapping[str, int], accumulate: int) -> Iterator[Collective]:
        """Yields the collectives of a step.

        Weights are gathered twice and gradients scattered for each microbatch, gradients summed over the
        devices with the same weights; outputs of sublayers are summed over their heads, and keys and values
        go round the parts of a length, forward, backward, and their gradients.
        """
        weights = 2 * self.parameters / sizes["tensor"]
        tokens = self.tokens / (sizes["data"] * sizes["fsdp"] * sizes["seq"])
        summed = sum(
            math.prod(n for n, axis in zip(shape, axes, strict=True) if axis not in _SUMMED)
            for shape, axes in self.named
            if axes[-1:] == ("embed",) and set(axes) & set(_SUMMED)
        )
        memories = sum(
            math.prod(n for n, axis in zip(shape, axes, strict=True) if axis != "embed")
            for shape, axes in self.named
            if "kv_heads" in axes and "embed" in axes
        )
        for axis, kind, size, times in (
            ("fsdp", "all-gather", weights, 2 * accumulate),
            ("fsdp", "reduce-scatter", weights, accumulate),
            ("data", "all-reduce", weights / sizes["fsdp"], 1),
            ("seq", "all-reduce", weights / sizes["fsdp"], 1),
            ("tensor", "all-reduce", 2 * tokens * summed, 2),
            ("seq", "all-gather", 2 * tokens * sizes["seq"] * memories / sizes["tensor"], 3),
        ):
            if sizes[axis] > 1:
                shape = Shape("s8", (int(size),))
                yield Collective(kind, (axis,), (self._group(sizes, axis),), (shape,), times, "")

    def _group(self, sizes: Mapping[str, int], axis: str) -> tuple[int, ...]:
        """Returns the places in the mesh that differ from the first along one axis."""
        places = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        moved = np.moveaxis(places, list(sizes).index(axis), 0)
        return tuple(int(n) for n in moved.reshape(sizes[axis], -1)[:, 0])


def _changed(
    config: Any, mesh: Mapping[str, int], remat: bool | str, accumulate: int | None = None
) -> Any:
    """Returns the config with another mesh, rematerialisation and accumulation."""
    laid = config.copy_and_resolve_references()
    with laid.unlocked(), laid.ignore_type():
        laid.mesh.update(mesh)
        laid.model.remat = remat
        laid.train.accumulate = accumulate or laid.train.accumulate
    return laid


def _divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]


def text(tried: list[Layout]) -> str:
    """Formats a line for each layout, and the flags of the best."""
    lines = [
        f"{'mesh':<28} {'remat':<34} {'accumulate':>10} {'estimate':>10} {'compiled':>10} {'MFU':>7} "
        f"{'holds':>10}  bound"
    ]
    for one in tried:
        cells = (
            f"{mesh_of(one.mesh):<28} {str(one.remat).lower():<34} {one.accumulate:>10} "
            f"{one.step * 1e3:>7.1f} ms"
        )
        if (made := one.plan) is None:
            lines.append(f"{cells} does not fit: {one.reason}")
        else:
            lines.append(
                f"{cells} {made.step * 1e3:>7.1f} ms {100 * made.mfu(made.step):>5.1f} % "
                f"{amount(made.memory.total):>10}  {made.bound}"
            )
    if tried and tried[0].plan is not None:
        lines += ["", f"best: {tried[0].flags}"]
    return "\n".join(lines)


def as_dicts(tried: list[Layout]) -> list[dict[str, Any]]:
    """Returns all figures for JSON."""
    return [
        dict(
            mesh=one.mesh,
            remat=one.remat,
            accumulate=one.accumulate,
            estimated_step_seconds=one.step,
            estimated_memory=one.memory,
            flags=one.flags,
            reason=one.reason,
            plan=None if one.plan is None else one.plan.as_dict(),
        )
        for one in tried
    ]
