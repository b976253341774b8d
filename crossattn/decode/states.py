"""What searches do to a model's decoding states; no other file here knows what is inside them.

States are a tuple of ``DecoderState``, one a layer, or one ``DecoderState`` with a leading axis L (scanned).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from crossattn.nn.blocks import DecoderState
from crossattn.types import Array, Bool, Float, Int

StepFn = Callable[..., tuple[Array, Any]]
"""``(tokens [B J T], states, index) -> (logits [B J T V], states)``: a model's ``step``."""


def map_layers(states: Any, change: Callable[[DecoderState], DecoderState]) -> Any:
    """``change`` of each layer's state; of the one stacked state of scanned layers."""
    return tuple(map(change, states)) if isinstance(states, tuple) else change(states)


def bare(states: Any) -> Any:
    """Without what the last step left behind, as a loop carries them."""

    def strip(state: DecoderState) -> DecoderState:
        cache: Any = state.cache
        return replace(state, cache=replace(cache, ancestors=None), weights=None)

    return map_layers(states, strip)


def with_ancestors(states: Any, ancestors: Int[Array, "B J X"]) -> Any:
    """Each beam reads its past from the slots of the beams that wrote it; see ``ops/beams.py``."""

    def share(state: DecoderState) -> DecoderState:
        cache: Any = state.cache
        *lead, size = cache.keys.shape[:-2]
        J, length = ancestors.shape[1], size // ancestors.shape[1]
        table = ancestors[..., :length]
        table = jnp.pad(table, ((0, 0), (0, 0), (0, length - table.shape[-1])))
        table = jnp.broadcast_to(table, (*lead, J, length))
        return replace(state, cache=replace(cache, ancestors=table))

    return map_layers(states, share)


def beginning_at(states: Any, first: Int[Array, " B"]) -> Any:
    """States with empty caches whose rows will begin at that position; what comes before is padding."""

    def begin(state: DecoderState) -> DecoderState:
        cache: Any = state.cache
        lead = cache.keys.shape[:-2]
        cache = replace(
            cache,
            first=jnp.broadcast_to(first, lead[:-1]),
            valid=jnp.zeros(lead, bool),
            positions=jnp.zeros(lead, jnp.int32),
        )
        return replace(state, cache=cache)

    return map_layers(states, begin)


def rewound(states: Any, lengths: Int[Array, " B"]) -> Any:
    """States of ``rowwise`` whose caches hold only the first ``lengths`` slots of each row.

    What stands behind them is masked by causality, and written over by the next steps.
    """

    def rewind(state: DecoderState) -> DecoderState:
        cache: Any = state.cache
        return replace(
            state, cache=replace(cache, length=jnp.broadcast_to(lengths, cache.length.shape))
        )

    return map_layers(states, rewind)


def per_row(states: Any, batch: int) -> Any:
    """States whose rows may hold different numbers of slots, for ``rowwise``."""

    def lift(state: DecoderState) -> DecoderState:
        cache: Any = state.cache
        length = jnp.broadcast_to(cache.length[..., None], (*cache.length.shape, batch))
        return replace(state, cache=replace(cache, length=length))

    return map_layers(states, lift)


def rowwise(step: StepFn) -> StepFn:
    """A step whose ``index`` is [B]: every row stands at a place of its own; states of ``per_row``.

    It is the model's own step, mapped over rows: products with the weights stay whole.
    """

    def each(tokens: Int[Array, "B J T"], states: Any, index: Int[Array, " B"], **options: Any):
        axis = 0 if isinstance(states, tuple) else 1

        def one(tokens, states, index):
            states = map_layers(states, lambda state: _rows(state, axis, jnp.expand_dims))
            logits, states = step(tokens[None], states, index, **options)
            states = map_layers(states, lambda state: _rows(state, axis, jnp.squeeze))
            return logits[0], states

        return jax.vmap(one, (0, axis, 0), (0, axis))(tokens, states, index)

    return each


def _rows(state: DecoderState, axis: int, change: Callable) -> DecoderState:
    """The batch axis added to or taken from every array but a cache's length, which has none."""
    cache: Any = state.cache
    state = replace(state, cache=replace(cache, length=None))
    state = jax.tree.map(lambda x: change(x, axis), state)
    changed: Any = state.cache
    return replace(state, cache=replace(changed, length=cache.length))


def source_valid(states: Any) -> Bool[Array, "B S"]:
    """Which places of the source may be read.

    Raises:
      ValueError: the model reads no source.
    """
    state = states[0] if isinstance(states, tuple) else jax.tree.map(lambda x: x[0], states)
    if state.source is None:
        raise ValueError(
            "this model reads no source, so it has no cross-attention to capture or to cover; "
            "leave capture and coverage out."
        )
    if state.source.valid is None:
        return jnp.ones(state.source.keys.shape[:-2], bool)
    return state.source.valid


def read_weights(states: Any) -> Float[Array, "L B J N T S"]:
    """The cross-attention weights of the last step, of all layers."""
    if isinstance(states, tuple):
        return jnp.stack([state.weights for state in states])
    return states.weights
