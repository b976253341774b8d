"""crossattn: attention between sequences, in JAX.

``import crossattn as xa`` brings names on first use, so importing costs little:

* ``xa.attend``: the one attention function; ``xa.masks``, ``xa.Mask``, ``xa.Memory`` go with it;
* ``xa.use_backend``: one kernel for all attention inside, for debugging, export and forward mode;
* ``xa.use_rules``: which axes of a mesh split examples, heads and lengths, where they have other names;
* ``xa.explain``: which backend would run for a call, and why not another; ``python -m crossattn doctor``;
* ``xa.testing``: what ``attend`` promises, as a suite for any attention function;
* ``xa.positions``, ``xa.rotary``, ``xa.bias``: positions;
* ``xa.nn``: modules; ``xa.models``: architectures; ``xa.init``, ``xa.apply``: parameters as plain dicts;
* ``xa.load``, ``xa.save``: pretrained models, from and to checkpoints of ``transformers``;
* ``xa.decode``, ``xa.viz``, ``xa.data``, ``xa.train``: generation, pictures, text, training.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_LOCATIONS = {
    "attend": "crossattn.ops.attend:attend",
    "attend_sharded": "crossattn.ops.sharded:attend_sharded",
    "attention_stats": "crossattn.ops.stats:attention_stats",
    "merge": "crossattn.ops.merge:merge",
    "use_backend": "crossattn.ops.backends:use_backend",
    "use_rules": "crossattn.axes:use_rules",
    "explain": "crossattn.ops.explain:explain",
    "Mask": "crossattn.ops.masks:Mask",
    "Memory": "crossattn.ops.memory:Memory",
    "init": "crossattn.functional:init",
    "apply": "crossattn.functional:apply",
    "load": "crossattn.weights:load",
    "save": "crossattn.weights:save",
    "masks": "crossattn.ops.masks",
    "positions": "crossattn.ops.positions",
    "rotary": "crossattn.ops.rotary",
    "bias": "crossattn.ops.bias",
    "ops": "crossattn.ops",
    "nn": "crossattn.nn",
    "models": "crossattn.models",
    "functional": "crossattn.functional",
    "axes": "crossattn.axes",
    "decode": "crossattn.decode",
    "weights": "crossattn.weights",
    "viz": "crossattn.viz",
    "data": "crossattn.data",
    "train": "crossattn.train",
    "testing": "crossattn.testing",
}

__all__ = ["__version__", *_LOCATIONS]


def __getattr__(name: str) -> Any:
    if name not in _LOCATIONS:
        import difflib

        near = difflib.get_close_matches(name, _LOCATIONS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"module 'crossattn' has no attribute {name!r}{hint}")
    module, _, attribute = _LOCATIONS[name].partition(":")
    value = importlib.import_module(module)
    if attribute:
        value = getattr(value, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
