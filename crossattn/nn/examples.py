"""Inputs drawn at random, of which the ``example`` of a model is made: what it can be tried with.

The same call gives the same numbers, and padding comes after what there is without it.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Int

_FIRST = 3  # token that is no padding, beginning or end


def texts(
    rows: int, length: int, vocab_size: int, padding: int = 0
) -> tuple[Int[np.ndarray, "rows S"], Int[np.ndarray, "rows S"]]:
    """Tokens [rows, length + padding], and their segments, 1, and 0 where they are padding."""
    drawn = np.random.default_rng([length, vocab_size]).integers(_FIRST, vocab_size, (rows, length))
    tokens = _padded(drawn.astype(np.int32), padding)
    return tokens, _padded(np.ones((rows, length), np.int32), padding)


def vectors(*shape: int, padding: int = 0) -> Float[np.ndarray, "..."]:
    """Normal numbers of a shape, whose second axis is ``padding`` longer, by zeros."""
    return _padded(np.random.default_rng(shape).normal(size=shape).astype(np.float32), padding)


def _padded(x: Any, padding: int) -> Any:
    return np.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
