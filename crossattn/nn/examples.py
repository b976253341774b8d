"""Random inputs for the ``example`` of a model.

The same call returns the same numbers, and padding follows the unpadded part.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Int

_FIRST = 3  # the ids before it are padding, beginning and end


def texts(
    rows: int, length: int, vocab_size: int, padding: int = 0
) -> tuple[Int[np.ndarray, "rows S"], Int[np.ndarray, "rows S"]]:
    """Draws tokens [rows, length + padding], and returns their segments too, 0 for padding."""
    drawn = np.random.default_rng([length, vocab_size]).integers(_FIRST, vocab_size, (rows, length))
    tokens = _padded(drawn.astype(np.int32), padding)
    return tokens, _padded(np.ones((rows, length), np.int32), padding)


def vectors(*shape: int, padding: int = 0) -> Float[np.ndarray, "..."]:
    """Draws normal numbers of a shape, and appends ``padding`` zeros along the second axis."""
    return _padded(np.random.default_rng(shape).normal(size=shape).astype(np.float32), padding)


def _padded(x: Any, padding: int) -> Any:
    return np.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
