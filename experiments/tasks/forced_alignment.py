"""Forced alignment: when the letters of a text are said in a recording, by a synthesiser's reading of it.

espeak-ng says the text too, and tells when it says each letter. Dynamic time warping of both sounds carries
these times over to the recording.

Sources: Malfrère and Dutoit 1997, "High-quality speech synthesis for phonetic speech segmentation"; dynamic
time warping of cepstra, Sakoe and Chiba 1978.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.fft import dct
from scipy.spatial.distance import cdist

from crossattn.data.errors import DataError
from crossattn.data.mel import HOP, RATE, log_mel
from crossattn.data.sources import espeak
from crossattn.decode.speech.timing import warp

_COEFFICIENTS = 13


def letter_times(
    texts: Sequence[str],
    sounds: Sequence[Float[np.ndarray, " samples"]],
    voice: str,
    data_dir: Any = None,
) -> list[Float[np.ndarray, " ends"]]:
    """Returns the second of each recording at which each letter of its text begins, and the last ends.

    Args:
      texts: what is said.
      sounds: recordings at 16 kHz, each of 10 ms and more.
      voice: of espeak-ng, in the language of the texts.
      data_dir: where a fetched espeak-ng lies.

    Raises:
      DataError: espeak-ng has no such voice, or says nothing for a text.
      DataUnavailable: there is no espeak-ng here, and no apt to bring it.
    """
    said = espeak.lettered(texts, voice, data_dir)
    if silent := [text for text, (own, _) in zip(texts, said, strict=True) if len(own) < HOP]:
        raise DataError(
            f"espeak-ng's voice {voice} says nothing for the text {silent[0]!r}; expected words"
        )
    return [carried(times, own, sound) for (own, times), sound in zip(said, sounds, strict=True)]


def carried(
    times: Float[np.ndarray, " n"],
    said: Float[np.ndarray, " samples"],
    sound: Float[np.ndarray, " others"],
) -> Float[np.ndarray, " n"]:
    """Returns where the seconds ``times`` of one sound are in another of the same words, at 16 kHz.

    Silence around the words is left out; a frame that is warped onto several is in their middle.
    """
    part = espeak.sounding(sound)
    before, after = _cepstra(said), _cepstra(sound[part])
    rows, columns = warp(cdist(before, after))
    middles = np.bincount(rows, columns) / np.bincount(rows)
    frames = np.interp(times * RATE / HOP, np.arange(len(before)) + 0.5, middles + 0.5)
    return ((frames * HOP + (part.start or 0)) / RATE).astype(np.float32)


def _cepstra(sound: Float[np.ndarray, " samples"]) -> Float[np.ndarray, "F C"]:
    """Computes the first cepstral coefficients of the mel spectrogram, less their means over the sound."""
    found = np.asarray(dct(log_mel(sound), norm="ortho", axis=1))[:, :_COEFFICIENTS]
    return found - found.mean(0)
