"""A checkpoint's settings of generation as arguments of ``decode``: what transformers makes of them.

Source: ``GenerationMixin`` of transformers 5, above all ``_get_logits_processor``, whose order the
processors keep.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from crossattn.decode import constraints, penalties, stopping
from crossattn.decode.logits.processors import Context, LogitsProcessor
from crossattn.weights.formats.safetensors import CheckpointError

# What would change the text and is not done here: the values at which it does nothing, the one to say first.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "do_sample": (False,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "sequence_bias": (None,),
    "exponential_decay_length_penalty": (None,),
    "guidance_scale": (None, 1.0),
    "num_beam_groups": (1,),
    "penalty_alpha": (None, 0.0),
    "renormalize_logits": (False,),
    "remove_invalid_values": (False,),
    "watermarking_config": (None,),
    "token_healing": (False,),
    "max_time": (None,),
    "stop_strings": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "dola_layers": (None,),
    "num_return_sequences": (1,),
    "low_memory": (None, False),
    # Where keys and values are kept changes nothing, unless they are kept with fewer bits.
    "cache_implementation": (
        None, "dynamic", "static", "offloaded", "offloaded_static", "hybrid", "hybrid_chunked",
        "sliding_window", "offloaded_hybrid", "offloaded_hybrid_chunked",
    ),
    # Another model, or a part of this one, that runs ahead.
    "use_mtp": (None, False),
    "prompt_lookup_num_tokens": (None,),
    "is_assistant": (None, False),
    "assistant_early_exit": (None,),
    "assistant_ensemble_weight": (None,),
    "speculation_type": (None,),
    # Whisper's: they stand in the prefix, which is the caller's to give.
    "forced_decoder_ids": (None,),
    "language": (None,),
    "task": (None,),
    "return_timestamps": (None, False),
}  # fmt: skip
_IDS = ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id")
_SUPPORTED = (
    "num_beams length_penalty early_stopping no_repeat_ngram_size bad_words_ids min_length min_new_tokens "
    "forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens"
).split()


def stored(config: Mapping[str, Any], own: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a checkpoint asks for: its ``generation_config.json`` alone, or without one ``config.json``.

    A setting that the file leaves open is open, whatever the other says.

    Args:
      config: ``config.json``.
      own: ``generation_config.json``; None is no such file.
    """
    if own is not None:
        return _given(own)
    # Of a pair, or of a language model that reads pictures.
    nested = config.get("decoder") or config.get("text_config") or {}
    settings = _given(nested) | _given(config)
    if config.get("force_bos_token_to_be_generated") and "bos_token_id" in settings:
        settings["forced_bos_token_id"] = settings["bos_token_id"]
    return settings


def special_ids(settings: Mapping[str, Any], starts: tuple[str, ...]) -> dict[str, Any]:
    """``bos_id``, ``eos_id`` (a tuple of several, or of none), ``pad_id``, as ``stored`` settings have them.

    Args:
      starts: the settings that a text may begin with, the first that is set.

    Raises:
      CheckpointError: nothing says what a text begins with, or each row begins otherwise.
    """
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
    changes: Mapping[str, Any],
) -> dict[str, Any]:
    """See ``Pretrained.generation``.

    Args:
      settings: the checkpoint's, by the names that transformers has for them, see ``stored``.
      starts: see ``special_ids``.
      vocab_size: V.
      max_new_tokens: the most tokens generated.
      changes: settings that the caller wants otherwise.
    """
    known = [*_SUPPORTED, *(name for name in _IDS if name in (*starts, *_IDS[2:]))]
    if unknown := sorted(changes.keys() - {*known, *_UNSUPPORTED}):
        raise ValueError(f"generation got {unknown[0]}; expected some of {', '.join(known)}.")
    settings = _given({**settings, **changes})
    for name, neutral in _UNSUPPORTED.items():
        _expect(settings, name, neutral)
    options = special_ids(settings, starts) | {"max_new_tokens": max_new_tokens}
    _check({**settings, starts[0]: options["bos_id"]}, starts[0], vocab_size)
    processors = _processors(settings, _several(options["eos_id"]), max_new_tokens)
    options |= {"processors": tuple(_whole(processor) for processor in processors)}
    if (num_beams := settings.get("num_beams", 1)) > 1:
        power = settings.get("length_penalty", 1.0)
        stop = stopping.transformers(settings.get("early_stopping", False), power)
        options |= {
            "num_beams": num_beams,
            "length_penalty": penalties.power(power),
            "stopping": stop,
        }
    return options


