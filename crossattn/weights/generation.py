"""The settings of generation of a checkpoint, as arguments of ``decode``.

Source: ``GenerationMixin`` of transformers 5, above all ``_get_logits_processor``, whose order the
processors keep.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from crossattn.decode import constraints, penalties, sampling, stopping
from crossattn.decode.logits.processors import Context, LogitsProcessor
from crossattn.weights.formats.safetensors import CheckpointError

# Settings that would change the text and are not supported -> values at which they, like at None, do nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "guidance_scale": (1.0,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0.0,),
    # Only a cache of fewer bits changes anything.
    "cache_implementation": (
        "dynamic", "static", "offloaded", "offloaded_static", "hybrid", "hybrid_chunked",
        "sliding_window", "offloaded_hybrid", "offloaded_hybrid_chunked",
    ),
    **dict.fromkeys((
        "renormalize_logits", "remove_invalid_values", "token_healing", "low_memory", "use_mtp",
        "is_assistant", "return_timestamps",
    ), (False,)),
    **dict.fromkeys((
        "sequence_bias", "exponential_decay_length_penalty", "watermarking_config", "max_time",
        "stop_strings", "constraints", "force_words_ids", "dola_layers", "prompt_lookup_num_tokens",
        "assistant_early_exit", "assistant_ensemble_weight", "speculation_type",
        # Whisper's, which the caller gives as a prefix.
        "forced_decoder_ids", "language", "task",
    ), ()),
}  # fmt: skip
_UNSUPPORTED_DRAWS: dict[str, tuple[Any, ...]] = {
    "typical_p": (1.0,),
    "top_h": (),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
}
_IDS = ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _ids(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(type(token) is int for token in value)


# Supported settings -> the expected value in words, and a test of it.
_COUNT = "0 or more", lambda x: type(x) is int and x >= 0
_AT_LEAST_1 = "1 or more", lambda x: type(x) is int and x > 0
_POSITIVE = "a number above 0", lambda x: _number(x) and x > 0
_SEVERAL = "a token or several", lambda x: type(x) is int or _ids(x)
_LIST = "a list of tokens", _ids
_SUPPORTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "num_beams": _AT_LEAST_1,
    "num_return_sequences": _AT_LEAST_1,
    "length_penalty": ("a number", _number),
    "early_stopping": ("True, False or 'never'", lambda x: x in (True, False, "never")),
    "no_repeat_ngram_size": _COUNT,
    "bad_words_ids": ("lists of tokens", lambda x: isinstance(x, list) and all(map(_ids, x))),
    "min_length": _COUNT,
    "min_new_tokens": _COUNT,
    "forced_bos_token_id": ("a token", lambda x: type(x) is int),
    "forced_eos_token_id": _SEVERAL,
    "suppress_tokens": _LIST,
    "begin_suppress_tokens": _LIST,
    "repetition_penalty": _POSITIVE,
    "do_sample": ("True or False", lambda x: isinstance(x, bool)),
    "temperature": _POSITIVE,
    "top_k": _COUNT,
    "top_p": ("a number above 0, at most 1", lambda x: _number(x) and 0 < x <= 1),
    "min_p": ("a number from 0 to 1", lambda x: _number(x) and 0 <= x <= 1),
}


def stored(config: Mapping[str, Any], own: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a checkpoint's settings: ``generation_config.json``, or else those of ``config.json``."""
    if own is not None:
        return _given(own)
    # A pair, or a language model that reads pictures, has the settings in a part of its config.
    nested = config.get("decoder") or config.get("text_config") or {}
    settings = _given(nested) | _given(config)
    if config.get("force_bos_token_to_be_generated") and "bos_token_id" in settings:
        settings["forced_bos_token_id"] = settings["bos_token_id"]
    return settings


