"""Sound as frames of a log-mel spectrogram: as many as it has, or a window of a fixed size."""

import io
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from crossattn.data.audio import read_audio
from crossattn.data.errors import DataError
from crossattn.data.features.base import Feature
from crossattn.data.mel import HOP, RATE, WINDOW, log_mel


@dataclass(frozen=True)
class Sound(Feature):
    """Frames of sound, a hundred a second, float32 [frames, mels].

    A value is a path, the bytes of a file of any rate, or samples between -1 and 1 at 16 kHz, a float array
    [samples]. Batches hold NAME [rows, length, mels], NAME_segment_ids and NAME_positions.

    Attributes:
        max_length: frames; the longest that it may be. The default is 30 s.
        mels: bands.
    """

    max_length: int = 3000
    mels: int = 80

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.mels,)

    def length(self, value: Any) -> int:
        return len(samples_of(value)) // HOP

    def prepare(self, value: Any) -> Float[np.ndarray, "frames mels"]:
        """Returns the frames of a sound, which is cut before its loudest frame is looked for.

        Raises:
            DataError: it cannot be read, is no sound, or is shorter than a frame.
        """
        return frames_of(value, self.mels, self.max_length)


@dataclass(frozen=True)
class SoundWindow(Feature):
    """Sound in a window of a fixed size, as Whisper hears it: its frames, then zeros.

    A value is what `Sound` takes. Batches hold NAME [rows, length, mels].

    Attributes:
        length: frames of the window. The default is 30 s.
        mels: bands.
    """

    length: int = 3000
    mels: int = 80
    max_length: None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.length, self.mels)

    def prepare(self, value: Any) -> Float[np.ndarray, "frames mels"]:
        """Returns the window of a sound, measured as if silence followed.

        Raises:
            DataError: it cannot be read, is no sound, or is longer than the window.
        """
        samples = samples_of(value)
        frames = -(-len(samples) // HOP)
        if not 0 < frames <= self.length:
            raise DataError(
                f"{len(samples) / RATE:.2f} s of sound; expected some, {self.length * HOP / RATE:g} s at most"
            )
        window = np.zeros((self.length, self.mels), np.float32)
        window[:frames] = log_mel(samples, self.mels, silence=WINDOW)[:frames]
        return window


def frames_of(
    value: Any, mels: int, longest: int | None = None
) -> Float[np.ndarray, "frames mels"]:
    """Returns the frames of a sound, or of its beginning of at most ``longest`` frames.

    Raises:
        DataError: it cannot be read, is no sound, or is shorter than a frame.
    """
    samples = samples_of(value)
    if len(samples) < HOP:
        raise DataError(
            f"{len(samples)} samples of sound; expected {HOP} or more, {1000 * HOP // RATE} ms"
        )
    return log_mel(samples if longest is None else samples[: longest * HOP], mels)


def samples_of(value: Any) -> Float[np.ndarray, " samples"]:
    """Returns the samples of a value at 16 kHz; raises DataError where it is no sound."""
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
