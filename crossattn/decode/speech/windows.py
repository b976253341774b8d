"""Whisper on one window of sound: encoding, language identification, decoding, word alignment.

Each function is compiled once for each batch size and length. It takes the model as a build and parameters,
and ``tokens``, the ``data.whisper_tokens.WhisperTokens`` of its checkpoint.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from crossattn import functional
from crossattn.decode.config import GenerationConfig
from crossattn.decode.logits import constraints, sampling
from crossattn.decode.logits.processors import Context, LogitsProcessor
from crossattn.decode.search.greedy import greedy, sample
from crossattn.decode.search.simultaneous import Simultaneous, SoFar
from crossattn.types import AnyArray, Array, Bool, Float, Int, Key, Params


class Written(NamedTuple):
    """Generated text of windows.

    Attributes:
      tokens: [B T], filled up with the end token.
      lengths: [B], number of tokens before the end.
      log_p: [B], the mean log-probability of the tokens, the end included, among those that the rules allow,
        at temperature 1.
      no_speech: [B], the probability that nobody speaks, after the start token and the text before it.
    """

    tokens: Int[AnyArray, "B T"]
    lengths: Int[Array, " B"]
    log_p: Float[AnyArray, " B"]
    no_speech: Float[Array, " B"]


class Followed(NamedTuple):
    """Attention and log-probabilities of a given text.

    Attributes:
      weights: [B n T S], attention of the chosen heads.
      log_p: [B T], log-probability of each token given those before it; the first is 0.
    """

    weights: Float[Array, "B n T S"]
    log_p: Float[Array, "B T"]


@partial(jax.jit, static_argnames=("build",))
def hear(build: Any, params: Params, frames: Float[Array, "B F M"]) -> Float[Array, "B S D"]:
    """Returns the encoder's vectors of windows."""
    return functional.bind(build, params).encode(frames).vectors


@partial(jax.jit, static_argnames=("build", "tokens"))
def likely_languages(
    build: Any, params: Params, encoded: Float[Array, "B S D"], tokens: Any
) -> Float[Array, "B n"]:
    """Returns the probabilities of languages, in the order of ``tokens.languages``."""
    model = functional.bind(build, params)
    states = model.prefill(len(encoded), 1, 1, encoded=encoded)
    start = jnp.full((len(encoded), 1), tokens.start, jnp.int32)
    logits = _logits_after(model, start, states)
    ids = jnp.array(list(tokens.languages.values()), jnp.int32)
    return jax.nn.softmax(logits[:, ids], axis=-1)


@partial(jax.jit, static_argnames=("build", "tokens", "times", "max_new_tokens"))
def write(
    build: Any,
    params: Params,
    encoded: Float[Array, "B S D"],
    prefix: Int[Array, "B P"],
    key: Key[Array, "*#B"] | None = None,
    temperature: float | Float[Array, ""] = 0.0,
    *,
    tokens: Any,
    times: bool = True,
    max_new_tokens: int = 224,
) -> Written:
    """Decodes windows: the most likely token at each step, or with a key a sampled one.

    Args:
      prefix: first tokens of the transcript, those of ``WhisperTokens.prefix``; the token ``previous`` and
        the text of earlier windows may precede them.
      key: one key for all windows, or one for each [B].
      temperature: temperature of sampling.
      times: whether to generate time tokens by ``time_rules``; the prefix must agree.
      max_new_tokens: largest number of generated tokens.

    Raises:
      ValueError: prefix and ``max_new_tokens`` together are more than the model has positions for.
    """
    model = functional.bind(build, params)
    B, P = prefix.shape
    rules = [constraints.ban(tokens.suppressed), constraints.ban_first(tokens.suppressed_first)]
    if times:
        rules.append(time_rules(tokens))
    states = model.prefill(B, 1, P + max_new_tokens - 1, encoded=encoded)
    first = (3 if tokens.multilingual else 1) + (not times)  # tokens of ``WhisperTokens.prefix``
    to_start = prefix[:, : P - first + 1]
    no_speech = jax.nn.softmax(_logits_after(model, to_start, states))[:, tokens.no_speech]
    search = greedy
    if key is not None:
        search = partial(sample, key=key, processors=[sampling.temperature(temperature)])
    hypotheses = search(
        model.decode_step, states, rules=rules, batch=B, max_new_tokens=max_new_tokens,
        prefix=prefix, eos_id=tokens.end, pad_id=tokens.end,
    )  # fmt: skip
    written = hypotheses.tokens[:, 0]
    lengths = jnp.sum(written != tokens.end, axis=-1)
    return Written(written, lengths, hypotheses.scores[:, 0] / (lengths + 1), no_speech)


