"""Sound files as arrays: any rate, any channels, whatever libsndfile reads (WAV, FLAC, OGG, MP3).

A file is read and resampled a block at a time, so memory holds the result and little else.
"""

import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from crossattn.data.errors import DataError, needs
from crossattn.data.mel import RATE

LONGEST = 12 * 3600
"""The most seconds of sound that are read: 2.6 GiB at 16 kHz."""

RATES = (1_000, 768_000)
"""The least and the most samples a second of a file."""

_CHANNELS = 256
_BLOCK = 2**18  # numbers that are read at a time
_AT_FIRST = 4 * 3600  # seconds of the array that is made before anything is read; it may grow


def read_audio(
    file: str | os.PathLike | io.BufferedIOBase, rate: int = RATE
) -> Float[np.ndarray, " samples"]:
    """Returns the sound of a file, channels averaged, at ``rate`` samples a second.

    Args:
      file: a path, or an open binary file that can seek.
      rate: of the result.

    Raises:
      DataError: the file is missing, empty, cut short, not sound, longer than `LONGEST`, of a rate
        outside `RATES`, or holds NaN; names the file.
      ModuleNotFoundError: the packages that read sound are not installed.
    """
    soundfile, soxr = _libraries()
    name = str(getattr(file, "name", file)) if not isinstance(file, str | os.PathLike) else file
    if isinstance(file, str | os.PathLike):
        _check_whole(Path(file))
    try:
        with soundfile.SoundFile(file) as sound:
            _check_claims(name, sound)
            announced = sound.frames / sound.samplerate
            # A second more than announced; a damaged header may announce anything.
            expected = rate * (1 + int(min(announced, _AT_FIRST)))
            audio = _joined(_resampled(sound, rate, soxr), expected, rate * LONGEST)
    except soundfile.LibsndfileError as error:
        raise DataError(
            f"{name} cannot be read as sound ({error.error_string.rstrip('.')}); expected WAV, FLAC, "
            "OGG or MP3."
        ) from None
    if audio is None:
        raise DataError(f"{name} lasts {_TOO_LONG}")
    if not len(audio):
        raise DataError(f"{name} holds no sound: it has a header and no samples.")
    if len(audio) / rate < announced - 0.1:
        raise DataError(
            f"{name} is cut short: {announced:.1f} s are announced and {len(audio) / rate:.1f} s are "
            "there; copy it again."
        )
    if not np.isfinite(audio.sum(dtype=np.float64)):
        raise DataError(f"{name} holds samples that are NaN or infinite.")
    return audio


_TOO_LONG = f"more than {LONGEST // 3600} hours, the longest that is read; cut it into parts."


def _check_claims(name: Any, sound: Any) -> None:
    """Refuses sizes in a header that would take too much memory."""
    if not RATES[0] <= sound.samplerate <= RATES[1]:
        raise DataError(
            f"{name} has {sound.samplerate} samples a second; expected {RATES[0]} to {RATES[1]}; "
            "resample it, or mend its header."
        )
    if not 1 <= sound.channels <= _CHANNELS:
        raise DataError(
            f"{name} has {sound.channels} channels; expected 1 to {_CHANNELS}; mix it down, or mend "
            "its header."
        )


def _resampled(sound: Any, rate: int, soxr: Any) -> Iterator[np.ndarray]:
    """Yields the mean of the channels at another rate, a block at a time."""
    resampler = soxr.ResampleStream(sound.samplerate, rate, 1, dtype="float32")
    # Until nothing comes: what a header announces may be more than there is, or nothing.
    while len(block := sound.read(_BLOCK // sound.channels, dtype="float32", always_2d=True)):
        yield resampler.resample_chunk(block.mean(axis=1))
    yield resampler.resample_chunk(np.zeros(0, np.float32), last=True)


def _joined(pieces: Iterable[np.ndarray], expected: int, limit: int) -> np.ndarray | None:
    """Returns the pieces in one array of the expected size, which may grow; None above the limit."""
    samples, size = np.empty(expected, np.float32), 0
    for piece in pieces:
        if size + len(piece) > limit:
            return None
        if size + len(piece) > len(samples):
            samples = np.concatenate(
                [samples[:size], np.empty(len(samples) // 2 + len(piece), np.float32)]
            )
        samples[size : size + len(piece)] = piece
        size += len(piece)
    return samples[:size]


def _check_whole(path: Path) -> None:
    """Refuses an empty file and a WAV file shorter than its header states, which libsndfile accepts."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(12)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    if size == 0:
        raise DataError(f"{path} is empty.")
    if head[:4] == b"RIFF" and head[8:12] == b"WAVE":
        announced = int.from_bytes(head[4:8], "little") + 8
        # Programs that write to a pipe announce nothing, or the most that fits.
        if size < announced < 2**31:
            raise DataError(
                f"{path} is cut short: {announced} bytes are announced and {size} are there; copy it "
                "again."
            )


def _libraries():
    with needs("sound files are read with soundfile and soxr", "speech"):
        import soundfile
        import soxr
    return soundfile, soxr
