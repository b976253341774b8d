"""Sound as frames of a log-mel spectrogram."""

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from crossattn.data.audio import read_audio
from crossattn.data.errors import DataError
from crossattn.data.mel import HOP, RATE, log_mel
from crossattn.data.packing import Batch, Layout, lay


@dataclass(frozen=True)
class Sound:
    """Sound, which becomes frames, a hundred a second, float32 [frames, mels].

    A value is a path, the bytes of a file of any rate, or samples between -1 and 1 at 16 kHz, a float array
    [samples]. Batches hold NAME [rows, length, mels], NAME_segment_ids and NAME_positions.

    Attributes:
        max_length: frames; the longest that it may be. The default is 30 s.
        mels: bands.
    """

    max_length: int = 3000
    mels: int = 80

    def lengths(self, values: Sequence[Any]) -> Int[np.ndarray, " values"]:
        """Frames of each, before it is cut.

        Raises:
            DataError: one is no sound.
        """
        return np.array([len(_samples(value)) // HOP for value in values], np.int64)

    def prepare(self, value: Any) -> Float[np.ndarray, "frames mels"]:
        """The frames of a sound; what is too long is cut before the loudest frame is looked for.

        Raises:
            DataError: it cannot be read, is no sound, or is shorter than a frame.
        """
        samples = _samples(value)
        if len(samples) < HOP:
            raise DataError(
                f"{len(samples)} samples of sound; expected {HOP} or more, {1000 * HOP // RATE} ms"
            )
        return log_mel(samples[: self.max_length * HOP], self.mels)

    def collate(self, name: str, layout: Layout, values: Sequence[np.ndarray]) -> Batch:
        """The arrays of the sounds of a layout."""
        return lay(layout, name, {name: values}, np.float32, (self.mels,))


def _samples(value: Any) -> Float[np.ndarray, " samples"]:
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or not np.issubdtype(value.dtype, np.floating):
            raise DataError(
                f"sound of shape {list(value.shape)} and {value.dtype}; expected floats [samples]"
            )
        if not np.isfinite(value).all():
            raise DataError("the sound holds samples that are NaN or infinite")
        return value.astype(np.float32, copy=False)
    if isinstance(value, bytes):
        file = io.BytesIO(value)
        file.name = "the sound"
        return read_audio(file)
    if isinstance(value, str | os.PathLike):
        return read_audio(value)
    raise DataError(f"{type(value).__name__} came; expected a path, bytes, or an array of samples")
