"""The plan of a run: what a device holds, sends and computes, and what bounds a step.

The estimate is a roofline. Every kernel takes as long as its products, padded to the
chip's matrix unit, or its bytes, whichever is longer, at the chip's figures; collectives are hidden behind
kernels in the estimate, and in its other bound behind nothing.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import jax

from experiments.flops import model_flops
from experiments.plan.collectives import Collective, collectives, totals
from experiments.plan.compiling import Planned, unread_task
from experiments.plan.cost import cost
from experiments.plan.hlo import Module
from experiments.plan.kernels import Kernel, attention_kernels
from experiments.plan.network import seconds
from experiments.plan.wording import amount, mesh_of, size_of


@dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    Attributes:
      temporaries: activations, gathered weights, gradients.
      total: all at once, results that take the place of what was given counted once.
      host: of the state, what lies in the host's memory instead.
      available: of the chip, for a program.
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
        """One sentence where it does not."""
        return (
            f"a device needs {amount(self.total)} of the {amount(self.available)} that a {chip} has for a"
            " program; split more (mesh.fsdp), take fewer rows, train.accumulate or model.remat."
        )


@dataclass(frozen=True)
class Plan:
    """All that is told of a step.

    Attributes:
      mesh: axes and sizes; remat, accumulate: as in the config.
      parameters: of the model.
      rows: of a batch; tokens: its positions, source and target, 0 where it has none.
      collectives: all that a step has.
      kernels: attention by place.
      reasons: why places have no fused kernel, as ``attend`` tells it.
      compute, memory_time, network: seconds of each by itself; kernels_time: of all kernels.
    """

    topology: str
    chip: str
    mesh: dict[str, int]
    remat: bool | str
    accumulate: int
    parameters: int
    rows: int
    tokens: int
    memory: Memory
    collectives: tuple[Collective, ...]
    kernels: dict[str, tuple[Kernel, ...]]
    reasons: tuple[str, ...]
    model_flops: int
    hardware_flops: float
    compute: float
    memory_time: float
    kernels_time: float
    network: float
    peak_flops: float
    compile_seconds: float
    unknown_loops: int

    @property
    def devices(self) -> int:
        """Of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def sent(self) -> float:
        """Bytes that a device sends in a step."""
        return sum(one.sent for one in self.collectives)

    @property
    def step(self) -> float:
        """Seconds, collectives hidden."""
        return max(self.kernels_time, self.network)

    @property
    def step_unhidden(self) -> float:
        """Seconds, nothing hidden."""
        return self.kernels_time + self.network

    @property
    def bound(self) -> str:
        """What takes longest."""
        times = {"compute": self.compute, "memory": self.memory_time, "network": self.network}
        return max(times, key=lambda name: times[name])

    @property
    def filled(self) -> float:
        """The share of its peak at which a device computes, by the shapes of its products."""
        return self.hardware_flops / (self.compute * self.peak_flops) if self.compute else 0.0

    def mfu(self, step: float) -> float:
        """Model FLOPs a second, as a share of the devices' peak."""
        return self.model_flops / (self.devices * self.peak_flops * step)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        fields = asdict(self)
        fields["collectives"] = [
            dict(
                kind=one.kind,
                axes=one.axes,
                arrays=[dict(dtype=a.dtype, sizes=a.sizes) for a in one.arrays],
                times=one.times,
                sent=one.sent,
                scope=one.scope,
            )
            for one in self.collectives
        ]
        fields |= dict(
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
        return fields


def plan(planned: Planned) -> Plan:
    """Read a compiled step."""
    chip, module = planned.topology.chip, Module(planned.text)
    sent: list[Collective] = collectives(module, planned.axes)
    spent = cost(module, chip)
    state = planned.program.target
    task = unread_task(planned.config)
    devices = planned.topology.devices[:1] if planned.mesh is None else planned.mesh.devices.flat
    return Plan(
        topology=planned.topology.name,
        chip=chip.name,
        mesh=planned.axes,
        remat=planned.config.model.get("remat", False),
        accumulate=planned.config.train.accumulate,
        parameters=_size(state.params),
        rows=next(iter(planned.batch.values())).shape[0],
        tokens=sum(planned.batch[k].size for k in ("source", "target_in") if k in planned.batch),
        memory=memory(planned),
        collectives=tuple(sent),
        kernels=attention_kernels(module),
        reasons=planned.reasons,
        model_flops=model_flops(task, state.params, planned.batch),
        hardware_flops=spent.flops,
        compute=spent.compute,
        memory_time=spent.memory,
        kernels_time=spent.kernels,
        network=seconds(sent, planned.topology, list(devices)),
        peak_flops=chip.flops,
        compile_seconds=planned.seconds,
        unknown_loops=module.unknown_loops,
    )


def memory(planned: Planned) -> Memory:
    """What one device holds."""
    state, said = planned.program.target, planned.compiled.memory_analysis()
    parameters, optimizer = size_of(state.params), size_of(state.opt_state)
    whole, batch = size_of(state), size_of(planned.batch)
    results = said.output_size_in_bytes - said.alias_size_in_bytes
    total = (
        said.argument_size_in_bytes
        + said.temp_size_in_bytes
        + results
        + said.generated_code_size_in_bytes
    )
    return Memory(
        parameters=parameters,
        optimizer=optimizer,
        other=whole - parameters - optimizer,
        batch=batch,
        temporaries=said.temp_size_in_bytes,
        total=total,
        available=planned.topology.chip.available,
        host=said.host_argument_size_in_bytes,
    )


def _size(tree: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))


