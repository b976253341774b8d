"""Protocols of models: the methods that tasks call.

A model has each method with arguments of the same names, but for those before a slash. A key turns dropout
on. ``output_table()``, if a model has it, is the output layer [V D], so that a loss of tokens holds fewer
logits at once; of masked tokens ``output_product(hidden)``, which gives vectors and such a layer.
"""

import inspect
from typing import Protocol


class Head(Protocol):
    """Logits [... V] of tokens or classes from the result of ``hidden``."""

    def logits(self, hidden, /): ...


class Generator(Protocol):
    """Decoding, see ``docs/decoding.md``: states, then (logits [B J T V], states) of tokens [B J T]."""

    def prefill(self, batch, num_beams, cache_length): ...

    def decode_step(self, tokens, states): ...


class LanguageModel(Head, Protocol):
    """Texts [B T] in, vectors [B T D] of the next tokens out; a token reads its own segment."""

    def hidden(self, tokens, *, segment_ids, positions, key): ...


class RetrievalLanguageModel(Head, Protocol):
    """Texts [B T] and neighbours [B C K R] of their chunks in, vectors [B T D] of the next tokens out."""

    def hidden(self, tokens, *, neighbours, segment_ids, key): ...


class MaskedLanguageModel(Head, Protocol):
    """Texts [B T] in, vectors [B T D] out; a token reads all of its own segment."""

    def hidden(self, tokens, *, segment_ids, key): ...


class TranslationModel(Head, Generator, Protocol):
    """Texts [B S] and [B T] in, vectors [B T D] and weights [L B N T S] or None out."""

    def hidden(
        self,
        source,
        target_in,
        *,
        source_segment_ids,
        target_segment_ids,
        source_positions,
        target_positions,
        key,
        return_weights,
    ): ...


class PointingModel(Head, Protocol):
    """Passages [B S] and questions [B T] in, log p [B T V] of what stands at each place and weights out."""

    def hidden(
        self,
        source,
        target,
        *,
        candidates,
        source_segment_ids,
        target_segment_ids,
        key,
        return_weights,
    ): ...


class CaptioningModel(Head, Generator, Protocol):
    """Pictures or sounds [B ...] and texts [B T] in, vectors [B T D] and weights or None out."""

    def hidden(
        self, source, target_in, *, target_segment_ids, target_positions, key, return_weights
    ): ...


class SpeechModel(Head, Generator, Protocol):
    """Letters [B S] and groups of frames [B T G] in, vectors [B T D] and weights [L B N T S] out.

    ``logits`` gives the next groups and logits [B T] of a stop, ``first`` the group that decoding begins on.
    """

    def hidden(
        self, source, target_in, *, source_segment_ids, target_segment_ids, key, return_weights
    ): ...

    def refine(self, groups, segment_ids, key): ...

    def first(self, batch): ...


class InterleavedModel(Head, Generator, Protocol):
    """Texts [B T] with pictures [B I H W C] at places [B I] in, vectors [B T D] out."""

    def hidden(self, tokens, *, segment_ids, images, image_positions, key): ...


class TextToImageModel(Protocol):
    """Noisy pictures [B H W C], times [B] and captions [B S] in, vectors [B H W C] out."""

    def read(self, tokens, segment_ids, /): ...

    def denoise(self, image, time, states, /, *, return_weights): ...

    def __call__(self, image, time, tokens, segment_ids, /, *, key): ...


class ImageClassifier(Head, Protocol):
    """Pictures [B H W C] in, the argument of ``logits`` out."""

    def hidden(self, *, image, key): ...


class TextClassifier(Head, Protocol):
    """Texts [B S] in, the argument of ``logits`` out."""

    def hidden(self, *, tokens, segment_ids, key): ...


class SoundClassifier(Head, Protocol):
    """Frames of sounds [B F M] in, the argument of ``logits`` out."""

    def hidden(self, *, sound, key): ...


class RegionClassifier(Head, Protocol):
    """Texts [B R T], boxes [B R 4] and pictures [B R H W C] of regions in, vectors [B R D] out."""

    def hidden(self, text, boxes, pictures, *, segment_ids, key): ...


def lacking(module: type, *protocols: type) -> str:
    """Returns the method that a class lacks, "has no hidden(tokens, *, key)", or ""."""
    methods = [each for own in protocols for each in inspect.getmembers(own, inspect.isfunction)]
    for name, method in sorted(methods, key=lambda method: method[0] != "hidden"):
        if name.startswith("_"):
            continue
        asked = list(inspect.signature(method).parameters.values())[1:]
        call = str(inspect.Signature([p.replace(annotation=p.empty) for p in asked]))
        if not hasattr(module, name):
            return f"has no {name}{call}"
        has = inspect.signature(getattr(module, name)).parameters
        named = [p.name for p in asked if p.kind is not p.POSITIONAL_ONLY]
        missing = [name for name in named if name not in has]
        if missing and not any(p.kind is p.VAR_KEYWORD for p in has.values()):
            return f"has no {name}{call}: it lacks {', '.join(missing)}"
    return ""
