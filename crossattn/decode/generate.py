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
from crossattn.nn.meshes import on_any_mesh
from crossattn.types import AnyArray, Array, Float, Int, Key

Source = Int[AnyArray, "B S"] | Float[AnyArray, "B F M"]
"""Tokens; or, of a model that reads frames, their features."""


@on_any_mesh
def translate(
    model: Any,
    source: Source,
    source_segments: Int[AnyArray, "B S"] | None = None,
    *,
    max_length: int,
    **options: Any,
) -> Hypotheses:
    """Target sequences of an encoder-decoder; greedy unless the options ask for another search.

        found = translate(model, source, (source != pad_id).astype(int), max_length=60)

    Args:
      model: a ``Transformer`` (``functional.bind(build, params)`` under ``jax.jit``).
      source: source tokens, or the frames of a model that reads these.
      source_segments: 0 where the source is padding, which is not read. None: that of the model's
        ``pad_id``, if its config names one; otherwise everything is read, padding too.
      max_length: the most tokens generated. Static, like ``beams``.
      **options: ``beams`` (with ``length_penalty``) for ``beam_search``, ``candidates`` for
        ``contrastive_search``, a ``key`` for ``sample``, a ``draft`` for ``speculative``, with a ``key`` or
        without; and what else those and ``Target`` take.

    Raises:
      ValueError: two searches are asked for at once, the source has no batch axis, or source or target
        do not fit the model.
    """
    source = jnp.asarray(source)
    if source_segments is not None:
        source_segments = jnp.asarray(source_segments)
    check_source(source, source_segments)
    places, search = _search(model, **options)
    target = dict(batch=source.shape[0], max_length=max_length)
    room = _room(target, options)
    states = model.start(source, source_segments, places, room, **_ahead(options))
    return search(states, **target)


@on_any_mesh
def generate(
    model: Any,
    *,
    batch: int,
    max_length: int,
    memory: Float[AnyArray, "B S M"] | None = None,
    memory_segments: Int[AnyArray, "B S"] | None = None,
    **options: Any,
) -> Hypotheses:
    """Text of a decoder-only model, after ``prefix`` or a ``bos_id``; options as in ``translate``.

    Args:
      memory: the vectors that a ``Decoder`` with a ``memory_dim`` reads; padding has segment 0.

    Raises:
      ValueError: two searches are asked for at once, there is a memory where none is read or none where
        one is, or the text does not fit the model.
    """
    places, search = _search(model, **options)
    target = dict(batch=batch, max_length=max_length)
    given = {"memory": memory, "memory_segments": memory_segments}
    reads = {name: jnp.asarray(x) for name, x in given.items() if x is not None}
    if memory is not None and len(memory) != batch:
        raise ValueError(f"memory has {len(memory)} rows; expected as many as the batch, {batch}.")
    states = model.start(batch, places, _room(target, options), **reads, **_ahead(options))
    return search(states, **target)


def check_source(source: Any, segments: Any = None) -> None:
    """Whether these are rows of tokens, or of frames, and segments of theirs.

    Raises:
      ValueError: they are not.
    """
    tokens = jnp.issubdtype(source.dtype, jnp.integer)
    if not tokens and not jnp.issubdtype(source.dtype, jnp.floating):
        raise ValueError(f"source has dtype {source.dtype}; expected tokens, which are integers.")
    if source.ndim != 2 if tokens else source.ndim < 3:
        expected = "tokens [B S]" if tokens else "frames [B F M]; tokens are integers"
        raise ValueError(
            f"source has shape {source.shape} and dtype {source.dtype}; expected {expected}. A single "
            "source is a batch of one: source[None]."
        )
    if segments is None:
        return
    if segments.ndim != 2 or segments.shape[0] != source.shape[0]:
        raise ValueError(
            f"source_segments has shape {segments.shape}; expected [B S], rows as many as the source "
            f"has, {source.shape[0]}."
        )
    if tokens and segments.shape != source.shape:
        raise ValueError(
            f"source_segments has shape {segments.shape}; expected that of source, {source.shape}."
        )


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
    """Positions that are read; of candidates, the last token's too."""
    room = Target(**target, prefix=options.get("prefix")).room
    return room + (options.get("candidates", 1) > 1)


def _ahead(options: dict[str, Any]) -> dict[str, int]:
    """Room for guesses, which stand in a cache until they are verified; models need not know of it."""
    draft = options.get("draft")
    return {} if draft is None else {"ahead": draft.lookahead}


@on_any_mesh
def attention_of(
    model: Any,
    source: Source,
    tokens: Int[AnyArray, "B T"],
    source_segments: Int[AnyArray, "B S"] | None = None,
    *,
    lengths: Int[AnyArray, " B"] | None = None,
    bos_id: int = 1,
    pad_id: int = 0,
) -> Float[Array, "L B N T S"]:
    """Cross-attention weights of given target tokens; row t is the step that predicts token t.

    One pass over the whole sequence, which computes what step-by-step decoding did. For the weights of a
    search while it runs, give it a ``Capture``. Rows of padding are 0.

    Args:
      source, source_segments: as in ``translate``.
      tokens: a chosen hypothesis, or a reference, end-of-sentence included.
      lengths: how many tokens of each row there are, ``Hypotheses.lengths`` for one; None counts those
        that are not ``pad_id``.
    """
    source, tokens = jnp.asarray(source), jnp.asarray(tokens)
    segments = None if source_segments is None else jnp.asarray(source_segments)
    check_source(source, segments)
    real = tokens != pad_id
    if lengths is not None:
        real = jnp.arange(tokens.shape[1]) < jnp.asarray(lengths)[:, None]
    bos = jnp.full((tokens.shape[0], 1), bos_id, tokens.dtype)
    target_in = jnp.concatenate([bos, tokens[:, :-1]], axis=1)
    _, weights = model.hidden(
        source,
        target_in,
        source_segments=segments,
        target_segments=real.astype(jnp.int32),
        return_weights=True,
    )
    return jnp.where(real[:, None, :, None], weights, 0)
