"""Program of a run: mesh, optimiser, shapes, shardings and the step, without any computation.

`train` runs the step on the devices of its process; a plan compiles it for devices that are not there.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from crossattn.train import xla
from crossattn.train.config import Task, TrainConfig
from crossattn.train.optim import make_optimizer
from crossattn.train.sharding import on_host, state_sharding, with_sharding
from crossattn.train.state import TrainState, init_state
from crossattn.train.step import make_train_step
from crossattn.train.trainable import split, trained_names


@dataclass(frozen=True)
class Program:
    """Functions of a run, and the shapes of its state.

    Attributes:
      mesh: None for one device.
      schedule: the learning rate by step.
      fresh: key -> TrainState.
      begun: parameters -> TrainState.
      sharding: sharding of each array of the state, None without a mesh.
      target: shapes of the state with their shardings.
      step: see ``make_train_step``.
    """

    mesh: Mesh | None
    schedule: Callable[[Any], Any]
    fresh: Callable[[jax.Array], TrainState]
    begun: Callable[[Any], TrainState]
    sharding: Any
    target: TrainState
    step: Callable


def make_program(task: Task, config: TrainConfig, mesh: Mesh | None) -> Program:
    """Makes the program of a run on a mesh of `make_mesh`.

    Raises:
        ValueError: the optimiser or the step refuses a value.
    """
    axes = task.logical_axes()
    trained = trained_names(axes, config.optim.train)
    optimizer, schedule = make_optimizer(config.optim, config.steps, split(axes, trained)[0])

    def fresh(key: jax.Array) -> TrainState:
        return begun(task.init(key))

    def begun(params: Any) -> TrainState:
        return init_state(params, optimizer, ema=config.ema_decay is not None, trained=trained)

    shapes = jax.eval_shape(fresh, jax.random.key(config.seed))
    sharding = state_sharding(shapes, axes, mesh)
    refuse_offload(config, mesh)
    if config.offload_optimizer:
        sharding = replace(sharding, opt_state=on_host(sharding.opt_state))
    step = make_train_step(
        task.loss,
        optimizer,
        seed=config.seed,
        accumulate=config.accumulate,
        ema_decay=config.ema_decay,
        compute_dtype=None if config.compute_dtype == "float32" else config.compute_dtype,
        prng=config.prng,
        state_sharding=sharding,
        offloaded=config.offload_optimizer,
        trained=trained,
        compiler_options=xla.flags(config.xla_flags),
    )
    target = with_sharding(shapes, sharding)
    return Program(mesh, schedule, fresh, begun, sharding, target, step)


def refuse_offload(config: TrainConfig, mesh: Mesh | None) -> None:
    """Refuses to offload the optimiser of a run without a mesh, by a ValueError."""
    if config.offload_optimizer and mesh is None:
        raise ValueError("offload_optimizer needs a mesh, and there is one device; leave it out")
