"""Sound files as arrays: any rate, any channels, whatever libsndfile reads (WAV, FLAC, OGG, MP3).

A file is read and resampled a block at a time, so memory holds the result and little else.
"""

import io
import os
from pathlib import Path

import numpy as np
from jaxtyping import Float

from crossattn.data.errors import DataError
from crossattn.data.mel import RATE

_BLOCK_SECONDS = 30


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
            resampler = soxr.ResampleStream(sound.samplerate, rate, 1, dtype="float32")
            pieces = []
            for block in sound.blocks(
                _BLOCK_SECONDS * sound.samplerate, dtype="float32", always_2d=True
            ):
                pieces.append(resampler.resample_chunk(block.mean(axis=1)))
            pieces.append(resampler.resample_chunk(np.zeros(0, np.float32), last=True))
            expected = sound.frames / sound.samplerate
    except soundfile.LibsndfileError as error:
        raise DataError(
            f"{name} cannot be read as sound ({error.error_string.rstrip('.')}); expected WAV, FLAC, "
            "OGG or MP3."
        ) from None
    audio = np.concatenate(pieces)
    if not len(audio):
        raise DataError(f"{name} holds no sound: it has a header and no samples.")
    if len(audio) / rate < expected - 0.1:
        raise DataError(
            f"{name} is cut short: {expected:.1f} s are announced and {len(audio) / rate:.1f} s are "
            "there; copy it again."
        )
    if not np.isfinite(audio).all():
        raise DataError(f"{name} holds samples that are NaN or infinite.")
    return audio


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