def _expect(settings: Mapping[str, Any], name: str, neutral: tuple[Any, ...]) -> None:
    value = settings.get(name, neutral[0])
    if not any(value is one or (value == one and one is not None) for one in neutral):
        raise CheckpointError(
            f"the settings of generation have {name} {value!r}, which is not supported; "
            f"generation(..., {name}={neutral[0]!r}) goes without it."
        )


def _check(settings: Mapping[str, Any], start: str, vocab_size: int) -> None:
    """Whether what is supported has values that mean something; ``start`` is the first token's name.

    Raises:
      CheckpointError: it has not; the message names the setting.
    """
    beams = settings.get("num_beams", 1)
    if not isinstance(beams, int) or beams < 1:
        raise CheckpointError(f"num_beams is {beams!r}; expected 1, for greedy decoding, or more.")
    if beams > 1 and len(set(_several(settings.get("forced_eos_token_id", ())))) > 1:
        raise CheckpointError(
            f"forced_eos_token_id is {settings['forced_eos_token_id']!r} and num_beams {beams}: to beams all "
            "of them are worth the same, and transformers takes any; expected one token."
        )
    if (early := settings.get("early_stopping", False)) not in (True, False, "never"):
        raise CheckpointError(f"early_stopping is {early!r}; expected True, False or 'never'.")
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


def _processors(
    settings: Mapping[str, Any], ends: list[int], max_new_tokens: int
) -> list[LogitsProcessor]:
    processors = []
    if size := settings.get("no_repeat_ngram_size", 0):
        processors.append(constraints.no_repeat_ngram(size))
    words = [word for word in settings.get("bad_words_ids", ()) if word not in [[e] for e in ends]]
    if words:
        processors.append(constraints.ban_ngrams(words))
    ends = [end for end in ends if end >= 0]  # a negative one never comes
    if ends and "min_new_tokens" in settings:  # takes the place of the other
        processors.append(constraints.min_new_tokens(settings["min_new_tokens"], ends))
    elif ends and (least := settings.get("min_length", 0)):  # the prefix counts
        processors.append(_where(lambda context: context.length < least, constraints.ban(ends)))
    first = settings.get("forced_bos_token_id")
    if first is not None:  # behind a start of one token only
        processors.append(
            _where(lambda context: context.length == 1, constraints.force({0: first}))
        )
    if last := _several(settings.get("forced_eos_token_id", ())):
        processors.append(constraints.force({max_new_tokens - 1: min(last)}))
    if tokens := _tokens(settings, "suppress_tokens"):
        processors.append(constraints.ban(tokens))
    if tokens := _tokens(settings, "begin_suppress_tokens"):

        def begins(context: Context) -> Any:
            """At the first token that is not forced."""
            forced = 0 if first is None else jnp.asarray(context.start == 1, int)
            return context.generated == forced

        processors.append(_where(begins, constraints.ban(tokens)))
    return processors


def _where(condition: Callable[[Context], Any], processor: LogitsProcessor) -> LogitsProcessor:
    """The processor where the condition holds."""
    return lambda logits, context: jnp.where(condition(context), processor(logits, context), logits)


def _whole(processor: LogitsProcessor) -> LogitsProcessor:
    """The processor over all that stands in a row: transformers takes padding for tokens like any."""
    return lambda logits, context: processor(logits, context.padded)


def _tokens(settings: Mapping[str, Any], name: str) -> list[int]:
    return [token for token in settings.get(name, ()) if token >= 0]  # -1 stands for none


def _several(ids: Any) -> list[int]:
    return [ids] if isinstance(ids, int) else list(ids)


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}
