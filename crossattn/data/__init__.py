"""Text, images and sound: sources, tokenizers, features of examples and static-shape batches.

This floor imports nothing else of crossattn. Submodules load on first use, since builders,
tokenizers and pipelines each need their own package.
"""

import importlib
from types import ModuleType

_SUBMODULES = (
    "archives",
    "audio",
    "corruption",
    "denoising",
    "errors",
    "evaluation",
    "examples",
    "features",
    "fetch",
    "mel",
    "packing",
    "pairs",
    "pipeline",
    "prepare",
    "prepared",
    "published_tokenizer",
    "records",
    "sources",
    "speech",
    "textfiles",
    "tokenizers",
    "whisper_tokens",
    "words",
)

__all__ = list(_SUBMODULES)


def __getattr__(name: str) -> ModuleType:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_SUBMODULES])
