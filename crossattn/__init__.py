"""crossattn: attention between sequences, in JAX.

``import crossattn as xa`` imports each name on first use:

* ``xa.attend``: the attention function; ``xa.masks``, ``xa.Mask``, ``xa.Memory``: its arguments;
* ``xa.use_backend``: a context with one kernel for all attention, for debugging, export and forward mode;
* ``xa.use_rules``: a context with the mesh axes that split examples, heads and lengths;
* ``xa.explain``: the backend of a call, and why not another; ``python -m crossattn doctor`` prints it;
* ``xa.testing``: the conformance suite of ``attend``, for any attention function;
* ``xa.positions``, ``xa.rotary``, ``xa.bias``: positions;
* ``xa.nn``: modules; ``xa.models``: architectures; ``xa.init``, ``xa.apply``: parameters as plain dicts;
* ``xa.interventions``: activations of any model scaled, replaced and captured, as arguments of its call;
* ``xa.analysis``: scores of what a token rests on, beside the weights of attention;
* ``xa.load``, ``xa.save``: pretrained models, from and to checkpoints of ``transformers``;
* ``xa.decode``, ``xa.viz``, ``xa.data``, ``xa.train``: generation, pictures, text, training.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the names of _LOCATIONS, for type checkers and editors
    from crossattn import analysis as analysis
    from crossattn import axes as axes
    from crossattn import data as data
    from crossattn import decode as decode
    from crossattn import functional as functional
    from crossattn import interventions as interventions
    from crossattn import models as models
    from crossattn import nn as nn
    from crossattn import ops as ops
    from crossattn import testing as testing
    from crossattn import train as train
    from crossattn import viz as viz
    from crossattn import weights as weights
    from crossattn.axes import use_rules as use_rules
    from crossattn.functional import apply as apply
    from crossattn.functional import init as init
    from crossattn.ops import masks as masks
    from crossattn.ops import positions as positions
    from crossattn.ops.attend import attend as attend
    from crossattn.ops.backends import use_backend as use_backend
    from crossattn.ops.blockwise.stats import attention_stats as attention_stats
    from crossattn.ops.explain import explain as explain
    from crossattn.ops.masks import Mask as Mask
    from crossattn.ops.memory import Memory as Memory
    from crossattn.ops.parallel.merge import merge as merge
    from crossattn.ops.parallel.sharded import attend_sharded as attend_sharded
    from crossattn.ops.positions import bias as bias
    from crossattn.ops.positions import rotary as rotary
    from crossattn.weights import load as load
    from crossattn.weights import save as save

__version__ = "0.1.0"

_LOCATIONS = {
    "attend": "crossattn.ops.attend:attend",
    "attend_sharded": "crossattn.ops.parallel.sharded:attend_sharded",
    "attention_stats": "crossattn.ops.blockwise.stats:attention_stats",
    "merge": "crossattn.ops.parallel.merge:merge",
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
    "rotary": "crossattn.ops.positions.rotary",
    "bias": "crossattn.ops.positions.bias",
}
_MODULES = (
    "ops nn models functional axes interventions analysis decode weights viz data train testing"
)
_LOCATIONS |= {name: f"crossattn.{name}" for name in _MODULES.split()}

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
