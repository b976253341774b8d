"""The base of features."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Integer

from crossattn.data.packing import Batch, Layout, lay, stack


class Feature:
    """A value of an example and the arrays that it becomes.

    The representation as text names all that changes what a feature prepares, except its tokenizers.

    Attributes:
        max_length: the longest that a value may be; None where all values are of one size.
        shape, dtype: of what stands at one place of a row; without a `max_length`, of the whole value.
    """

    max_length: int | None = None
    shape: tuple[int, ...] = ()
    dtype: type = np.float32

    def length(self, value: Any) -> int:
        """Returns how long a value is before it is cut; DataError where the value is wrong."""
        return len(value)

    def lengths(self, values: Sequence[Any]) -> Integer[np.ndarray, " values"]:
        """Returns the length of each value before it is cut; only asked where there is a `max_length`.

        Raises:
            DataError: a value is wrong.
        """
        return np.array([self.length(value) for value in values], np.int64)

    def prepare(self, value: Any) -> np.ndarray:
        """Returns the array of a value, cut to `max_length` along its first axis: the same at each call.

        Raises:
            DataError: the value is wrong; one line names the value received and the one expected.
        """
        raise NotImplementedError

    def collate(self, name: str, layout: Layout, values: Sequence[np.ndarray]) -> Batch:
        """Returns the arrays of a batch from the prepared values of a layout's examples, in its order."""
        if self.max_length is None:
            return {name: stack(layout, values, self.dtype, self.shape)}
        return lay(layout, name, {name: values}, self.dtype, self.shape)