def special_ids(settings: Mapping[str, Any], starts: tuple[str, ...]) -> dict[str, Any]:
    """Returns ``bos_id``, ``eos_id`` (a tuple of several, or of none) and ``pad_id`` of ``stored`` settings.

    Args:
      starts: names of the setting of the first token; the first that is set counts.

    Raises:
      CheckpointError: no first token is set, or several are; or an id is no token.
    """
    _check_values(settings, dict.fromkeys(_IDS, _SEVERAL))
    named = [settings[name] for name in starts if settings.get(name) is not None]
    if not named:
        raise CheckpointError(
            f"the checkpoint lacks {' and '.join(starts)}, so nothing says what a text begins with; give it: "
            f"generation(..., {starts[0]}=...)."
        )
    begins, ends = _several(named[0]), _several(settings.get("eos_token_id", ()))
    if len(begins) != 1:
        raise CheckpointError(
            f"{starts[0]} is {named[0]!r}; expected one token. Where rows begin with tokens of their own, "
            f"give them as prefix=[[a], [b], ...] beside generation(..., {starts[0]}=...)."
        )
    padding = settings.get("pad_token_id")
    return {
        "bos_id": begins[0],
        "eos_id": ends[0] if len(ends) == 1 else tuple(ends),
        "pad_id": padding if padding is not None else ends[0] if ends else 0,
    }


