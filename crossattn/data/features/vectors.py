"""Ready-made vectors: embeddings, features of regions, measurements."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from crossattn.data.errors import DataError
from crossattn.data.features.base import Feature


@dataclass(frozen=True)
class Vectors(Feature):
    """One vector, float32 [D], or several, [n, D].

    Batches hold NAME [rows, D]; of several NAME [rows, length, D], NAME_segment_ids and NAME_positions.

    Attributes:
        dim: D.
        max_length: the most vectors of a value that is several; None is a single one.
    """

    dim: int
    max_length: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.dim,)

    def length(self, value: Any) -> int:
        return len(self._array(value))

    def prepare(self, value: Any) -> Float[np.ndarray, "..."]:
        """Returns the vector, or the vectors.

        Raises:
            DataError: they have another shape, or are not finite.
        """
        vectors = self._array(value)[: None if self.max_length is None else self.max_length]
        if not np.isfinite(vectors).all():
            raise DataError("a vector holds NaN or infinity")
        return vectors

    def _array(self, value: Any) -> np.ndarray:
        try:
            vectors = np.asarray(value, np.float32)
        except (TypeError, ValueError):
            raise DataError("the vectors are no numbers, or of unlike sizes") from None
        expected = f"[{self.dim}]" if self.max_length is None else f"[n {self.dim}]"
        if vectors.shape[-1:] != (self.dim,) or vectors.ndim != len(expected.split()):
            raise DataError(f"vectors of shape {list(vectors.shape)} came; expected {expected}")
        return vectors
