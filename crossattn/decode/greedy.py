"""Greedy decoding: the most likely token at each step, in one ``while_loop`` that ends early."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from crossattn.decode.hypotheses import Hypotheses
from crossattn.types import Array, Float, Int

StepFn = Callable[[Array, Any, Array], tuple[Array, Any]]
"""``(tokens [B J 1], states, index) -> (logits [B J 1 V], states)``: a model's ``step``."""


def greedy(
    step: StepFn,
    states: Any,
    *,
    batch: int,
    max_length: int,
    bos_id: int = 1,
    eos_id: int = 2,
    pad_id: int = 0,
) -> Hypotheses:
    """One hypothesis a row, from ``bos_id`` until ``eos_id`` or ``max_length``.

    Args:
      step: a model's next-token function.
      states: what the model's ``start`` made for one beam and at least ``max_length`` positions.
      batch: rows, B.
      max_length: the most tokens generated, ``eos_id`` included.

    Returns:
      Hypotheses with J = 1; the score is the sum of log-probabilities.
    """
    first = (
        jnp.zeros((), jnp.int32),
        jnp.full((batch, max_length), pad_id, jnp.int32),
        jnp.full((batch,), bos_id, jnp.int32),
        jnp.zeros((batch,), jnp.float32),
        jnp.zeros((batch,), bool),
        states,
    )

    def unfinished(loop):
        index, _, _, _, done, _ = loop
        return (index < max_length) & ~jnp.all(done)

    def advance(loop):
        index, tokens, last, scores, done, states = loop
        logits, states = step(last[:, None, None], states, index)
        logits = logits[:, 0, 0].astype(jnp.float32)
        best, log_p = _most_likely(logits)
        scores = jnp.where(done, scores, scores + log_p)
        best = jnp.where(done, pad_id, best)
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, best[:, None], index, axis=1)
        return index + 1, tokens, best, scores, done | (best == eos_id), states

    _, tokens, _, scores, _, _ = jax.lax.while_loop(unfinished, advance, first)
    return Hypotheses.of(tokens[:, None], scores[:, None], pad_id)


def _most_likely(logits: Float[Array, "B V"]) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """The first of the most likely tokens, and its log-probability.

    On CPU, XLA's argmax takes four times as long as these plain reductions.
    """
    V = logits.shape[-1]
    highest = jnp.max(logits, axis=-1, keepdims=True)
    first = jnp.min(jnp.where(logits == highest, jnp.arange(V), V), axis=-1)
    log_p = -jnp.log(jnp.sum(jnp.exp(logits - highest), axis=-1))
    return jnp.minimum(first, V - 1).astype(jnp.int32), log_p  # V - 1: all are NaN
