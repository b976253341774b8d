"""Several pictures of one example, and their captions in one text, where each stands after its picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from crossattn.data.errors import DataError
from crossattn.data.features.base import Feature
from crossattn.data.features.image import Image
from crossattn.data.features.text import Text
from crossattn.data.packing import Batch, Layout, stack
from crossattn.data.tokenizers import BOS, PAD, UNK

IMAGE = UNK
"""The token of an image. No text has it, because tokenizers fall back on bytes."""


@dataclass(frozen=True)
class Images(Feature):
    """Pictures, float32 [images H W C], 0 after the last; batches hold NAME [rows images H W C].

    Attributes:
        image: feature of each.
        images: the most pictures of an example.
    """

    image: Image
    images: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.images, *self.image.shape)

    def prepare(self, value: Any) -> Float[np.ndarray, "images H W C"]:
        """Returns the pictures; DataError where there are too many, or one is wrong."""
        found = np.zeros(self.shape, np.float32)
        for place, each in enumerate(_checked(value, self.images)):
            found[place] = self.image.prepare(each)
        return found


@dataclass(frozen=True)
class Interleaved(Feature):
    """Texts, each after its image: ``<s> <image> text </s> <image> text </s> ...``.

    A value is a sequence of texts. Batches hold int32 arrays of length T = images (text.max_length +
    image_tokens): NAME_in, NAME_out and NAME_segment_ids [rows T]; shots [rows T], the index of the text that
    has this token of NAME_out, -1 for other tokens; and image_positions [rows images], the place of the first
    token of each image in NAME_in, -1 for no image.

    Attributes:
        text: feature of each; longer texts are cut.
        images: the most texts of an example.
        image_tokens: repetitions of ``<image>``.
    """

    text: Text
    images: int
    image_tokens: int = 1

    dtype = np.int32

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.images, self.text.max_length)

    def prepare(self, value: Any) -> Int[np.ndarray, "images tokens"]:
        """Returns the tokens of the texts, 0 after the end of each; DataError where there are too many."""
        found = np.full(self.shape, PAD, np.int32)
        for row, each in zip(found, _checked(value, self.images), strict=False):
            ids = self.text.prepare(each)
            row[: len(ids)] = ids
        return found

    def collate(self, name: str, layout: Layout, values: Sequence[np.ndarray]) -> Batch:
        texts = stack(layout, values, self.dtype, self.shape)
        return interleaved(texts, self.image_tokens, name)


def interleaved(
    texts: Int[np.ndarray, "rows images tokens"], image_tokens: int = 1, name: str = "target"
) -> Batch:
    """Returns the arrays of an `Interleaved` from the tokens of its texts, 0 after the end of each."""
    rows, images, most = texts.shape
    tokens = np.full((rows, images * (most + image_tokens) + 1), PAD, np.int32)
    shots, positions = np.full_like(tokens, -1), np.full((rows, images), -1, np.int32)
    for row in range(rows):
        tokens[row, 0], end = BOS, 1
        for shot, text in enumerate(texts[row]):
            if not (count := np.count_nonzero(text != PAD)):
                break
            first = end + image_tokens
            tokens[row, end:first] = IMAGE
            tokens[row, first : first + count] = text[:count]
            shots[row, first : first + count] = shot
            positions[row, shot], end = end, first + count
    return {
        f"{name}_in": tokens[:, :-1],
        f"{name}_out": tokens[:, 1:],
        f"{name}_segment_ids": (tokens[:, :-1] != PAD).astype(np.int32),
        "shots": shots[:, 1:],
        "image_positions": positions,
    }


def _checked(value: Any, most: int) -> Sequence[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or len(value) > most:
        raise DataError(f"{type(value).__name__} came; expected a sequence of {most} at most")
    return value
