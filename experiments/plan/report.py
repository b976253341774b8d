"""The plan of a training step: what a device holds, sends and computes, and the bound of the step.

The estimate is a roofline. Every kernel takes as long as its products, padded to the chip's matrix unit, or
its bytes, whichever is longer, at the chip's figures; the estimate hides collectives behind kernels, and its
other bound hides none.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax

from experiments.flops import model_flops
from experiments.plan.collectives import Collective, collectives, seconds, totals
from experiments.plan.compiling import Planned, mesh_axes
from experiments.plan.cost import cost
from experiments.plan.hlo import Module
from experiments.plan.kernels import Kernel, attention_kernels
from experiments.settings import train_config

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def amount(count: float) -> str:
    """Formats bytes in the largest unit of which there is one."""
    for unit, size in _UNITS:
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def mesh_of(axes: Mapping[str, int]) -> str:
    """Formats the axes that split anything."""
    return " x ".join(f"{name}={size}" for name, size in axes.items() if size > 1) or "one device"


def size_of(tree: Any) -> int:
    """Sums the bytes that one device has of arrays, or of their shapes with shardings."""

    def part(x: Any) -> int:
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        return math.prod(shape) * x.dtype.itemsize

    return sum(part(x) for x in jax.tree.leaves(tree))


@dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    Attributes:
      temporaries: activations, gathered weights, gradients.
      total: the peak; results in the place of donated arguments count once.
      available: memory of the chip for a program.
      host: the state's bytes in the host's memory.
    """

    parameters: int
    optimizer: int
    other: int
    batch: int
    temporaries: int
    total: int
    available: int
    host: int = 0

    @property
    def fits(self) -> bool:
        """Whether the device has that much."""
        return self.total <= self.available

    def overfull(self, chip: str) -> str:
        """Returns the sentence of a refusal."""
        return (
            f"a device needs {amount(self.total)} of the {amount(self.available)} that a {chip} has for a"
            " program; split more (mesh.fsdp), take fewer rows, train.accumulate or model.remat."
        )


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A roofline estimate and the devices that it is of.

    Attributes:
      mesh: axes and sizes.
      reasons: warnings of ``attend`` about kernels that refused.
      compute, memory_time, network: seconds of each by itself.
    """

    topology: str
    chip: str
    mesh: dict[str, int]
    memory: Memory
    reasons: tuple[str, ...]
    compute: float
    memory_time: float
    network: float

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part."""
        return {"compute": self.compute, "memory": self.memory_time, "network": self.network}

    @property
    def bound(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=lambda name: self.parts[name])

    def told_parts(self, digits: int) -> str:
        """Formats the parts and the bound."""
        parts = [f"{name} {time * 1e3:8.{digits}f} ms" for name, time in self.parts.items()]
        return f"  {'   '.join(parts)}   bound by {self.bound}"


@dataclass(frozen=True, kw_only=True)
class Plan(Estimate):
    """The plan of a training step.

    Attributes:
      remat, accumulate: as in the config.
      parameters: their number.
      rows: rows of a batch.
      tokens: its source and target positions, 0 without any.
      kernels: attention by place.
      kernels_time: seconds of all kernels.
    """

    remat: bool | str
    accumulate: int
    parameters: int
    rows: int
    tokens: int
    collectives: tuple[Collective, ...]
    kernels: dict[str, tuple[Kernel, ...]]
    model_flops: int
    hardware_flops: float
    kernels_time: float
    peak_flops: float
    compile_seconds: float
    unknown_loops: int

    @property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(self.mesh.values())

    @property
    def sent(self) -> float:
        """Bytes that a device sends in a step."""
        return sum(one.sent for one in self.collectives)

    @property
    def step(self) -> float:
        """Seconds of a step that hides its collectives."""
        return max(self.kernels_time, self.network)

    @property
    def step_unhidden(self) -> float:
        """Seconds of a step that hides nothing."""
        return self.kernels_time + self.network

    @property
    def filled(self) -> float:
        """The share of its peak at which a device computes, by the shapes of its products."""
        return self.hardware_flops / (self.compute * self.peak_flops) if self.compute else 0.0

    def mfu(self, step: float) -> float:
        """Returns model FLOPs a second as a share of the devices' peak."""
        return self.model_flops / (self.devices * self.peak_flops * step)

    def as_dict(self) -> dict[str, Any]:
        """Returns all figures for JSON."""
        fields = asdict(self)
        for one, told in zip(self.collectives, fields["collectives"], strict=True):
            told["sent"] = one.sent
            del told["groups"]
        return fields | dict(
            devices=self.devices,
            fits=self.memory.fits,
            sent=self.sent,
            step_seconds=self.step,
            step_seconds_unhidden=self.step_unhidden,
            mfu=self.mfu(self.step),
            mfu_unhidden=self.mfu(self.step_unhidden),
            bound=self.bound,
            filled=self.filled,
        )


