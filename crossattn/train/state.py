"""State of training: one immutable pytree, which a step maps to the next."""

import base64
import json
from collections.abc import Collection, Mapping
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


def to_json(state: Any) -> dict[str, Any]:
    """Encodes a data iterator's state, JSON-able or bytes."""
    if isinstance(state, bytes):
        return {"bytes": base64.b64encode(state).decode()}
    return {"json": json.loads(json.dumps(state, default=lambda x: x.item()))}


def from_json(saved: Mapping[str, Any]) -> Any:
    """Decodes a state that ``to_json`` encoded."""
    return base64.b64decode(saved["bytes"]) if "bytes" in saved else saved["json"]
