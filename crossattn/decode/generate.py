"""Decoding a whole model: read the source once, search, and look at what was attended to."""

from typing import Any

import jax.numpy as jnp

from crossattn.decode.beam import beam_search
from crossattn.decode.greedy import greedy
from crossattn.decode.hypotheses import Hypotheses
from crossattn.types import Array, Float, Int


def translate(
    model: Any,
    source: Int[Array, "B S"],
    source_segments: Int[Array, "B S"] | None = None,
    *,
    max_length: int,
    beams: int = 1,
    length_penalty: float = 0.6,
    bos_id: int = 1,
    eos_id: int = 2,
    pad_id: int = 0,
) -> Hypotheses:
    """Target sequences of an encoder-decoder; one beam is greedy.

    Args:
      model: a ``Transformer`` (``functional.bind(build, params)`` under ``jax.jit``).
      source: source tokens; padding has segment 0.
      max_length: the most tokens generated. Static, like ``beams``.
      length_penalty: see ``beam_search``; greedy scores are plain sums.
    """
    batch = source.shape[0]
    ids = dict(bos_id=bos_id, eos_id=eos_id, pad_id=pad_id)
    states = model.start(source, source_segments, beams, max_length)
    if beams == 1:
        return greedy(model.step, states, batch=batch, max_length=max_length, **ids)
    return beam_search(
        model.step,
        states,
        batch=batch,
        beams=beams,
        max_length=max_length,
        length_penalty=length_penalty,
        **ids,
    )


def generate(
    model: Any, *, batch: int, max_length: int, bos_id: int = 1, eos_id: int = 2, pad_id: int = 0
) -> Hypotheses:
    """Greedy text of a decoder-only model, from the beginning of a sentence."""
    states = model.start(batch, 1, max_length)
    ids = dict(bos_id=bos_id, eos_id=eos_id, pad_id=pad_id)
    return greedy(model.step, states, batch=batch, max_length=max_length, **ids)


def attention_of(
    model: Any,
    source: Int[Array, "B S"],
    tokens: Int[Array, "B T"],
    source_segments: Int[Array, "B S"] | None = None,
    *,
    bos_id: int = 1,
    pad_id: int = 0,
    causal: bool = True,
) -> Float[Array, "L B N T S"]:
    """Cross-attention weights of given target tokens; row t is the step that predicts token t.

    One pass over the whole sequence. It computes what step-by-step decoding did, so that no search
    needs to carry and reorder weights; rows of padding are 0.

    Args:
      tokens: a chosen hypothesis, or a reference, end-of-sentence included.
      causal: False lets a row read the target tokens that follow too; what a model was taught so.
    """
    bos = jnp.full((tokens.shape[0], 1), bos_id, tokens.dtype)
    target_in = jnp.concatenate([bos, tokens[:, :-1]], axis=1)
    _, weights = model.hidden(
        source,
        target_in,
        source_segments=jnp.ones_like(source) if source_segments is None else source_segments,
        target_segments=(tokens != pad_id).astype(jnp.int32),
        causal=causal,
        return_weights=True,
    )
    return weights
