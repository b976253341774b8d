"""Architectures, one file each: a frozen config, the module, ``tiny()`` and ``example()`` for tests.

``find`` looks a name up: "transformer" is ``transformer.py`` here, with ``Transformer``,
``TransformerConfig`` and ``tiny``; a name with a dot, "mine.reader", is a module on the import path.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from crossattn.models.attention_sum_reader import (
    AttentionSumReader,
    AttentionSumReaderConfig,
)
from crossattn.models.bert import Bert, BertConfig
from crossattn.models.clip import CLIP, CLIPConfig
from crossattn.models.crossvit import CrossViT, CrossViTConfig
from crossattn.models.decoder import Decoder, DecoderConfig
from crossattn.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from crossattn.models.flamingo import Flamingo, FlamingoConfig
from crossattn.models.llava import Llava, LlavaConfig
from crossattn.models.perceiver_io import PerceiverIO, PerceiverIOConfig
from crossattn.models.pixart import PixArt, PixArtConfig
from crossattn.models.pointer_generator import PointerGenerator, PointerGeneratorConfig
from crossattn.models.retro import Retro, RetroConfig
from crossattn.models.rnn_encoder_decoder import RNNEncoderDecoder, RNNEncoderDecoderConfig
from crossattn.models.selfdoc import SelfDoc, SelfDocConfig
from crossattn.models.speecht5 import SpeechT5, SpeechT5Config
from crossattn.models.transformer import Transformer, TransformerConfig
from crossattn.models.transformer_tts import TransformerTTS, TransformerTTSConfig
from crossattn.models.vision_encoder_decoder import (
    VisionEncoderDecoder,
    VisionEncoderDecoderConfig,
)
from crossattn.models.vit import ViT, ViTConfig
from crossattn.models.whisper import Whisper, WhisperConfig

__all__ = [
    "Architecture",
    "AttentionSumReader",
    "AttentionSumReaderConfig",
    "Bert",
    "BertConfig",
    "CLIP",
    "CLIPConfig",
    "CrossViT",
    "CrossViTConfig",
    "Decoder",
    "DecoderConfig",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "Flamingo",
    "FlamingoConfig",
    "Llava",
    "LlavaConfig",
    "PerceiverIO",
    "PerceiverIOConfig",
    "PixArt",
    "PixArtConfig",
    "PointerGenerator",
    "PointerGeneratorConfig",
    "RNNEncoderDecoder",
    "RNNEncoderDecoderConfig",
    "Retro",
    "RetroConfig",
    "SelfDoc",
    "SelfDocConfig",
    "SpeechT5",
    "SpeechT5Config",
    "Transformer",
    "TransformerConfig",
    "TransformerTTS",
    "TransformerTTSConfig",
    "ViT",
    "ViTConfig",
    "VisionEncoderDecoder",
    "VisionEncoderDecoderConfig",
    "Whisper",
    "WhisperConfig",
    "find",
    "known",
]


@dataclass(frozen=True)
class Architecture:
    """The contents of an architecture's file.

    Attributes:
      name: of the file.
      config: the class of its config, a frozen dataclass.
      module: the class of the model, called as ``module(config, rngs=rngs)``.
      tiny: makes a small config for tests.
      example: draws random arguments of a call, ``example(config, rows, padding)``: arrays by name, whose
        first axis is rows; sequences get ``padding`` further places at the end, marked as padding. None
        for an architecture without one.
    """

    name: str
    config: Any
    module: Any
    tiny: Callable[..., Any]
    example: Callable[..., dict[str, Any]] | None


def known() -> list[str]:
    """Lists the names of the architectures of this package."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(name: str) -> Architecture:
    """Finds the architecture of a name: "transformer", or "mine.reader" for a module of one's own.

    Raises:
      ValueError: the file does not exist, or lacks one of the three; the message lists the known ones.
    """
    module = _imported(name)
    title = "".join(part.capitalize() for part in name.rpartition(".")[2].split("_"))
    for other, value in vars(module).items():  # e.g. PerceiverIO of perceiver_io
        if isinstance(value, type) and other.lower() == title.lower():
            title = other
    wanted = (title, f"{title}Config", "tiny")
    lacking = [part for part in wanted if not hasattr(module, part)]
    if lacking:
        raise ValueError(
            f"{module.__name__} has no {' and no '.join(lacking)}; an architecture has {', '.join(wanted)}."
        )
    model, config, tiny = (getattr(module, part) for part in wanted)
    return Architecture(name, config, model, tiny, getattr(module, "example", None))


def _imported(name: str) -> ModuleType:
    if name in known():
        return importlib.import_module(f"{__name__}.{name}")
    if "." not in name or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(
            f"there is no model {name!r}; expected one of {', '.join(known())}, or a module of your own"
            " with a dot in its name."
        )
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"the model {name!r} cannot be imported ({error}).") from error
