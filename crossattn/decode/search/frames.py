"""Decoding of frames: one group after the other in one ``while_loop``, until the model's stop.

A model of frames has ``prefill`` and ``decode_step`` as a model of tokens has. Its step reads groups of
frames [B J T G] and gives ((groups, logits of a stop [B J T]), states); a step reads what the last one gave.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from crossattn.decode.capture import Capture, captured
from crossattn.decode.states import DecodeStep
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.readied import for_decoding
from crossattn.types import AnyArray, Array, Bool, Float, Int, Key


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Groups:
    """Generated groups of frames.

    Attributes:
      groups: [B T G], then 0.
      lengths: [B], number of groups of each row, that of the stop included.
      stopped: [B], whether the model stopped, and not the search.
      weights: [B T M N S], cross-attention of the layers and heads of ``Capture``; None without one.
    """

    groups: Float[AnyArray, "B T G"]
    lengths: Int[AnyArray, " B"]
    stopped: Bool[AnyArray, " B"]
    weights: Float[AnyArray, "B T M N S"] | None = None

    @property
    def segment_ids(self) -> Int[Array, "B T"]:
        """1 for generated groups, 0 for padding."""
        steps = jnp.arange(self.groups.shape[1])
        return (steps < self.lengths[:, None]).astype(jnp.int32)


@dataclass(frozen=True)
class UntilStop:
    """The search of a model of frames: each step reads the group before, until a stop is likely.

    Attributes:
      max_steps: the most groups of a row, T. Static; memory grows with it.
      threshold: the probability of a stop that ends a row.
      min_steps: the fewest groups, at whose number a row may end.
      capture: layers and heads whose cross-attention is returned.

    Raises:
      ValueError: ``max_steps`` is below 1, or ``threshold`` outside (0, 1).
    """

    max_steps: int
    threshold: float = 0.5
    min_steps: int = 1
    capture: Capture | None = None

    def __post_init__(self):
        if self.max_steps < 1:
            raise ValueError(f"max_steps is {self.max_steps}; expected 1 or more.")
        if not 0.0 < self.threshold < 1.0:
            raise ValueError(f"threshold is {self.threshold}; expected a number between 0 and 1.")

    def __call__(
        self, decode_step: DecodeStep, states: Any, first: Float[Array, "B 1 1 G"]
    ) -> Groups:
        """Generates one sequence of groups a row.

        Args:
          decode_step: the model's.
          states: made by the model's ``prefill`` for one sequence a row and ``max_steps`` positions.
          first: what the first step reads.
        """
        B, T, likely = len(first), self.max_steps, jnp.log(self.threshold / (1 - self.threshold))

        def advance(carry: tuple) -> tuple:
            step, group, states, found = carry
            ((group, stop), states), seen = self._run(decode_step, group, states)
            going = ~found.stopped
            stopped = going & (stop[:, 0, 0] > likely) & (step + 1 >= self.min_steps)
            groups = _put(found.groups, jnp.where(going[:, None], group[:, 0, 0], 0.0), step)
            weights = found.weights
            if weights is not None:
                weights = _put(
                    weights, jnp.where(going[:, None, None, None], seen[:, 0, 0], 0), step
                )
            lengths = found.lengths + going
            return (
                step + 1,
                group,
                states,
                Groups(groups, lengths, found.stopped | stopped, weights),
            )

        def unfinished(carry: tuple) -> Array:
            return (carry[0] < T) & ~jnp.all(carry[3].stopped)

        weights = None
        if self.capture is not None:
            shape = jax.eval_shape(lambda *given: self._run(decode_step, *given)[1], first, states)
            weights = jnp.zeros((B, T, *shape.shape[3:]), shape.dtype)
        none = jnp.zeros((B, T, first.shape[-1]), jnp.float32)
        found = Groups(none, jnp.zeros(B, jnp.int32), jnp.zeros(B, bool), weights)
        begun = (jnp.int32(0), first.astype(jnp.float32), states, found)
        return jax.lax.while_loop(unfinished, advance, begun)[-1]

    def _run(self, decode_step: DecodeStep, group: Array, states: Any) -> tuple:
        given, states, [seen] = captured(decode_step, [self.capture], group, states)
        return (given, states), seen


def _put(whole: Array, part: Array, step: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, part[:, None], step, axis=1)


@on_any_mesh
def generate_frames(
    model: Any,
    source: Int[AnyArray, "B S"],
    source_segment_ids: Int[AnyArray, "B S"] | None = None,
    *,
    search: UntilStop,
    key: Key[Array, "*#B"] | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> Groups:
    """Generates frames by a model such as ``TransformerTTS``, refined when all are there.

    Args:
      model: has ``first``, ``refine``, ``prefill`` and ``decode_step``; ``functional.bind(build, params)``
        under ``jax.jit``.
      source: letters.
      source_segment_ids: 0 where they are padding; None is no padding.
      search: how many steps, and when to stop.
      key: turns dropout in the prenet on, one key or one for each row.
      inputs: other inputs of ``prefill``, by name: ``{"speaker": vectors}``.
    """
    model, source = for_decoding(model), jnp.asarray(source)
    segment_ids = None if source_segment_ids is None else jnp.asarray(source_segment_ids)
    B = len(source)
    given = dict(source=source, source_segment_ids=segment_ids, key=key, **(inputs or {}))
    states = model.prefill(B, 1, search.max_steps, **given)
    found = search(model.decode_step, states, model.first(B))
    refined = model.refine(found.groups, found.segment_ids)
    refined = jnp.where(found.segment_ids[..., None] > 0, refined, 0.0)
    return Groups(refined, found.lengths, found.stopped, found.weights)
