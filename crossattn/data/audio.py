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

from crossattn.data.errors import DataError
from crossattn.data.mel import RATE

_BLOCK_SECONDS = 30
_LONGEST_SECONDS = 4 * 3600  # of the array that is made before anything is read; it may grow


def read_audio(
    file: str | os.PathLike | io.BufferedIOBase, rate: int = RATE
) -> Float[np.ndarray, " samples"]:
    """The sound of a file, channels averaged, at ``rate`` samples a second.

    Args:
      file: a path, or an open binary file that can seek.
      rate: of the result.

    Raises:
      DataError: the file is missing, empty, cut short, not sound, or holds NaN; names the file.
      ModuleNotFoundError: the packages that read sound are not installed.
    """
    soundfile, soxr = _libraries()
    name = str(getattr(file, "name", file)) if not isinstance(file, str | os.PathLike) else file
    if isinstance(file, str | os.PathLike):
        _check_whole(Path(file))
    try:
        with soundfile.SoundFile(file) as sound:
            announced = sound.frames / sound.samplerate
            # A second more than announced; a damaged header may announce anything.
            expected = rate * (1 + int(min(announced, _LONGEST_SECONDS)))
            audio = _joined(_resampled(sound, rate, soxr), expected)
    except soundfile.LibsndfileError as error:
        raise DataError(
            f"{name} cannot be read as sound ({error.error_string.rstrip('.')}); expected WAV, FLAC, "
            "OGG or MP3."
        ) from None
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


def _resampled(sound: Any, rate: int, soxr: Any) -> Iterator[np.ndarray]:
    """The channels' mean at another rate, a block at a time."""
    resampler = soxr.ResampleStream(sound.samplerate, rate, 1, dtype="float32")
    size = _BLOCK_SECONDS * sound.samplerate
    for block in sound.blocks(size, dtype="float32", always_2d=True):
        yield resampler.resample_chunk(block.mean(axis=1))
    yield resampler.resample_chunk(np.zeros(0, np.float32), last=True)


def _joined(pieces: Iterable[np.ndarray], expected: int) -> np.ndarray:
    """The pieces in one array, made in the size expected; it grows where that is too small."""
    found, size = np.empty(expected, np.float32), 0
    for piece in pieces:
        if size + len(piece) > len(found):
            found = np.concatenate(
                [found[:size], np.empty(len(found) // 2 + len(piece), np.float32)]
            )
        found[size : size + len(piece)] = piece
        size += len(piece)
    return found[:size]


def _check_whole(path: Path) -> None:
    """A WAV file says at its start how long it is; libsndfile takes what there is, without a word."""
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
    try:
        import soundfile
        import soxr
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"sound files are read with soundfile and soxr, and {error.name} is not installed: "
            "pip install crossattn[speech]",
            name=error.name,
        ) from error
    return soundfile, soxr
