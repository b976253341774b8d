"""Beam search with a length penalty and an early stop, in one ``while_loop``.

Sources are read once and shared by the beams of a row; only self-attention caches follow the beams.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from crossattn.decode.greedy import StepFn
from crossattn.decode.hypotheses import Hypotheses
from crossattn.nn.decoding import take_beams
from crossattn.types import Array, Float, Int

_NEVER = -1e9


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Beams:
    """J live prefixes and the J best finished hypotheses of each row."""

    index: Int[Array, ""]
    live: Int[Array, "B J T"]
    live_scores: Float[Array, "B J"]
    done: Int[Array, "B J T"]
    done_scores: Float[Array, "B J"]
    states: Any


def beam_search(
    step: StepFn,
    states: Any,
    *,
    batch: int,
    beams: int,
    max_length: int,
    length_penalty: float = 0.6,
    bos_id: int = 1,
    eos_id: int = 2,
    pad_id: int = 0,
) -> Hypotheses:
    """The ``beams`` best hypotheses a row, best first.

    A hypothesis of n tokens scores ``log p / ((5 + n) / 6) ** length_penalty``. A row stops when no
    live prefix can still beat its worst finished hypothesis.

    Args:
      step: a model's next-token function.
      states: what the model's ``start`` made for ``beams`` beams and ``max_length`` positions.
      batch: rows, B.
      beams: J.
      max_length: the most tokens generated, ``eos_id`` included.
      length_penalty: alpha; 0 compares log-probabilities, larger favours longer hypotheses.

    Source: Wu et al. 2016, "GNMT", equation 14, without the coverage term.
    """

    def penalty(length: Array | int) -> Array:
        return ((5.0 + jnp.asarray(length, jnp.float32)) / 6.0) ** length_penalty

    tokens = jnp.full((batch, beams, max_length), pad_id, jnp.int32)
    start = _Beams(
        index=jnp.zeros((), jnp.int32),
        live=tokens,
        # All beams are equal at first; only one may have children.
        live_scores=jnp.tile(jnp.where(jnp.arange(beams) == 0, 0.0, _NEVER), (batch, 1)),
        done=tokens,
        done_scores=jnp.full((batch, beams), _NEVER),
        states=states,
    )

    def unfinished(loop: _Beams) -> Array:
        # Log-probabilities only fall, so a prefix is worth most now, at the longest length.
        best_live = loop.live_scores[:, 0] / jnp.maximum(penalty(max_length), penalty(loop.index))
        can_improve = jnp.any(best_live > loop.done_scores[:, -1])
        return (loop.index < max_length) & can_improve

    def advance(loop: _Beams) -> _Beams:
        previous = jax.lax.dynamic_index_in_dim(
            loop.live, jnp.maximum(loop.index - 1, 0), axis=2, keepdims=False
        )
        last = jnp.where(loop.index == 0, bos_id, previous)
        logits, states = step(last[..., None], loop.states, loop.index)
        scores = jax.nn.log_softmax(logits[:, :, 0].astype(jnp.float32), axis=-1)
        scores, parents, chosen = _best_children(loop.live_scores, scores, 2 * beams)
        children = jnp.take_along_axis(loop.live, parents[..., None], axis=1)
        children = jax.lax.dynamic_update_slice_in_dim(
            children, chosen[..., None], loop.index, axis=2
        )
        ended = chosen == eos_id
        live_scores, kept = jax.lax.top_k(jnp.where(ended, _NEVER, scores), beams)
        live, live_parents = _pick(children, kept), _pick(parents, kept)

        ended_scores = jnp.where(ended, scores / penalty(loop.index + 1), _NEVER)
        all_scores = jnp.concatenate([loop.done_scores, ended_scores], axis=1)
        done_scores, kept = jax.lax.top_k(all_scores, beams)
        done = _pick(jnp.concatenate([loop.done, children], axis=1), kept)
        states = take_beams(states, live_parents)
        return _Beams(loop.index + 1, live, live_scores, done, done_scores, states)

    end = jax.lax.while_loop(unfinished, advance, start)
    # Rows that ran out of length before enough hypotheses ended are filled with live prefixes.
    live_scores = end.live_scores / penalty(end.index)
    live_scores = jnp.where(end.index == max_length, live_scores, _NEVER)
    scores = jnp.concatenate([end.done_scores, live_scores], axis=1)
    scores, kept = jax.lax.top_k(scores, beams)
    tokens = _pick(jnp.concatenate([end.done, end.live], axis=1), kept)
    return Hypotheses.of(tokens, scores, pad_id)


def _best_children(
    parent_scores: Float[Array, "B J"], scores: Float[Array, "B J V"], count: int
) -> tuple[Float[Array, "B C"], Int[Array, "B C"], Int[Array, "B C"]]:
    """The best continuations of a row: scores, which beam each continues, with which token."""
    vocab = scores.shape[-1]
    # Per beam first: a sort over J * V candidates is what beam search would spend its time on.
    best, tokens = jax.lax.top_k(scores, min(count, vocab))
    best = (parent_scores[..., None] + best).reshape(best.shape[0], -1)
    best, flat = jax.lax.top_k(best, min(count, best.shape[1]))
    parents = flat // tokens.shape[-1]
    chosen = jnp.take_along_axis(tokens.reshape(tokens.shape[0], -1), flat, axis=1)
    return best, parents, chosen.astype(jnp.int32)


def _pick(x: Array, index: Int[Array, "B J"]) -> Array:
    """x[b, index[b, j], ...]."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)
