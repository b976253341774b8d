"""What becomes of the values of an example: a file a kind.

An example is a dict, and a feature says of one of its values how it is prepared, how long it is, and how the
values of several examples become the arrays of a batch. A feature with a
`max_length` has rows of that width and can be packed, and its NAME comes with NAME_segment_ids and
NAME_positions; one without is of a fixed size and is stacked, one a row, as NAME alone.

    features = {"image": Image(64, 64), "caption": Text(tokenizer, 32, predicted=True)}
    batches = pipeline.feature_batches(source, features, mode="bucket", batch_size=32)
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Integer

from crossattn.data.features.boxes import Boxes
from crossattn.data.features.crops import Crops
from crossattn.data.features.image import Image
from crossattn.data.features.label import Label
from crossattn.data.features.links import Links
from crossattn.data.features.packed import PackedTexts
from crossattn.data.features.sound import Sound, SoundWindow
from crossattn.data.features.tagged import TaggedText
from crossattn.data.features.text import Text
from crossattn.data.features.texts import Texts
from crossattn.data.features.vectors import Vectors
from crossattn.data.packing import Batch, Layout

__all__ = [
    "Boxes",
    "Crops",
    "Feature",
    "Image",
    "Label",
    "Links",
    "PackedTexts",
    "Sound",
    "SoundWindow",
    "TaggedText",
    "Text",
    "Texts",
    "Vectors",
]


@runtime_checkable
class Feature(Protocol):
    """What becomes of one value of an example.

    Its representation as text names all that changes what it prepares, but for what its first examples show.
    """

    @property
    def max_length(self) -> int | None:
        """The longest that a value may be; None where all are of one size."""
        ...

    def lengths(self, values: Sequence[Any]) -> Integer[np.ndarray, " values"]:
        """How long each value is, before it is cut; only asked where there is a `max_length`.

        Raises:
            DataError: a value is wrong.
        """
        ...

    def prepare(self, value: Any) -> np.ndarray:
        """The array of a value, cut to `max_length` along its first axis.

        Raises:
            DataError: it is wrong; one line, which names what came and what was expected.
        """
        ...

    def collate(self, name: str, layout: Layout, values: Sequence[np.ndarray]) -> Batch:
        """The arrays of a batch, from the prepared values of the examples of a layout, in its order."""
        ...