def arguments(
    settings: Mapping[str, Any],
    starts: tuple[str, ...],
    vocab_size: int,
    max_new_tokens: int,
    key: Any,
    changes: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the arguments of ``decode.generate``, see ``Pretrained.generation`` and ``special_ids``."""
    known = [*_SUPPORTED, *(name for name in _IDS if name in (*starts, *_IDS[2:]))]
    if unknown := sorted(changes.keys() - {*known, *_UNSUPPORTED, *_UNSUPPORTED_DRAWS}):
        raise ValueError(f"generation got {unknown[0]}; expected some of {', '.join(known)}.")
    settings = _given({**settings, **changes})
    _check_values(settings, _SUPPORTED)
    drawn = settings.get("do_sample", False)
    for name, neutral in (_UNSUPPORTED | (_UNSUPPORTED_DRAWS if drawn else {})).items():
        if name in settings and settings[name] not in neutral:
            raise CheckpointError(
                f"the settings of generation have {name} {settings[name]!r}, which is not supported; "
                f"generation(..., {name}={(*neutral, None)[0]!r}) goes without it."
            )
    options = special_ids(settings, starts) | {"max_new_tokens": max_new_tokens}
    _check_tokens({**settings, starts[0]: options["bos_id"]}, starts[0], vocab_size)
    _check_search(settings, key)
    penalty = settings.get("repetition_penalty", 1.0)
    penalised = [sampling.repetition_penalty(penalty)] if penalty != 1 else []  # counts no padding
    constrained = map(_whole, _constraints(settings, _several(options["eos_id"]), max_new_tokens))
    shaped = _draws(settings) if drawn else ()
    options["processors"] = (*penalised, *constrained, *shaped)
    if drawn:
        options["key"] = key
    if (num_beams := settings.get("num_beams", 1)) > 1:
        power = settings.get("length_penalty", 1.0)
        options |= {
            "num_beams": num_beams,
            "length_penalty": penalties.power(power),
            "stopping": stopping.transformers(settings.get("early_stopping", False), power),
        }
    return options


def _check_values(settings: Mapping[str, Any], rules: Mapping[str, tuple]) -> None:
    for name, (expected, allowed) in rules.items():
        value = settings.get(name)
        if value is not None and not allowed(value):
            raise CheckpointError(f"{name} is {value!r}; expected {expected}.")


def _check_search(settings: Mapping[str, Any], key: Any) -> None:
    """Checks that a search of this kind exists, and that draws alone have a key."""
    drawn, beams = settings.get("do_sample", False), settings.get("num_beams", 1)
    several = settings.get("num_return_sequences", 1)
    if drawn and beams > 1:
        raise CheckpointError(
            f"do_sample with num_beams {beams} draws beams, which is not supported; give generation("
            "..., num_beams=1) for draws, or do_sample=False for beams."
        )
    if drawn and key is None:
        raise CheckpointError(
            "the settings of generation ask for draws; give generation(..., key=jax.random.key(0)), or "
            "do_sample=False for the most likely tokens."
        )
    if key is not None and not drawn:
        raise ValueError(
            "generation got a key, and do_sample is False; leave it out, or do_sample=True."
        )
    if several > (1 if drawn else beams):
        way = (
            "map generate over several keys, by jax.vmap" if drawn else "expected at most num_beams"
        )
        raise CheckpointError(
            f"num_return_sequences is {several}, and a search of num_beams {beams} finds {beams} a row; "
            f"{way}, with num_return_sequences=1."
        )


def _check_tokens(settings: Mapping[str, Any], start: str, vocab_size: int) -> None:
    """Checks that the tokens are of the vocabulary, and that forced ones can come."""
    beams = settings.get("num_beams", 1)
    if beams > 1 and len(set(_several(settings.get("forced_eos_token_id", ())))) > 1:
        raise CheckpointError(
            f"forced_eos_token_id is {settings['forced_eos_token_id']!r} and num_beams {beams}: to beams all "
            "of them are worth the same, and transformers takes any; expected one token."
        )
    words = settings.get("bad_words_ids", ())
    used = {start: [settings[start]], "bad_words_ids": [token for word in words for token in word]}
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        used[name] = forced = _several(settings.get(name, ()))
        if forced and set(forced) <= set(settings.get("suppress_tokens", ())):
            raise CheckpointError(
                f"{name} is {settings[name]!r}, which suppress_tokens forbids: nothing could come there. "
                "Take it out of one of them."
            )
    for name, tokens in used.items():
        if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
            raise CheckpointError(
                f"{name} has the token {wrong[0]}; expected 0 to {vocab_size - 1}, this vocabulary's."
            )


def _draws(settings: Mapping[str, Any]) -> Iterator[LogitsProcessor]:
    """Yields processors that shape the distribution of draws, after all others."""
    if (temperature := settings.get("temperature", 1.0)) != 1:
        yield sampling.temperature(temperature)
    if k := settings.get("top_k", 50):  # the default of transformers
        yield sampling.top_k(k)
    if (p := settings.get("top_p", 1.0)) < 1:
        yield sampling.top_p(p)
    if p := settings.get("min_p", 0.0):
        yield sampling.min_p(p)


def _constraints(
    settings: Mapping[str, Any], ends: list[int], max_new_tokens: int
) -> Iterator[LogitsProcessor]:
    if size := settings.get("no_repeat_ngram_size", 0):
        yield constraints.no_repeat_ngram(size)
    words = [word for word in settings.get("bad_words_ids", ()) if word not in [[e] for e in ends]]
    if words:
        yield constraints.ban_ngrams(words)
    ends = [end for end in ends if end >= 0]  # a negative one never comes
    if ends and "min_new_tokens" in settings:  # overrides min_length
        yield constraints.min_new_tokens(settings["min_new_tokens"], ends)
    elif ends and (least := settings.get("min_length", 0)):  # the prefix counts
        yield _where(lambda context: context.length < least, constraints.ban(ends))
    first = settings.get("forced_bos_token_id")
    if first is not None:  # behind a start of one token only
        yield _where(lambda context: context.length == 1, constraints.force({0: first}))
    if last := _several(settings.get("forced_eos_token_id", ())):
        yield constraints.force({max_new_tokens - 1: min(last)})
    if tokens := _tokens(settings, "suppress_tokens"):
        yield constraints.ban(tokens)
    if tokens := _tokens(settings, "begin_suppress_tokens"):

        def at_first_free_token(context: Context) -> Any:
            forced = 0 if first is None else jnp.asarray(context.start == 1, int)
            return context.generated == forced

        yield _where(at_first_free_token, constraints.ban(tokens))


def _where(condition: Callable[[Context], Any], processor: LogitsProcessor) -> LogitsProcessor:
    """Returns the processor, restricted to contexts that satisfy the condition."""
    return lambda logits, context: jnp.where(condition(context), processor(logits, context), logits)


def _whole(processor: LogitsProcessor) -> LogitsProcessor:
    """Returns the processor, applied to rows with their padding, as transformers counts them."""
    return lambda logits, context: processor(logits, context.padded)


def _tokens(settings: Mapping[str, Any], name: str) -> list[int]:
    return [token for token in settings.get(name, ()) if token >= 0]  # -1 stands for none


def _several(ids: Any) -> list[int]:
    return [ids] if isinstance(ids, int) else list(ids)


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}
