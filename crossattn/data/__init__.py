"""Text, images and sound: sources, tokenizers, features of examples and static-shape batches.

This floor imports nothing else of crossattn. Submodules load on first use, since builders,
tokenizers and pipelines each need their own package.
"""

import importlib
import pkgutil
from types import ModuleType

__all__ = [module.name for module in pkgutil.iter_modules(__path__)]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
