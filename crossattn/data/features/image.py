"""Pictures of any kind as arrays of one size."""

import contextlib
import io
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from crossattn.data.errors import DataError, Unreadable, needs
from crossattn.data.features.base import Feature

LARGEST = 2**26
"""Pixels of a picture that is read; a header may announce any number."""
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM")
"""Formats that are read; others that Pillow knows start programs, or are hardly ever meant."""
_MANY = 2**22
"""Pixels from which on a picture is not held whole, but at twice the size that is wanted."""
_ORDER = 0
"""Seed of the order of permuted pixels, the same in every run and split."""

_WHITE = {"I;16": 65535, "I;16L": 65535, "I;16B": 65535, "I;16N": 65535, "I": 65535, "F": 1}


@dataclass(frozen=True)
class Image(Feature):
    """A picture, float32 [H W C]; batches hold NAME [rows H W C].

    A value is a path, the bytes of a file, a Pillow image, or an array [H W] or [H W C] of 1, 3 or 4
    channels, uint8 or float from 0 to 1. Files are turned as their EXIF says; transparent pixels stand on
    white.

    Attributes:
        height, width: of the result, in pixels.
        channels: 3, or 1 for grey.
        resize: "crop" scales the picture until it covers the result and cuts what stands over, evenly;
            "stretch" scales its sides apart; "exact" refuses one of another size.
        mean, std: subtracted from the values, which are 0 to 1, and then their divisor; a channel each, or
            one for all.
        unreadable: "refuse" ends with the first file that is no picture; "skip" has its example left out of
            its batch.
        permuted: put all pixels in one other order, the same for every picture of that size. Positions are
            counted in the new order, so they say nothing of the grid. Source: "permuted ImageNet", Jaegle et
            al. 2021, "Perceiver", section 4.1.
    """

    height: int
    width: int
    channels: int = 3
    resize: str = "crop"
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    unreadable: str = "refuse"
    permuted: bool = False

    def __post_init__(self):
        if self.height < 1 or self.width < 1:
            raise DataError(f"an image of {self.width} x {self.height}; expected 1 x 1 or more")
        if self.channels not in (1, 3):
            raise DataError(f"channels is {self.channels}; expected 1 or 3")
        if self.resize not in ("crop", "stretch", "exact"):
            raise DataError(f"resize is {self.resize!r}; expected 'crop', 'stretch' or 'exact'")
        if self.unreadable not in ("refuse", "skip"):
            raise DataError(f"unreadable is {self.unreadable!r}; expected 'refuse' or 'skip'")
        for name in ("mean", "std"):
            if len(getattr(self, name)) not in (1, self.channels):
                raise DataError(
                    f"{name} has {len(getattr(self, name))} numbers; expected 1, or {self.channels}, "
                    "one a channel"
                )
        if min(self.std) <= 0:
            raise DataError(f"std is {self.std}; expected numbers above 0")

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.height, self.width, self.channels)

    @cached_property
    def order(self) -> np.ndarray:
        """The numbers of the pixels in the order in which ``permuted`` puts them."""
        return np.random.default_rng(_ORDER).permutation(self.height * self.width)

    def prepare(self, value: Any) -> Float[np.ndarray, "H W C"]:
        """Returns the picture in the size and the range of the results.

        Raises:
            DataError: it cannot be read, is no picture, cut short, too large, or not of the exact size.
        """
        size = None if self.resize == "exact" else 2 * max(self.height, self.width)
        picture = self.opened(value, size)
        pixels = np.asarray(self._resized(picture), np.float32) / np.float32(255)
        pixels = pixels.reshape(self.shape)
        if self.permuted:
            pixels = pixels.reshape(-1, self.channels)[self.order].reshape(self.shape)
        return (pixels - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)

    def opened(self, value: Any, side: int | None = None) -> Any:
        """Returns the picture as a Pillow image, upright, in grey or colour, on white.

        Args:
            value: of an example.
            side: pixels of its shorter side, at least, where a large one is made smaller; None keeps it.

        Raises:
            DataError: it cannot be read, is no picture, cut short, or too large.
        """
        try:
            picture = _opened(value, side)
        except Unreadable as error:
            if self.unreadable == "skip":
                raise
            raise DataError(f"{error}; mend it, or leave such out by unreadable=skip") from None
        if min(picture.size) < 1:
            raise DataError(f"the image has {_size(picture)} pixels; expected at least one")
        return _flat(picture, self.channels)

    def _resized(self, picture: Any) -> Any:
        pillow, ops = _library()
        size = (self.width, self.height)
        if picture.size == size:
            return picture
        if self.resize == "exact":
            raise DataError(
                f"the image has {_size(picture)} pixels; expected {self.width} x {self.height}"
            )
        if self.resize == "crop":
            return ops.fit(picture, size, pillow.Resampling.BICUBIC)
        return picture.resize(size, pillow.Resampling.BICUBIC)


