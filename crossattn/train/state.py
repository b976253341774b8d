"""What training carries from one step to the next: one immutable pytree, nothing else."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from crossattn.train.trainable import split


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What training changes; leaves may also be shapes or shardings, where those of a state are meant.

    Attributes:
      step: int32 [], batches consumed so far.
      ema: averaged parameters, or None when off.
    """

    step: Any
    params: Any
    opt_state: Any
    ema: Any = None

    @property
    def eval_params(self) -> Any:
        """The parameters to evaluate and to publish: the average where there is one."""
        return self.params if self.ema is None else self.ema


def init_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    *,
    ema: bool = False,
    trained: Collection[str] | None = None,
) -> TrainState:
    """The state before the first step.

    trained: names of the parameters that the optimiser has a state for, None for all.
    """
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(split(params, trained)[0]),
        # A copy, because the step gives both buffers back to XLA and may not share them.
        ema=jax.tree.map(jnp.copy, params) if ema else None,
    )
