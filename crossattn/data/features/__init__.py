"""Features of examples, one file each kind.

An example is a dict. A feature prepares one of its values, states its length, and collates the values of
several examples into the arrays of a batch. A feature with a `max_length` has rows of that width and can be
packed; its NAME comes with NAME_segment_ids and NAME_positions. A feature without is of a fixed size and is
stacked, one value a row, as NAME alone.

    features = {"image": Image(64, 64), "caption": Text(tokenizer, 32, predicted=True)}
    batches = pipeline.feature_batches(source, features, mode="bucket", batch_size=32)
"""

from crossattn.data.features.base import Feature
from crossattn.data.features.boxes import Boxes
from crossattn.data.features.crops import Crops
from crossattn.data.features.image import Image
from crossattn.data.features.interleaved import Images, Interleaved
from crossattn.data.features.label import Label
from crossattn.data.features.letters import Letters
from crossattn.data.features.links import Links
from crossattn.data.features.neighbours import Neighbours, Window
from crossattn.data.features.packed import PackedTexts
from crossattn.data.features.sound import Sound, SoundWindow
from crossattn.data.features.tagged import TaggedText
from crossattn.data.features.text import Text
from crossattn.data.features.texts import Texts
from crossattn.data.features.vectors import Vectors

__all__ = [
    "Boxes",
    "Crops",
    "Feature",
    "Image",
    "Images",
    "Interleaved",
    "Label",
    "Letters",
    "Links",
    "Neighbours",
    "PackedTexts",
    "Sound",
    "SoundWindow",
    "TaggedText",
    "Text",
    "Texts",
    "Vectors",
    "Window",
]
