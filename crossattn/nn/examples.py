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


def pairs(
    rows: int, source_vocab: int, target_vocab: int, padding: int = 0
) -> dict[str, Int[np.ndarray, "rows _"]]:
    """Draws the arguments of an encoder-decoder of texts: source, target, and their segments."""
    source, source_segment_ids = texts(rows, 6, source_vocab, padding)
    target_in, target_segment_ids = texts(rows, 5, target_vocab, padding)
    return dict(
        source=source,
        target_in=target_in,
        source_segment_ids=source_segment_ids,
        target_segment_ids=target_segment_ids,
    )


def vectors(*shape: int, padding: int = 0) -> Float[np.ndarray, "..."]:
    """Draws normal numbers of a shape, and appends ``padding`` zeros along the second axis."""
    return _padded(np.random.default_rng(shape).normal(size=shape).astype(np.float32), padding)


def _padded(x: Any, padding: int) -> Any:
    return np.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
