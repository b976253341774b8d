"""Decoding a whole model: read the source once, search, and look at what was attended to."""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import jax.numpy as jnp

from crossattn.decode.beam import beam_search
from crossattn.decode.greedy import greedy, sample
from crossattn.decode.hypotheses import Hypotheses
from crossattn.decode.target import Target
from crossattn.types import Array, Float, Int, Key


def translate(
    model: Any,
    source: Int[Array, "B S"],
    source_segments: Int[Array, "B S"] | None = None,
    *,
    max_length: int,
    beams: int = 1,
    key: Key[Array, ""] | None = None,
    **options: Any,
) -> Hypotheses:
    """Target sequences of an encoder-decoder: one beam is greedy, or drawn with a key.

    Args:
      model: a ``Transformer`` (``functional.bind(build, params)`` under ``jax.jit``).
      source: source tokens; padding has segment 0.
      max_length: the most tokens generated. Static, like ``beams``.
      beams: more than one is ``beam_search``.
      key: draws tokens, as ``sample`` does.
      **options: those of the search (``greedy``, ``sample``, ``beam_search``) and of ``Target``.

    Raises:
      ValueError: a key together with beams.
    """
    target, search = _options(source.shape[0], max_length, beams, key, options)
    states = model.start(source, source_segments, beams, target.room)
    return search(model.step, states)


def generate(
    model: Any,
    *,
    batch: int,
    max_length: int,
    beams: int = 1,
    key: Key[Array, ""] | None = None,
    **options: Any,
) -> Hypotheses:
    """Text of a decoder-only model, from ``prefix`` or the beginning of a sentence; as ``translate``."""
    target, search = _options(batch, max_length, beams, key, options)
    return search(model.step, model.start(batch, beams, target.room))


def _options(
    batch: int, max_length: int, beams: int, key: Any, options: dict[str, Any]
) -> tuple[Target, Callable[..., Hypotheses]]:
    """What is asked for, and the search that finds it."""
    names = {field.name for field in fields(Target)}
    target = dict(batch=batch, max_length=max_length)
    target |= {name: value for name, value in options.items() if name in names}
    if key is not None and beams > 1:
        raise ValueError(f"got a key and {beams} beams; expected one of them: a beam is not drawn.")
    if beams == 1:
        # What only beam search reads; one beam compares nothing.
        options = {n: v for n, v in options.items() if n not in ("length_penalty", "stopping")}
    options = {**options, **target}
    if beams > 1:
        search = partial(beam_search, beams=beams, **options)
    else:
        search = partial(greedy, **options) if key is None else partial(sample, key=key, **options)
    return Target(**target), search


def attention_of(
    model: Any,
    source: Int[Array, "B S"],
    tokens: Int[Array, "B T"],
    source_segments: Int[Array, "B S"] | None = None,
    *,
    bos_id: int = 1,
    pad_id: int = 0,
) -> Float[Array, "L B N T S"]:
    """Cross-attention weights of given target tokens; row t is the step that predicts token t.

    One pass over the whole sequence, which computes what step-by-step decoding did. For the weights of a
    search while it runs, give it a ``Capture``. Rows of padding are 0.

    Args:
      tokens: a chosen hypothesis, or a reference, end-of-sentence included.
    """
    bos = jnp.full((tokens.shape[0], 1), bos_id, tokens.dtype)
    target_in = jnp.concatenate([bos, tokens[:, :-1]], axis=1)
    _, weights = model.hidden(
        source,
        target_in,
        source_segments=jnp.ones_like(source) if source_segments is None else source_segments,
        target_segments=(tokens != pad_id).astype(jnp.int32),
        return_weights=True,
    )
    return weights