def text(plan: Plan) -> str:
    """What the launcher prints."""
    memory = plan.memory
    lines = [
        f"{plan.topology}: {plan.devices} x {plan.chip}, mesh {mesh_of(plan.mesh)}; "
        f"{plan.parameters / 1e6:,.1f} M parameters, {_counted(plan)} a step (compiled in "
        f"{plan.compile_seconds:.0f} s)",
        "",
        "a device holds",
        *_held(memory),
        "",
        f"a device sends {amount(plan.sent)} a step",
        *(
            f"  {kind:<20} over {axes:<12} {amount(sent):>10}"
            for (kind, axes), sent in totals(plan.collectives).items()
        ),
        "",
        "attention",
        *(
            f"  {place.replace('_', ' '):<20} {_told(kernels)}"
            for place, kernels in plan.kernels.items()
        ),
        *(f"  {reason}" for reason in plan.reasons),
        "",
        f"a step has {plan.model_flops:.3g} model FLOPs; a device computes {plan.hardware_flops:.3g}, all "
        f"{plan.hardware_flops * plan.devices / plan.model_flops:.2f} times the model's, at "
        f"{100 * plan.filled:.0f} % of its peak by their shapes",
        f"  compute {plan.compute * 1e3:8.2f} ms   memory {plan.memory_time * 1e3:8.2f} ms   network "
        f"{plan.network * 1e3:8.2f} ms   bound by {plan.bound}",
        f"  estimated step {plan.step * 1e3:.2f} ms, MFU {100 * plan.mfu(plan.step):.1f} %; with nothing "
        f"hidden behind computing {plan.step_unhidden * 1e3:.2f} ms, "
        f"{100 * plan.mfu(plan.step_unhidden):.1f} %",
    ]
    if plan.unknown_loops:
        lines.append(
            f"  {plan.unknown_loops} loops run an unknown number of times, and count as running once"
        )
    return "\n".join(lines)


def _counted(plan: Plan) -> str:
    return f"{plan.rows:,} rows" + (f" of {plan.tokens:,} tokens" if plan.tokens else "")


def _held(memory: Memory) -> list[str]:
    rows = [
        ("parameters", memory.parameters),
        ("optimiser", memory.optimizer),
        ("other state", memory.other),
        ("batch", memory.batch),
        ("temporaries", memory.temporaries),
        ("peak", memory.total),
        ("of the chip's", memory.available),
    ]
    rows += [("on the host", memory.host)] if memory.host else []
    return [f"  {name:<20} {amount(size):>10}" for name, size in rows]


def _told(kernels: tuple[Kernel, ...]) -> str:
    if not kernels:
        return "no fused kernel: XLA's own operations"
    return ", ".join(
        f"{one.name} ({'backward' if one.backward else 'forward'}, {one.runs} times)"
        for one in kernels
    )
