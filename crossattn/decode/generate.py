"""Generation by a whole model, and its attention to given tokens."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from crossattn.decode.config import GenerationConfig
from crossattn.decode.hypotheses import Hypotheses
from crossattn.decode.search.beam import beam_search
from crossattn.decode.search.contrastive import contrastive_search
from crossattn.decode.search.drafts import Draft
from crossattn.decode.search.greedy import greedy, sample
from crossattn.decode.search.penalties import Penalty
from crossattn.decode.search.speculative import speculative
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.readied import for_decoding
from crossattn.types import AnyArray, Array, Float, Int, Key

Source = Int[AnyArray, "B S"] | Float[AnyArray, "B F M"] | Float[AnyArray, "B H W C"]
"""Tokens, features of frames, or pictures."""


@on_any_mesh
def generate(
    model: Any,
    source: Source | None = None,
    source_segment_ids: Int[AnyArray, "B S"] | None = None,
    *,
    max_new_tokens: int,
    batch: int | None = None,
    inputs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Hypotheses:
    """Generates text by any model with ``prefill`` and ``decode_step``; greedy unless the options differ.

        hypotheses = generate(translator, source, (source != pad_id).astype(int), max_new_tokens=60)
        hypotheses = generate(language_model, prefix=[[5, 7, 9], [4]], max_new_tokens=60)

    Args:
      model: such as a ``Transformer`` or a ``Decoder``; ``functional.bind(build, params)`` under ``jax.jit``.
      source: of an encoder-decoder, its source tokens or frames.
      source_segment_ids: 0 where the source is padding. None: tokens that are the model's ``pad_id`` are, and
        none are without one.
      max_new_tokens: largest number of generated tokens. Static, like ``num_beams``.
      batch: rows, B. None: those of the inputs, or of the prefix.
      inputs: other inputs of ``prefill``, by name: ``{"memory": vectors, "memory_segment_ids": segments}`` of
        a ``Decoder`` with a ``memory_dim``.
      **options: ``num_beams`` (with ``length_penalty``) for ``beam_search``, ``candidates`` for
        ``contrastive_search``, a ``key`` for ``sample``, a ``draft`` for ``speculative``, with a ``key`` or
        without; and the other options of those and of ``GenerationConfig``.

    Raises:
      ValueError: two searches are asked for at once, a source has no batch axis, the inputs or the text do
        not fit the model, or nothing gives the number of rows.
      TypeError: the model is parameters or a function, or does not decode.
    """
    if not hasattr(model, "prefill"):
        raise TypeError(
            f"model is a {type(model).__name__}; expected a module with prefill and decode_step, such as "
            "functional.bind(build, params)."
        )
    reads = {"source": source, "source_segment_ids": source_segment_ids, **(inputs or {})}
    reads = {name: jnp.asarray(x) for name, x in reads.items() if x is not None}
    if "source" in reads:
        check_source(reads["source"], reads.get("source_segment_ids"))
    batch = _rows(reads, options.get("prefix")) if batch is None else batch
    model = for_decoding(model)
    num_beams, search = _search(model, **options)
    config = dict(batch=batch, max_new_tokens=max_new_tokens)
    length = GenerationConfig(**config, prefix=options.get("prefix")).cache_length
    length += options.get("candidates", 1) > 1  # which reads the last token too
    states = model.prefill(batch, num_beams, length, **reads, **_lookahead(model, options))
    return search(states, **config)


def _rows(reads: Mapping[str, Any], prefix: Any) -> int:
    for x in reads.values():
        return len(x)
    if hasattr(prefix, "__len__") and np.ndim(prefix[0]):
        return len(prefix)
    raise ValueError(
        "generate got no inputs and no prefix with rows; expected batch=, how many texts to generate."
    )


def check_source(source: Any, segment_ids: Any = None) -> None:
    """Checks the shapes and dtypes of a source and of its segments.

    Raises:
      ValueError: they are not rows of tokens or frames with their segments.
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
    if segment_ids is None:
        return
    shape = f"source_segment_ids has shape {segment_ids.shape}"
    if segment_ids.ndim != 2 or segment_ids.shape[0] != source.shape[0]:
        raise ValueError(
            f"{shape}; expected [B S], with the rows of the source, {source.shape[0]}."
        )
    if tokens and segment_ids.shape != source.shape:
        raise ValueError(f"{shape}; expected that of source, {source.shape}.")


def _search(
    model: Any,
    *,
    num_beams: int = 1,
    length_penalty: float | Penalty = 0.6,
    candidates: int = 1,
    key: Key[Array, "*#B"] | None = None,
    draft: Draft | None = None,
    **options: Any,
) -> tuple[int, Callable[..., Hypotheses]]:
    """Returns the sequences a row, and the search of states and ``GenerationConfig``."""
    asked = {
        "num_beams": num_beams > 1,
        "candidates": candidates > 1,
        "draft": draft is not None,
        "key": key is not None,
    }
    if sum(asked.values()) > 1 + (asked["draft"] and asked["key"]):
        names = " and ".join(name for name, given in asked.items() if given)
        raise ValueError(f"got {names}; expected one of them: each is a search of its own.")
    if candidates > 1:
        return candidates, partial(contrastive_search, model, candidates=candidates, **options)
    if num_beams > 1:
        search = partial(beam_search, num_beams=num_beams, length_penalty=length_penalty)
    elif draft is not None:
        search = partial(speculative, draft=draft, key=key)
    else:
        search = greedy if key is None else partial(sample, key=key)
    return max(num_beams, 1), partial(search, model.decode_step, **options)


def _lookahead(model: Any, options: dict[str, Any]) -> dict[str, int]:
    """Returns the positions that ``prefill`` adds for the guesses of a draft."""
    draft = options.get("draft")
    if draft is None:
        return {}
    if "lookahead" not in inspect.signature(model.prefill).parameters:
        raise ValueError(
            "speculative decoding takes back guesses that are wrong, but "
            f"{type(model).__name__}.prefill() takes no lookahead; decode with no draft."
        )
    return {"lookahead": draft.lookahead}


@on_any_mesh
def attention_of(
    model: Any,
    source: Source,
    tokens: Int[AnyArray, "B T"],
    source_segment_ids: Int[AnyArray, "B S"] | None = None,
    *,
    lengths: Int[AnyArray, " B"] | None = None,
    bos_id: int = 1,
    pad_id: int = 0,
) -> Float[Array, "L B N T S"]:
    """Computes the cross-attention weights of given target tokens, in one pass.

    Row t is the step that predicts token t; rows of padding are 0. ``Capture`` keeps the weights of a search
    while it runs.

    Args:
      source, source_segment_ids: as in ``generate``.
      tokens: a chosen hypothesis, or a reference, end-of-sentence included.
      lengths: number of tokens of each row, such as ``Hypotheses.lengths``; None counts those that are not
        ``pad_id``.
    """
    source, tokens = jnp.asarray(source), jnp.asarray(tokens)
    segment_ids = None if source_segment_ids is None else jnp.asarray(source_segment_ids)
    check_source(source, segment_ids)
    real = tokens != pad_id
    if lengths is not None:
        real = jnp.arange(tokens.shape[1]) < jnp.asarray(lengths)[:, None]
    bos = jnp.full((tokens.shape[0], 1), bos_id, tokens.dtype)
    target_in = jnp.concatenate([bos, tokens[:, :-1]], axis=1)
    _, weights = model.hidden(
        source,
        target_in,
        source_segment_ids=segment_ids,
        target_segment_ids=real.astype(jnp.int32),
        return_weights=True,
    )
    return jnp.where(real[:, None, :, None], weights, 0)
