"""crossattn: attention between sequences, in JAX.

``import crossattn as xa`` brings names on first use, so importing costs little:

* ``xa.attend``: the one attention function; ``xa.masks``, ``xa.Mask``, ``xa.Memory`` go with it;
* ``xa.positions``, ``xa.rotary``, ``xa.bias``: positions;
* ``xa.nn``: modules; ``xa.models``: architectures; ``xa.init``, ``xa.apply``: parameters as plain dicts;
* ``xa.decode``, ``xa.viz``, ``xa.data``, ``xa.train``: generation, pictures, text, training.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_LOCATIONS = {
    "attend": "crossattn.ops.attend:attend",
    "merge": "crossattn.ops.merge:merge",
    "Mask": "crossattn.ops.masks:Mask",
    "Memory": "crossattn.ops.memory:Memory",
    "init": "crossattn.functional:init",
    "apply": "crossattn.functional:apply",
    "masks": "crossattn.ops.masks",
    "positions": "crossattn.ops.positions",
    "rotary": "crossattn.ops.rotary",
    "bias": "crossattn.ops.bias",
    "ops": "crossattn.ops",
    "nn": "crossattn.nn",
    "models": "crossattn.models",
    "functional": "crossattn.functional",
    "decode": "crossattn.decode",
    "viz": "crossattn.viz",
    "data": "crossattn.data",
    "train": "crossattn.train",
}

__all__ = ["__version__", *_LOCATIONS]


def __getattr__(name: str) -> Any:
    if name not in _LOCATIONS:
        raise AttributeError(f"module 'crossattn' has no attribute {name!r}")
    module, _, attribute = _LOCATIONS[name].partition(":")
    value = importlib.import_module(module)
    if attribute:
        value = getattr(value, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