@partial(jax.jit, static_argnames=("build", "tokens"))
def write_on(
    build: Any,
    params: Params,
    encoded: Float[Array, "B S D"],
    so_far: SoFar,
    heard: Int[AnyArray, " B"],
    complete: Bool[AnyArray, " B"],
    *,
    tokens: Any,
    policy: Any,
) -> SoFar:
    """Writes on while somebody speaks, without time tokens; see ``decode.Simultaneous``.

    Args:
      encoded: vectors of the sound so far, silence after it to the length of a window.
      so_far: of the call before; at first ``SoFar.begin`` of a prefix of ``WhisperTokens`` without times.
      heard: vectors of sound; the others are of silence.
      complete: whether the sound has ended.
      policy: ``AlignAtt`` with heads that follow the sound, or ``WaitK`` with a unit of vectors.
    """
    (B, T), X = so_far.places.shape, so_far.tokens.shape[1]
    rules = [constraints.ban(tokens.suppressed), constraints.ban_first(tokens.suppressed_first)]
    ids = dict(eos_id=tokens.end, pad_id=tokens.end)
    config = GenerationConfig(B, T, prefix=so_far.tokens[:, : X - T], **ids)
    search = Simultaneous(policy, config, rules)
    model = functional.bind(build, params)
    return search.hear(model, so_far, heard, complete, encoded=encoded)


@partial(jax.jit, static_argnames=("build", "heads"))
def follow(
    build: Any,
    params: Params,
    encoded: Float[Array, "B S D"],
    text: Int[Array, "B T"],
    heads: tuple[tuple[int, int], ...],
) -> Followed:
    """Scores a given text, its prefix included, and returns the attention of ``heads`` (layer, head).

    Raises:
      ValueError: the text is longer than the model has positions for.
    """
    model = functional.bind(build, params)
    states = model.prefill(len(text), 1, text.shape[1], encoded=encoded)
    logits, _, seen = model.decode_step(text[:, None], states, return_weights=True)
    weights = jnp.stack([seen[layer][:, 0, head] for layer, head in heads], axis=1)
    log_p = jax.nn.log_softmax(logits[:, 0, :-1])
    own = jnp.take_along_axis(log_p, text[:, 1:, None], axis=-1)[..., 0]
    return Followed(weights, jnp.pad(own, ((0, 0), (1, 0))))


def time_rules(tokens: Any, latest_first: int = 50) -> LogitsProcessor:
    """Returns a processor that keeps time tokens in pairs and in ascending order.

    A pair is the end of one segment and the beginning of the next. The first token is a time of at most
    ``latest_first`` steps. A time is forced if all times together are likelier than any text token.

    Source: Radford et al. 2022, section 4.5; the rules of openai-whisper.
    """
    first = tokens.first_time

    def process(logits: Float[Array, " V"], context: Context) -> Float[Array, " V"]:
        ids, positions = jnp.arange(logits.shape[-1]), jnp.arange(context.tokens.shape[0])
        is_time = ids >= first
        written = (positions >= context.start) & (positions < context.length)
        last, before = (context.tokens[context.length - n] >= first for n in (1, 2))
        last, before = last & (context.generated >= 1), before | (context.generated < 2)
        newest = jnp.max(jnp.where(written, context.tokens, 0))
        # A segment may begin where the one before it ends, but not end where it begins.
        earliest = jnp.where(newest >= first, newest + ~(last & ~before), first)

        banned = (ids == tokens.no_times) | (is_time & (ids < earliest))
        banned |= last & before & is_time
        banned |= last & ~before & (ids < tokens.end)
        at_first = ~is_time | (ids > first + latest_first)
        banned |= (context.generated == 0) & at_first
        logits = jnp.where(banned, -jnp.inf, logits)
        any_time = jax.nn.logsumexp(logits[first:])
        return jnp.where(~is_time & (any_time > jnp.max(logits[:first])), -jnp.inf, logits)

    return process


def _logits_after(model: Any, text: Int[Array, "B T"], states: Any) -> Float[Array, "B V"]:
    """Returns the logits after a text; after the start token they rate languages and silence."""
    return model.decode_step(text[:, None], states)[0][:, 0, -1]
