"""Program of a run: mesh, optimiser, shapes, shardings and the step, without any computation.

`train` runs the step on the devices of its process; a plan compiles it for devices that are not there.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from crossattn.train import members as several
from crossattn.train import xla
from crossattn.train.config import Task, TrainConfig
from crossattn.train.optim import make_optimizer, make_schedule
from crossattn.train.sharding import on_host, state_sharding, with_sharding
from crossattn.train.state import TrainState, init_state
from crossattn.train.step import make_train_step
from crossattn.train.trainable import split, trained_names


@dataclass(frozen=True)
class Program:
    """Functions of a run, and the shapes of its state.

    Attributes:
      mesh: None for one device.
      schedule: the learning rate by step; of several members' where it differs.
      key: of the initial parameters; of members [members].
      init: key -> parameters.
      begun: parameters -> TrainState.
      sharding: sharding of each array of the state, None without a mesh.
      target: shapes of the state with their shardings.
      step: see ``make_train_step``.
      member: (members' parameters, index) -> parameters of one, placed as those of a run alone.
      along: the mesh axis that splits members.
    """

    mesh: Mesh | None
    schedule: Callable[[Any], Any]
    key: jax.Array
    init: Callable[[jax.Array], Any]
    begun: Callable[[Any], TrainState]
    sharding: Any
    target: TrainState
    step: Callable
    member: Callable[[Any, int], Any]
    along: str | None

    def fresh(self, key: jax.Array) -> TrainState:
        """Returns the state of a new run."""
        return self.begun(self.init(key))


def make_program(task: Task, config: TrainConfig, mesh: Mesh | None) -> Program:
    """Makes the program of a run on a mesh of `make_mesh`.

    Raises:
        ValueError: the optimiser or the step refuses a value.
    """
    axes = task.logical_axes()
    trained = trained_names(axes, config.optim.train)
    trained_axes, members = split(axes, trained)[0], config.members
    along = several.axis_of(mesh, len(members))

    def optimizer(**numbers: Any) -> optax.GradientTransformation:
        return make_optimizer(config.optim, config.steps, trained_axes, numbers)[0]

    def begun_one(params: Any, numbers: Any) -> TrainState:
        ema = config.ema_decay is not None
        return init_state(params, optimizer(**numbers), ema=ema, trained=trained)

    def begun(params: Any) -> TrainState:
        if not members:
            return begun_one(params, {})
        each = several.mapped(begun_one, 0, several.STATE, along)
        return each(params, several.swept(members))

    key, init, numbers = jax.random.key(config.seed), task.init, {}
    if members:
        key, numbers = several.keys(members), members[0].optim
        init = several.mapped(task.init, 0, 0, along)

    one = jax.eval_shape(lambda key: begun_one(task.init(key), numbers), jax.random.key(0))
    sharding = state_sharding(one, axes, mesh)
    alone = None if sharding is None else sharding.params
    member = jax.jit(several.take, out_shardings=alone)
    if members:
        sharding = several.stacked_sharding(sharding, along)
    refuse_offload(config, mesh)
    if config.offload_optimizer:
        places: Any = sharding
        sharding = replace(places, opt_state=on_host(places.opt_state))
    step = make_train_step(
        task.loss,
        optimizer if members else optimizer(),
        seed=config.seed,
        members=members,
        along=along,
        accumulate=config.accumulate,
        ema_decay=config.ema_decay,
        compute_dtype=None if config.compute_dtype == "float32" else config.compute_dtype,
        prng=config.prng,
        state_sharding=sharding,
        offloaded=config.offload_optimizer,
        trained=trained,
        compiler_options=xla.flags(config.xla_flags),
    )
    shapes = jax.eval_shape(lambda key: begun(init(key)), key)
    target = with_sharding(shapes, sharding)
    return Program(
        mesh, schedule_of(config), key, init, begun, sharding, target, step, member, along
    )


def schedule_of(config: TrainConfig) -> Callable[[Any], Any]:
    """Returns the learning rate by step; of members that differ in it, that of each."""
    each = [replace(config.optim, **member.optim) for member in config.members if member.optim]
    if not each:
        return make_schedule(config.optim, config.steps)
    schedules = [make_schedule(own, config.steps) for own in each]
    return lambda step: np.stack([schedule(step) for schedule in schedules])


def refuse_offload(config: TrainConfig, mesh: Mesh | None) -> None:
    """Refuses to offload the optimiser of a run without a mesh, by a ValueError."""
    if config.offload_optimizer and mesh is None:
        raise ValueError("offload_optimizer needs a mesh, and there is one device; leave it out")
