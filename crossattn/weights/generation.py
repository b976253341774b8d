"""A checkpoint's settings of generation as arguments of ``decode``: what transformers makes of them.

Source: ``GenerationMixin._get_logits_processor`` of transformers 5, whose order the processors keep.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from crossattn.decode import constraints, penalties, stopping
from crossattn.decode.processors import Context, Processor
from crossattn.weights.safetensors import CheckpointError

# What is not done here: the values at which it does nothing, the one to say first.
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
}
_IDS = {"decoder_start_token_id": "bos_id", "eos_token_id": "eos_id", "pad_token_id": "pad_id"}
_SUPPORTED = (
    "num_beams length_penalty early_stopping no_repeat_ngram_size bad_words_ids min_length min_new_tokens "
    "forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens"
).split()


def arguments(
    settings: Mapping[str, Any], ids: Mapping[str, Any], max_length: int, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """See ``Pretrained.generation``.

    Args:
      settings: the checkpoint's, by the names that transformers has for them.
      ids: its special tokens.
      max_length: the most tokens generated.
      changes: settings that the caller wants otherwise.
    """
    if unknown := sorted(changes.keys() - {*_SUPPORTED, *_IDS, *_UNSUPPORTED}):
        raise ValueError(
            f"generation got {unknown[0]}; expected some of {', '.join([*_SUPPORTED, *_IDS])}."
        )
    settings = {k: v for k, v in {**settings, **changes}.items() if v is not None}
    for name, (neutral, *others) in _UNSUPPORTED.items():
        value = settings.get(name, neutral)
        if value not in (neutral, *others):
            raise CheckpointError(
                f"the checkpoint's settings of generation have {name} {value!r}, which is not supported; "
                f"generation(..., {name}={neutral!r}) goes without it."
            )
    found = dict(ids) | {ours: changes[name] for name, ours in _IDS.items() if name in changes}
    found |= {"max_length": max_length}
    found |= {"processors": tuple(_processors(settings, _several(found["eos_id"]), max_length))}
    if (beams := settings.get("num_beams", 1)) > 1:
        power = settings.get("length_penalty", 1.0)
        stop = stopping.transformers(settings.get("early_stopping", False), power)
        found |= {"beams": beams, "length_penalty": penalties.power(power), "stopping": stop}
    return found


def _processors(settings: Mapping[str, Any], ends: list[int], max_length: int) -> list[Processor]:
    found = []
    if size := settings.get("no_repeat_ngram_size", 0):
        found.append(constraints.no_repeat_ngram(size))
    words = [word for word in settings.get("bad_words_ids", ()) if word not in [[e] for e in ends]]
    if words:
        found.append(constraints.ban_ngrams(words))
    if "min_new_tokens" in settings:  # takes the place of the other
        found.append(constraints.min_length(settings["min_new_tokens"], ends))
    elif least := settings.get("min_length", 0):  # the prefix counts
        found.append(_where(lambda context: context.length < least, constraints.ban(ends)))
    first = settings.get("forced_bos_token_id")
    if first is not None:  # behind a start of one token only
        found.append(_where(lambda context: context.length == 1, constraints.force({0: first})))
    if last := _several(settings.get("forced_eos_token_id", [])):
        found.append(constraints.force({max_length - 1: min(last)}))
    if tokens := _tokens(settings, "suppress_tokens"):
        found.append(constraints.ban(tokens))
    if tokens := _tokens(settings, "begin_suppress_tokens"):
        place = 0 if first is None else 1
        found.append(_where(lambda context: context.generated == place, constraints.ban(tokens)))
    return found


def _where(condition: Callable[[Context], Any], processor: Processor) -> Processor:
    """The processor where the condition holds."""
    return lambda logits, context: jnp.where(condition(context), processor(logits, context), logits)


def _tokens(settings: Mapping[str, Any], name: str) -> list[int]:
    return [token for token in settings.get(name, ()) if token >= 0]  # -1 stands for none


def _several(ids: Any) -> list[int]:
    return [ids] if isinstance(ids, int) else list(ids)
