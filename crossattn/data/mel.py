"""The log-mel spectrogram of Whisper: sound at 16 kHz in, a hundred frames a second out.

Plain numpy on the host, a block of frames at a time: an hour of sound needs little more memory than its
frames, 115 MB of 80 bands.
"""

import functools

import numpy as np
from jaxtyping import Float

RATE = 16_000
"""Samples a second."""

HOP, WINDOW = 160, 400
"""Samples from frame to frame, and samples of a frame."""

_BLOCK = 3000  # frames


def log_mel(
    audio: Float[np.ndarray, " samples"], mels: int = 80, *, silence: int = 0
) -> Float[np.ndarray, "F M"]:
    """Computes frames of sound, one for every ``HOP`` samples.

    Decibels are cut 80 below the loudest frame and scaled to about -1 to 1; the loudest is that of the whole
    array, so pieces computed apart are not those of the whole.

    Args:
      audio: samples between -1 and 1 at ``RATE``.
      mels: bands, M; the released Whispers take 80, large-v3 takes 128.
      silence: samples of silence that follow; their frames are returned too.

    Raises:
      ValueError: ``audio`` is not one-dimensional.
    Source: Radford et al. 2022, section 2.2.
    """
    if audio.ndim != 1:
        raise ValueError(f"audio has shape {audio.shape}; expected [samples], one channel.")
    frames = (len(audio) + silence) // HOP
    if frames == 0:
        return np.zeros((0, mels), np.float32)
    hann = np.hanning(WINDOW + 1)[:-1]
    filters = mel_filters(mels)
    mel = np.empty((frames, mels), np.float32)
    for start in range(0, frames, _BLOCK):
        stop = min(start + _BLOCK, frames)
        seen = _between(audio, silence, start * HOP - WINDOW // 2, (stop - 1) * HOP + WINDOW // 2)
        windows = np.lib.stride_tricks.sliding_window_view(seen, WINDOW)[::HOP]
        power = np.abs(np.fft.rfft(windows * hann)) ** 2
        mel[start:stop] = np.log10(np.maximum(power @ filters.T, 1e-10))
    np.maximum(mel, mel.max() - 8.0, out=mel)
    mel += 4.0
    mel /= 4.0
    return mel


def _between(audio: np.ndarray, silence: int, start: int, stop: int) -> np.ndarray:
    """Returns the samples of places in the sound and the silence after it, mirrored at both ends."""
    last = len(audio) + silence - 1
    places = last - np.abs(last - np.abs(np.arange(start, stop)))
    sounds = places < len(audio)
    samples = np.zeros(len(places), audio.dtype)
    samples[sounds] = audio[places[sounds]]
    return samples


@functools.cache
def mel_filters(mels: int) -> Float[np.ndarray, "M bins"]:
    """Returns triangles of equal area, evenly spaced by pitch: linear up to 1 kHz, logarithmic above.

    Source: Slaney 1998, "Auditory Toolbox".
    """
    edges = _edges(mels)
    bins = np.fft.rfftfreq(WINDOW, 1 / RATE)
    low, centre, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising, falling = (bins - low) / (centre - low), (high - bins) / (high - centre)
    return np.maximum(0.0, np.minimum(rising, falling)) * 2.0 / (high - low)


def mel_centres(mels: int) -> Float[np.ndarray, " M"]:
    """Returns the frequencies in the middle of the bands, in hertz."""
    return _edges(mels)[1:-1]


_BREAK, _LINEAR = 1000.0, 3.0 / 200.0  # hertz; steps of pitch for a hertz
_LOG_STEP = np.log(6.4) / 27.0


def _pitch(hertz: float) -> float:
    if hertz < _BREAK:
        return hertz * _LINEAR
    return _BREAK * _LINEAR + float(np.log(hertz / _BREAK)) / _LOG_STEP


def _edges(mels: int) -> np.ndarray:
    return _hertz(np.linspace(0.0, _pitch(RATE / 2), mels + 2))


def _hertz(pitch: np.ndarray) -> np.ndarray:
    above = _BREAK * np.exp(_LOG_STEP * (pitch - _BREAK * _LINEAR))
    return np.where(pitch < _BREAK * _LINEAR, pitch / _LINEAR, above)
