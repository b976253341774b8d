"""Methods that tasks ask of a model: a protocol for each kind of model.

A class is held to the protocol of its task before anything is made: it has each method, with arguments of
those names, but for what stands before a slash. Shapes have the letters of ``crossattn.types``.
"""

import inspect
from typing import Any, Protocol


class LanguageModel(Protocol):
    """Next tokens of a text [B T], several texts a row."""

    def hidden(self, tokens: Any, *, segment_ids: Any, positions: Any, key: Any) -> Any:
        """Vectors [B T D]; a token reads its own segment, and a key turns dropout on."""
        ...

    def logits(self, hidden: Any, /) -> Any:
        """[B T V]; where ``output_table()`` gives [V D] too, the loss holds fewer of them at once."""
        ...


class MaskedLanguageModel(Protocol):
    """Tokens of a text [B T], read both ways."""

    def hidden(self, tokens: Any, *, segment_ids: Any, key: Any) -> Any:
        """Vectors [B T D]; a token reads its own segment."""
        ...

    def logits(self, hidden: Any, /) -> Any:
        """[B T V]."""
        ...


class Generator(Protocol):
    """Decoding, see ``docs/decoding.md``."""

    def prefill(self, batch: int, num_beams: int, cache_length: int) -> Any:
        """States of ``decode_step``; what the model reads is given by name."""
        ...

    def decode_step(self, tokens: Any, states: Any) -> Any:
        """[B J T] -> (logits [B J T V], states)."""
        ...


class TranslationModel(Generator, Protocol):
    """Texts [B T] of texts [B S]."""

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
    ) -> Any:
        """(vectors [B T D], weights of cross-attention [L B N T S] or None)."""
        ...

    def logits(self, hidden: Any, /) -> Any:
        """[B T V], as of a ``LanguageModel``."""
        ...


class CaptioningModel(Generator, Protocol):
    """Texts [B T] of pictures or sounds [B ...]."""

    def hidden(
        self,
        source: Any,
        target_in: Any,
        *,
        target_segment_ids: Any,
        target_positions: Any,
        key: Any,
    ) -> Any:
        """(vectors [B T D], weights or None)."""
        ...

    def logits(self, hidden: Any, /) -> Any:
        """[B T V], as of a ``LanguageModel``."""
        ...


class InterleavedModel(Generator, Protocol):
    """Next tokens of texts [B T] that pictures [B I H W C] stand in, at places [B I]."""

    def hidden(
        self, tokens: Any, *, segment_ids: Any, images: Any, image_positions: Any, key: Any
    ) -> Any:
        """Vectors [B T D]."""
        ...

    def logits(self, hidden: Any, /) -> Any:
        """[B T V], as of a ``LanguageModel``."""
        ...


class ImageClassifier(Protocol):
    """Classes of pictures [B H W C]."""

    def hidden(self, *, image: Any, key: Any) -> Any:
        """Whatever ``logits`` reads."""
        ...

    def logits(self, hidden: Any, /) -> Any:
        """[B classes]."""
        ...


class TextClassifier(Protocol):
    """Classes of texts [B S]."""

    def hidden(self, *, tokens: Any, segment_ids: Any, key: Any) -> Any:
        """Whatever ``logits`` reads."""
        ...

    def logits(self, hidden: Any, /) -> Any:
        """[B classes]."""
        ...


class ImageTextClassifier(Protocol):
    """Classes of pictures [B H W C] and texts [B S] together."""

    def hidden(self, *, image: Any, tokens: Any, segment_ids: Any, key: Any) -> Any:
        """Whatever ``logits`` reads."""
        ...

    def logits(self, hidden: Any, /) -> Any:
        """[B classes]."""
        ...


class RegionClassifier(Protocol):
    """Classes of the regions of pages, by texts [B R T], boxes [B R 4] and pictures [B R H W C]."""

    def hidden(self, text: Any, boxes: Any, pictures: Any, *, segment_ids: Any, key: Any) -> Any:
        """Vectors of the regions [B R D]."""
        ...

    def logits(self, hidden: Any, /) -> Any:
        """[B R classes]."""
        ...


def lacking(module: type, protocol: type) -> str:
    """What a class lacks of a protocol, "has no hidden(tokens, *, key)", or ""."""
    for name, method in inspect.getmembers(protocol, inspect.isfunction):
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