def plan(planned: Planned) -> Plan:
    """Makes the plan of a compiled step."""
    topology, axes = planned.topology, mesh_axes(planned.mesh)
    chip, module = topology.chip, Module(planned.compiled.as_text())
    sent, spent = collectives(module, axes), cost(module, chip)
    params, batch = planned.program.target.params, planned.batch
    members = train_config(planned.config).members
    rows = next(iter(batch.values())).shape
    return Plan(
        topology=topology.name,
        chip=chip.name,
        mesh=axes,
        remat=planned.config.model.get("remat", False),
        accumulate=planned.config.train.accumulate,
        parameters=sum(x.size for x in jax.tree.leaves(params)),
        rows=rows[0] * rows[1] if members else rows[0],
        tokens=sum(batch[name].size for name in ("source", "target_in") if name in batch),
        memory=_memory(planned),
        collectives=tuple(sent),
        kernels=attention_kernels(module),
        reasons=planned.reasons,
        model_flops=model_flops(planned.task, params, batch, len(members)),
        hardware_flops=spent.flops,
        compute=spent.compute,
        memory_time=spent.memory,
        kernels_time=spent.kernels,
        network=seconds(sent, topology, planned.mesh),
        peak_flops=chip.flops,
        compile_seconds=planned.seconds,
        unknown_loops=module.unknown_loops,
    )


def _memory(planned: Planned) -> Memory:
    state, held = planned.program.target, planned.compiled.memory_analysis()
    parameters, optimizer = size_of(state.params), size_of(state.opt_state)
    results = held.output_size_in_bytes - held.alias_size_in_bytes
    arguments = held.argument_size_in_bytes + held.temp_size_in_bytes
    return Memory(
        parameters=parameters,
        optimizer=optimizer,
        other=size_of(state) - parameters - optimizer,
        batch=size_of(planned.batch),
        temporaries=held.temp_size_in_bytes,
        total=arguments + results + held.generated_code_size_in_bytes,
        available=planned.topology.chip.available,
        host=held.host_argument_size_in_bytes,
    )


def text(plan: Plan) -> str:
    """Formats the plan of a step."""
    memory = plan.memory
    rows = f"{plan.rows:,} rows" + (f" of {plan.tokens:,} tokens" if plan.tokens else "")
    held = {
        "parameters": memory.parameters,
        "optimiser": memory.optimizer,
        "other state": memory.other,
        "batch": memory.batch,
        "temporaries": memory.temporaries,
        "peak": memory.total,
        "of the chip's": memory.available,
    } | ({"on the host": memory.host} if memory.host else {})
    share = plan.hardware_flops * plan.devices / plan.model_flops
    lines = [
        f"{plan.topology}: {plan.devices} x {plan.chip}, mesh {mesh_of(plan.mesh)}; "
        f"{plan.parameters / 1e6:,.1f} M parameters, {rows} a step (compiled in "
        f"{plan.compile_seconds:.0f} s)",
        "",
        *told_held(held),
        "",
        f"a device sends {amount(plan.sent)} a step",
        *(
            f"  {kind:<20} over {axes:<12} {amount(sent):>10}"
            for (kind, axes), sent in totals(plan.collectives).items()
        ),
        "",
        "attention",
        *(
            f"  {place.replace('_', ' '):<20} {_told_kernels(kernels)}"
            for place, kernels in plan.kernels.items()
        ),
        *(f"  {reason}" for reason in plan.reasons),
        "",
        f"a step has {plan.model_flops:.3g} model FLOPs; a device computes {plan.hardware_flops:.3g}, all "
        f"{share:.2f} times the model's, at {100 * plan.filled:.0f} % of its peak by their shapes",
        plan.told_parts(2),
        f"  estimated step {plan.step * 1e3:.2f} ms, MFU {100 * plan.mfu(plan.step):.1f} %; with nothing "
        f"hidden behind computing {plan.step_unhidden * 1e3:.2f} ms, "
        f"{100 * plan.mfu(plan.step_unhidden):.1f} %",
    ]
    if plan.unknown_loops:
        lines.append(
            f"  {plan.unknown_loops} loops run an unknown number of times, and count as running once"
        )
    return "\n".join(lines)


def told_held(held: Mapping[str, int]) -> list[str]:
    """Formats the memory of a device."""
    return ["a device holds", *(f"  {name:<20} {amount(size):>10}" for name, size in held.items())]


def _told_kernels(kernels: tuple[Kernel, ...]) -> str:
    if not kernels:
        return "no fused kernel: XLA's own operations"
    return ", ".join(
        f"{one.name} ({'backward' if one.backward else 'forward'}, {one.runs} times)"
        for one in kernels
    )
