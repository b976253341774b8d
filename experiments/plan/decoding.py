"""The plan of generation: what a device holds, and what it reads and sends for each token.

One turn of the decoding loop makes one token of every row, and reads all weights of the device and the caches
of its rows. Search is greedy, and the parameters lie as in training.
"""

from dataclasses import asdict, dataclass
from typing import Any

import jax

import crossattn as xa
from crossattn.train.program import make_program
from crossattn.train.sharding import everywhere, make_mesh, row_shares, rows_on
from experiments.launch import Refused
from experiments.plan.collectives import collectives, seconds
from experiments.plan.compiling import compiled_for, mesh_axes, placed, unread_task
from experiments.plan.cost import cost
from experiments.plan.hlo import Instruction, Module, body_of
from experiments.plan.report import Estimate, Memory, amount, mesh_of, size_of, told_held
from experiments.plan.topologies import Topology
from experiments.settings import train_config

_ROWS = 32  # rows decoded together, where the config does not say


@dataclass(frozen=True, kw_only=True)
class DecodingPlan(Estimate):
    """The plan of generation; times are those of one token of every row.

    Attributes:
      rows: sequences decoded together, on all devices.
      length: the most tokens of each.
      caches: bytes of keys and values, of self-attention at full length and of the source.
      read: bytes read and written for one token of every row.
      sent: bytes sent for one token of every row.
    """

    rows: int
    length: int
    caches: int
    read: float
    sent: float

    @property
    def step(self) -> float:
        """Seconds of one token of every row; its collectives hide behind nothing."""
        return max(self.compute, self.memory_time) + self.network

    def as_dict(self) -> dict[str, Any]:
        """Returns all figures for JSON."""
        return asdict(self) | dict(
            fits=self.memory.fits,
            step_seconds=self.step,
            bound=self.bound,
            tokens_per_second=self.rows / self.step,
        )


def plan_decoding(config: Any, topology: Topology) -> DecodingPlan:
    """Compiles greedy generation of a config's model for a topology, and makes its plan.

    Raises:
      SettingsError: the config has a value that does not fit.
      DoesNotFit: the compiler found no way to keep it in the memory of a device.
      Refused: the mesh does not fit the devices.
    """
    values = train_config(config)
    task = unread_task(config)
    try:
        mesh = make_mesh(values.mesh, topology.devices)
    except ValueError as error:
        raise Refused(f"{error}") from error
    params = make_program(task, values, mesh).target.params
    if mesh is None:
        params = placed(params, None, topology)
    asked = config.get("evaluate", {}).get("decoding", {}).get("batch_size", _ROWS)
    rows = rows_on(mesh, asked)
    generated = task.generation(rows)
    inputs = placed(generated.inputs, mesh, topology)
    jitted = jax.jit(generated.function, out_shardings=everywhere(mesh))
    compiled, reasons = compiled_for(topology, jitted, params, *inputs)
    module, held = Module(compiled.as_text()), compiled.memory_analysis()
    body = _loop(module, topology, generated.length)
    spent = cost(module, topology.chip, body)
    sent = collectives(module, mesh_axes(mesh), body)
    return DecodingPlan(
        topology=topology.name,
        chip=topology.chip.name,
        mesh=mesh_axes(mesh),
        rows=rows,
        length=generated.length,
        caches=_caches(task, params, generated, rows) // row_shares(mesh),
        memory=Memory(
            parameters=size_of(params),
            optimizer=0,
            other=0,
            batch=size_of(inputs),
            temporaries=held.temp_size_in_bytes,
            total=held.argument_size_in_bytes + held.temp_size_in_bytes + held.output_size_in_bytes,
            available=topology.chip.available,
        ),
        read=spent.bytes,
        sent=sum(one.sent for one in sent),
        compute=spent.compute,
        memory_time=spent.memory,
        network=seconds(sent, topology, mesh),
        reasons=reasons,
    )


def _loop(module: Module, topology: Topology, length: int) -> str:
    """Returns the body of the loop that makes tokens: the outermost loop that costs most in all its turns.

    A turn of the scan of an encoder's layers may cost more, but there are few of them.
    """
    entry = module.computations[module.entry]

    def moved(loop: Instruction) -> float:
        turns = module.trips(loop, entry) or length
        return turns * cost(module, topology.chip, body_of(loop)).bytes

    loops = [i for i in entry.instructions.values() if i.opcode == "while"]
    return body_of(max(loops, key=moved))


def _caches(task: Any, params: Any, generated: Any, rows: int) -> int:
    """Counts the bytes of the keys and values in the states that a search begins with, on all devices."""

    def cached(params: Any, *source: Any) -> Any:
        reads = dict(zip(("source", "source_segment_ids"), source, strict=False))
        states = task.bind(params).prefill(rows, 1, generated.length, **reads)
        memories = jax.tree.leaves(states, is_leaf=_is_memory)
        return [(memory.keys, memory.values) for memory in memories if _is_memory(memory)]

    kept = jax.tree.leaves(jax.eval_shape(cached, params, *generated.inputs))
    return sum(x.size * x.dtype.itemsize for x in kept)


def _is_memory(x: Any) -> bool:
    return isinstance(x, xa.Memory)


def text(plan: DecodingPlan) -> str:
    """Formats the plan of generation."""
    memory = plan.memory
    held = {
        "parameters": memory.parameters,
        "caches": plan.caches,
        "temporaries": memory.temporaries,
        "peak": memory.total,
        "of the chip's": memory.available,
    }
    return "\n".join(
        [
            f"{plan.topology}: {plan.chip}, mesh {mesh_of(plan.mesh)}; greedy, {plan.rows} rows of up to "
            f"{plan.length} tokens",
            "",
            *told_held(held),
            "",
            f"for one token of every row a device reads {amount(plan.read)} and sends {amount(plan.sent)}",
            plan.told_parts(3),
            f"  estimated {plan.step * 1e3:.3f} ms a token, {plan.rows / plan.step:,.0f} tokens a second",
            *(f"  {reason}" for reason in plan.reasons),
        ]
    )
