"""Attention captured while decoding: chosen layers and heads, one row of the source a token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from crossattn.decode.states import DecodeStep, source_valid
from crossattn.types import Array, Float, Shaped


@dataclass(frozen=True)
class Capture:
    """Cross-attention layers and heads whose weights a search returns in ``Hypotheses.weights``.

    Attributes:
      layers: their numbers, negative ones from the end; None is all.
      heads: the same of heads.

    Raises:
      ValueError: by the search, if the model has no such layer or head, or no source.
    """

    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None

    def of(self, weights: Float[Array, "layers B J heads T S"]) -> Float[Array, "B J T M N S"]:
        """Selects the weights of the layers and heads, tokens before layers."""
        for name, chosen, axis in (("layers", self.layers, 0), ("heads", self.heads, 3)):
            if chosen is not None:
                count = weights.shape[axis]
                if wrong := [i for i in chosen if not -count <= i < count]:
                    raise ValueError(
                        f"capture: {name} has {wrong[0]}; the model has {count} {name}, 0 to {count - 1}."
                    )
                weights = jnp.take(weights, jnp.asarray(chosen) % count, axis=axis)
        return jnp.moveaxis(weights, (0, 3), (-3, -2))


def captured(
    decode_step: DecodeStep,
    captures: Sequence[Capture | None],
    tokens: Shaped[Array, "B J T *F"],
    states: Any,
) -> tuple[Any, Any, list[Any]]:
    """Runs one step and returns logits or vectors, states, and the weights [B J T M N S] of each capture."""
    if not any(captures):
        logits, states = decode_step(tokens, states)
        return logits, states, [None] * len(captures)
    source_valid(states)
    logits, states, weights = decode_step(tokens, states, return_weights=True)
    return logits, states, [c and c.of(weights) for c in captures]


def empty_weights(
    decode_step: DecodeStep,
    capture: Capture | None,
    states: Any,
    shape: tuple[int, int],
    length: int,
) -> Float[Array, "B J T M N S"] | None:
    """Returns zeros for the weights of ``length`` tokens of sequences [B J]; None without a capture."""
    if capture is None:
        return None
    tokens = jax.ShapeDtypeStruct((*shape, 1), jnp.int32)
    one: Any = jax.eval_shape(lambda *a: captured(decode_step, [capture], *a)[2][0], tokens, states)
    return jnp.zeros((*shape, length, *one.shape[3:]), one.dtype)
