"""The plan of generation: what a device reads and sends for each token, and what its caches take.

One turn of the decoding loop makes one token of every row, and reads all weights
that the device has and the caches of its rows. Search is greedy, the parameters lie as in training.
"""

from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from crossattn.train.program import make_program
from crossattn.train.sharding import batch_sharding, everywhere, make_mesh, row_shares, rows_on
from experiments.plan.collectives import collectives
from experiments.plan.compiling import MeshError, compiled_for, unread_task
from experiments.plan.cost import cost
from experiments.plan.hlo import Instruction, Module, body_of
from experiments.plan.network import seconds
from experiments.plan.report import Memory
from experiments.plan.topologies import Topology
from experiments.plan.wording import amount, mesh_of, size_of
from experiments.settings import train_config

_ROWS = 32  # decoded together, where a config does not say


@dataclass(frozen=True)
class DecodingPlan:
    """Of one device, unless said otherwise.

    Attributes:
      rows: sequences decoded together, on all devices.
      length: the most tokens of each.
      caches: bytes of keys and values, of self-attention at full length and of the source.
      read: bytes read and written for one token of every row; sent: those sent.
      compute, memory_time, network: seconds of each, for one token of every row.
      reasons: why fused kernels of attention refused, as ``attend`` tells it.
    """

    topology: str
    chip: str
    mesh: dict[str, int]
    rows: int
    length: int
    caches: int
    memory: Memory
    read: float
    sent: float
    compute: float
    memory_time: float
    network: float
    reasons: tuple[str, ...]

    @property
    def step(self) -> float:
        """Seconds of one token of every row: collectives of a token wait for it."""
        return max(self.compute, self.memory_time) + self.network

    @property
    def bound(self) -> str:
        """What takes longest."""
        times = {"compute": self.compute, "memory": self.memory_time, "network": self.network}
        return max(times, key=lambda name: times[name])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        tokens = self.rows / self.step
        return asdict(self) | dict(
            fits=self.memory.fits,
            step_seconds=self.step,
            bound=self.bound,
            tokens_per_second=tokens,
        )


def plan_decoding(config: Any, topology: Topology) -> DecodingPlan:
    """Compile greedy generation of a config's model for a topology.

    Raises:
      SettingsError: the config has a value that does not fit.
      DoesNotFit: the compiler found no way to keep it in the memory of a device.
      MeshError: the mesh does not fit the devices.
    """
    values = train_config(config)
    task = unread_task(config)
    try:
        mesh = make_mesh(values.mesh, topology.devices)
    except ValueError as error:
        raise MeshError(f"{error}") from error
    params = make_program(task, values, mesh).target.params
    asked = config.get("evaluate", {}).get("decoding", {}).get("batch_size", _ROWS)
    rows = rows_on(mesh, asked)
    generated = task.generation(rows)
    if mesh is None:
        only = SingleDeviceSharding(topology.devices[0])
        params = jax.tree.map(lambda x: _placed(x, only), params)
        arguments = [_placed(x, only) for x in generated.inputs]
    else:
        arguments = [_placed(x, batch_sharding(x.shape, mesh)) for x in generated.inputs]
    jitted = jax.jit(generated.function, out_shardings=everywhere(mesh))
    compiled, reasons = compiled_for(topology, jitted, params, *arguments)
    module, said = Module(compiled.as_text()), compiled.memory_analysis()
    axes = {"data": 1} if mesh is None else dict(mesh.shape)
    body = _loop(module, topology, generated.length)
    spent = cost(module, topology.chip, body)
    sent = collectives(module, axes, body)
    devices = topology.devices[:1] if mesh is None else list(mesh.devices.flat)
    return DecodingPlan(
        topology=topology.name,
        chip=topology.chip.name,
        mesh=axes,
        rows=rows,
        length=generated.length,
        caches=_caches(config, rows, generated) // row_shares(mesh),
        memory=Memory(
            parameters=size_of(params),
            optimizer=0,
            other=0,
            batch=size_of(arguments),
            temporaries=said.temp_size_in_bytes,
            total=said.argument_size_in_bytes + said.temp_size_in_bytes + said.output_size_in_bytes,
            available=topology.chip.available,
        ),
        read=spent.bytes,
        sent=sum(one.sent for one in sent),
        compute=spent.compute,
        memory_time=spent.memory,
        network=seconds(sent, topology, devices),
        reasons=reasons,
    )


def _loop(module: Module, topology: Topology, length: int) -> str:
    """The body of the loop that makes tokens: of the outermost, the one that costs most in all its turns.

    A turn of the scan of an encoder's layers may cost more, but there are few of them.
    """
    entry = module.computations[module.entry]

    def moved(loop: Instruction) -> float:
        turns = module.said_trips(loop, entry) or length
        return turns * cost(module, topology.chip, body_of(loop)).bytes

    loops = [i for i in entry.instructions.values() if i.opcode == "while"]
    return body_of(max(loops, key=moved))


def _caches(config: Any, rows: int, generated: Any) -> int:
    """Bytes of all keys and values that are kept, on all devices."""
    model = config.model
    layers = model.get("decoder_layers") or model.layers
    heads = model.get("num_kv_heads") or model.num_heads
    width = heads * (model.get("head_dim") or model.dim // model.num_heads)
    kept = generated.length + generated.read
    return 2 * layers * rows * kept * width * jnp.dtype(model.dtype).itemsize


def _placed(x: Any, place: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)


def text(plan: DecodingPlan) -> str:
    """What the launcher prints."""
    memory = plan.memory
    rows = [
        ("parameters", memory.parameters),
        ("caches", plan.caches),
        ("temporaries", memory.temporaries),
        ("peak", memory.total),
        ("of the chip's", memory.available),
    ]
    lines = [
        f"{plan.topology}: {plan.chip}, mesh {mesh_of(plan.mesh)}; greedy, {plan.rows} rows of up to "
        f"{plan.length} tokens",
        "",
        "a device holds",
        *(f"  {name:<20} {amount(size):>10}" for name, size in rows),
        "",
        f"for one token of every row a device reads {amount(plan.read)} and sends {amount(plan.sent)}",
        f"  compute {plan.compute * 1e3:8.3f} ms   memory {plan.memory_time * 1e3:8.3f} ms   network "
        f"{plan.network * 1e3:8.3f} ms   bound by {plan.bound}",
        f"  estimated {plan.step * 1e3:.3f} ms a token, {plan.rows / plan.step:,.0f} tokens a second",
        *(f"  {reason}" for reason in plan.reasons),
    ]
    return "\n".join(lines)
