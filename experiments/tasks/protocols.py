"""Methods that tasks ask of a model: a protocol for each kind of model, held to before anything is made.

A model has each method, with arguments of those names but for what stands before a slash. A key turns dropout
on; where ``output_table()`` gives the output layer [V D], a loss of tokens holds fewer logits at once.
"""

import inspect
from typing import Any, Protocol


class Head(Protocol):
    """Logits [... V], of tokens or of classes, of what ``hidden`` gives."""

    def logits(self, hidden: Any, /) -> Any: ...


class Generator(Protocol):
    """Decoding, see ``docs/decoding.md``: states, then (logits [B J T V], states) of tokens [B J T]."""

    def prefill(self, batch: int, num_beams: int, cache_length: int) -> Any: ...

    def decode_step(self, tokens: Any, states: Any) -> Any: ...


class LanguageModel(Head, Protocol):
    """Texts [B T] in, vectors [B T D] of the next tokens out; a token reads its own segment."""

    def hidden(self, tokens: Any, *, segment_ids: Any, positions: Any, key: Any) -> Any: ...


class MaskedLanguageModel(Head, Protocol):
    """Texts [B T] in, vectors [B T D] out; a token reads all of its own segment."""

    def hidden(self, tokens: Any, *, segment_ids: Any, key: Any) -> Any: ...


class TranslationModel(Head, Generator, Protocol):
    """Texts [B S] and [B T] in, vectors [B T D] and weights [L B N T S] or None out."""

    def hidden(
        self,
        source: Any,
        target_in: Any,
        *,
        source_segment_ids: Any,
        target_segment_ids: Any,
        source_positions: Any,
        target_positions: Any,
        key: Any,
        return_weights: bool,
    ) -> Any: ...


class CaptioningModel(Head, Generator, Protocol):
    """Pictures or sounds [B ...] and texts [B T] in, vectors [B T D] and weights or None out."""

    def hidden(
        self,
        source: Any,
        target_in: Any,
        *,
        target_segment_ids: Any,
        target_positions: Any,
        key: Any,
    ) -> Any: ...


class InterleavedModel(Head, Generator, Protocol):
    """Texts [B T] with pictures [B I H W C] at places [B I] in, vectors [B T D] out."""

    def hidden(
        self, tokens: Any, *, segment_ids: Any, images: Any, image_positions: Any, key: Any
    ) -> Any: ...


class ImageClassifier(Head, Protocol):
    """Pictures [B H W C] in, whatever ``logits`` reads out."""

    def hidden(self, *, image: Any, key: Any) -> Any: ...


class TextClassifier(Head, Protocol):
    """Texts [B S] in, whatever ``logits`` reads out."""

    def hidden(self, *, tokens: Any, segment_ids: Any, key: Any) -> Any: ...


class ImageTextClassifier(Head, Protocol):
    """Pictures [B H W C] and texts [B S] in, whatever ``logits`` reads out."""

    def hidden(self, *, image: Any, tokens: Any, segment_ids: Any, key: Any) -> Any: ...


class RegionClassifier(Head, Protocol):
    """Texts [B R T], boxes [B R 4] and pictures [B R H W C] of regions in, vectors [B R D] out."""

    def hidden(
        self, text: Any, boxes: Any, pictures: Any, *, segment_ids: Any, key: Any
    ) -> Any: ...


def lacking(module: type, protocol: type) -> str:
    """What a class lacks of a protocol, "has no hidden(tokens, *, key)", or ""."""
    methods = inspect.getmembers(protocol, inspect.isfunction)
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
