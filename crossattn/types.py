"""Array types, and the letters that name their axes everywhere in this package.

``B`` batch, ``T`` query (target) length, ``S`` key (source) length, ``N`` query heads, ``K`` key/value
heads, ``G = N // K`` queries that share a key head, ``H`` head size, ``D`` model size, ``F`` feed-forward
size, ``V`` vocabulary, ``L`` layers.
"""

from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer, Key, PyTree, Shaped

__all__ = [
    "AnyArray",
    "Array",
    "Axes",
    "Bool",
    "Float",
    "Int",
    "Integer",
    "Key",
    "Params",
    "PyTree",
    "Shaped",
]

AnyArray = Array | np.ndarray
"""For arguments that may come from outside JAX."""

Params = dict[str, Any]
"""A model's parameters: a plain nested dict with string keys and array leaves.

``weights.quantize`` makes some leaves pairs of arrays, integers and scales.
"""

Axes = dict[str, Any]
"""The same nested dict as ``Params``; each leaf is a tuple of logical axis names, one an axis."""
