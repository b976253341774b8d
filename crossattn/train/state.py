"""State of training: one immutable pytree, which a step maps to the next."""

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
    """State of training; leaves are arrays, shapes or shardings.

    Attributes:
      step: int32 [], batches consumed so far.
      ema: averaged parameters, or None.
    """

    step: Any
    params: Any
    opt_state: Any
    ema: Any = None

    @property
    def eval_params(self) -> Any:
        """Parameters to evaluate and to publish: the average if there is one."""
        return self.params if self.ema is None else self.ema


def init_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    *,
    ema: bool = False,
    trained: Collection[str] | None = None,
) -> TrainState:
    """Returns the state before the first step.

    trained: names of the parameters with an optimiser state, None for all.
    """
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(split(params, trained)[0]),
        # A copy, because the step donates both buffers.
        ema=jax.tree.map(jnp.copy, params) if ema else None,
    )
