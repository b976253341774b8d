"""Array types, and the letters that name their axes everywhere in this package.

``B`` batch, ``T`` query (target) length, ``S`` key (source) length, ``N`` query heads, ``K`` key/value
heads, ``G = N // K`` queries that share a key head, ``H`` head size, ``D`` model size, ``F`` feed-forward
size, ``V`` vocabulary, ``L`` layers.
"""

from typing import Annotated, Any

import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer, Key, PyTree, Shaped

__all__ = [
    "AnyArray",
    "Array",
    "Axes",
    "Bool",
    "Count",
    "Float",
    "Int",
    "Integer",
    "Key",
    "NonNegative",
    "Params",
    "Positive",
    "PyTree",
    "Rate",
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

Count = Annotated[int, "[1, inf)"]
"""A field of a config whose range is an interval, as mathematics writes it: here, 1 or more."""

Rate = Annotated[float, "[0, 1)"]
NonNegative = Annotated[float, "[0, inf)"]
Positive = Annotated[float, "(0, inf)"]
