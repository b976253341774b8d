"""Decoding a whole model: read the source once, search, and look at what was attended to."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp

from crossattn.decode.beam import beam_search
from crossattn.decode.contrastive import contrastive_search
from crossattn.decode.drafts import Draft
from crossattn.decode.greedy import greedy, sample
from crossattn.decode.hypotheses import Hypotheses
from crossattn.decode.penalties import Penalty
from crossattn.decode.speculative import speculative
from crossattn.decode.target import Target
from crossattn.types import AnyArray, Array, Float, Int, Key


def translate(
    model: Any,
    source: Int[AnyArray, "B S"],
    source_segments: Int[AnyArray, "B S"] | None = None,
    *,
    max_length: int,
    **options: Any,
) -> Hypotheses:
    """Target sequences of an encoder-decoder; greedy unless the options ask for another search.

    Args:
      model: a ``Transformer`` (``functional.bind(build, params)`` under ``jax.jit``).
      source: source tokens; padding has segment 0.
      max_length: the most tokens generated. Static, like ``beams``.
      **options: ``beams`` (with ``length_penalty``) for ``beam_search``, ``candidates`` for
        ``contrastive_search``, a ``key`` for ``sample``, a ``draft`` for ``speculative``, with a ``key`` or
        without; and what else those and ``Target`` take.

    Raises:
      ValueError: two searches are asked for at once.
    """
    places, search = _search(model, **options)
    target = dict(batch=source.shape[0], max_length=max_length)
    if source_segments is not None:
        source_segments = jnp.asarray(source_segments)
    room = _room(target, options)
    return search(model.start(jnp.asarray(source), source_segments, places, room), **target)


def generate(model: Any, *, batch: int, max_length: int, **options: Any) -> Hypotheses:
    """Text of a decoder-only model, after ``prefix`` or a ``bos_id``; options as in ``translate``."""
    places, search = _search(model, **options)
    target = dict(batch=batch, max_length=max_length)
    return search(model.start(batch, places, _room(target, options)), **target)


def _search(
    model: Any,
    *,
    beams: int = 1,
    length_penalty: float | Penalty = 0.6,
    candidates: int = 1,
    key: Key[Array, ""] | None = None,
    draft: Draft | None = None,
    **options: Any,
) -> tuple[int, Callable[..., Hypotheses]]:
    """How many sequences a row it needs, and the search, a function of states and a target."""
    asked = {
        "beams": beams > 1,
        "candidates": candidates > 1,
        "draft": draft is not None,
        "key": key is not None,
    }
    if sum(asked.values()) > 1 + (asked["draft"] and asked["key"]):
        names = " and ".join(name for name, given in asked.items() if given)
        raise ValueError(f"got {names}; expected one of them: each is a search of its own.")
    if beams > 1:
        options = dict(beams=beams, length_penalty=length_penalty, **options)
        return beams, partial(beam_search, model.step, **options)
    if candidates > 1:
        return candidates, partial(contrastive_search, model, candidates=candidates, **options)
    if draft is not None:
        return 1, partial(speculative, model.step, draft=draft, key=key, **options)
    if key is not None:
        return 1, partial(sample, model.step, key=key, **options)
    return 1, partial(greedy, model.step, **options)


def _room(target: dict[str, Any], options: dict[str, Any]) -> int:
    """Positions of a cache; a draft's guesses stand there until they are verified."""
    ahead = getattr(options.get("draft"), "lookahead", 0)
    return Target(**target, prefix=options.get("prefix")).room + ahead


def attention_of(
    model: Any,
    source: Int[AnyArray, "B S"],
    tokens: Int[AnyArray, "B T"],
    source_segments: Int[AnyArray, "B S"] | None = None,
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
    source, tokens = jnp.asarray(source), jnp.asarray(tokens)
    segments = jnp.ones_like(source) if source_segments is None else jnp.asarray(source_segments)
    bos = jnp.full((tokens.shape[0], 1), bos_id, tokens.dtype)
    target_in = jnp.concatenate([bos, tokens[:, :-1]], axis=1)
    _, weights = model.hidden(
        source,
        target_in,
        source_segments=segments,
        target_segments=(tokens != pad_id).astype(jnp.int32),
        return_weights=True,
    )
    return weights