def _opened(value: Any, side: int | None) -> Any:
    """Returns a value as a Pillow image, read whole and upright."""
    pillow, _ = _library()
    if isinstance(value, pillow.Image):
        return value
    if isinstance(value, np.ndarray):
        return _of_array(value, pillow)
    if isinstance(value, bytes):
        name, file = "the image", io.BytesIO(value)
    elif isinstance(value, str | os.PathLike):
        name, file = str(value), Path(value)
    else:
        raise DataError(
            f"{type(value).__name__} came; expected a path, bytes, an array or a Pillow image"
        )
    try:
        return _read(name, file, side)
    except pillow.DecompressionBombError as error:
        raise Unreadable(f"{name} is too large: {error}") from None
    except pillow.UnidentifiedImageError:
        raise Unreadable(
            f"{name} is no image of a kind that is read: {', '.join(FORMATS)}"
        ) from None
    except FileNotFoundError:
        raise Unreadable(f"{name} is missing") from None
    except DataError:
        raise
    # A damaged file makes Pillow's readers raise almost anything.
    except Exception as error:
        said = str(error).partition("\n")[0] or type(error).__name__
        raise Unreadable(f"{name} cannot be read as an image: {said}") from None


def _read(name: str, file: Any, side: int | None) -> Any:
    """Reads a file whole and upright; a large one is decoded near the size that is wanted."""
    pillow, ops = _library()
    with pillow.open(file, formats=FORMATS) as picture:
        pixels = picture.width * picture.height
        if pixels > LARGEST:
            raise Unreadable(
                f"{name} has {_size(picture)} pixels; at most {LARGEST:,} are read, make it smaller"
            )
        if pixels <= _MANY:
            side = None
        if side is not None:
            picture.draft(None, (side, side))  # which JPEG can
        picture.load()
        # EXIF that is damaged says nothing of pixels.
        with contextlib.suppress(Exception):
            ops.exif_transpose(picture, in_place=True)
        return picture if side is None else _reduced(picture, side)


def _reduced(picture: Any, side: int) -> Any:
    """Returns a picture smaller by a whole factor, its shorter side at least `side`."""
    factor = min(picture.size) // side
    if factor < 2:
        return picture
    if picture.mode in ("1", "P", "PA"):
        picture = picture.convert("RGBA" if picture.has_transparency_data else "RGB")
    elif picture.mode.startswith("I;16"):
        picture = picture.convert("I")
    return picture.reduce(factor)


def _of_array(value: np.ndarray, pillow: Any) -> Any:
    if value.ndim not in (2, 3) or (value.ndim == 3 and value.shape[2] not in (1, 3, 4)):
        raise DataError(
            f"the image has shape {list(value.shape)}; expected [H W], or [H W C] of 1, 3 or 4 channels"
        )
    if 0 in value.shape:
        raise DataError(f"the image has shape {list(value.shape)}; expected at least one pixel")
    if np.issubdtype(value.dtype, np.floating):
        # NaN is in no range.
        if not (value.min() >= 0 and value.max() <= 1):
            raise DataError(
                f"the image has values from {value.min()} to {value.max()}; expected floats from 0 to 1, "
                "or uint8"
            )
        value = np.rint(value * 255).astype(np.uint8)
    if value.dtype != np.uint8:
        raise DataError(f"the image is of {value.dtype}; expected uint8, or floats from 0 to 1")
    return pillow.fromarray(
        np.ascontiguousarray(value[..., 0] if value.shape[2:] == (1,) else value)
    )


def _flat(picture: Any, channels: int) -> Any:
    """Returns a picture of any mode in grey or colour, 8 bits a channel, on white."""
    pillow, _ = _library()
    if picture.mode in _WHITE:
        grey = np.asarray(picture, np.float32) / _WHITE[picture.mode]
        if not (grey.min() >= 0 and grey.max() <= 1):
            raise DataError(
                f"the image has values from {grey.min():g} to {grey.max():g} of what is white; expected 0 "
                f"to 1 (mode {picture.mode})"
            )
        picture = pillow.fromarray(np.rint(grey * 255).astype(np.uint8))
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        white = pillow.new("RGBA", picture.size, "white")
        picture = pillow.alpha_composite(white, picture)
    return picture.convert("L" if channels == 1 else "RGB")


def _size(picture: Any) -> str:
    return f"{picture.width} x {picture.height}"


def _library() -> Any:
    with needs("images are read with Pillow", "images"):
        from PIL import Image, ImageOps
    return Image, ImageOps
