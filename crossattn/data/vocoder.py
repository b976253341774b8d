"""Sound from a log-mel spectrogram, without a model: the inverse of ``log_mel`` as far as there is one.

Bands are spread over frequencies by non-negative least squares, and the phases, which a spectrogram lacks,
are those of a sound whose own spectrogram is near: Griffin and Lim's iteration, with momentum.
"""

import numpy as np
from jaxtyping import Complex, Float

from crossattn.data.mel import HOP, WINDOW, mel_filters

LONGEST = 6000
"""The most frames, a minute: memory is about 30 kB a frame."""

_SPREAD = 100  # iterations of least squares
_HANN = np.hanning(WINDOW + 1)[:-1]


def sound_of(
    mel: Float[np.ndarray, "F M"], *, iterations: int = 60, momentum: float = 0.99, seed: int = 0
) -> Float[np.ndarray, " samples"]:
    """Returns sound at 16 kHz, ``HOP`` samples a frame, between -1 and 1.

    Args:
      mel: frames as ``log_mel`` makes them; others too, whose loudness is held to what a sound can have.
      iterations: of the phases.
      momentum: how far each goes beyond the last; 0 is Griffin and Lim's own.
      seed: of the first phases.

    Raises:
      ValueError: there is no frame, more than ``LONGEST``, or one that is not finite.
    Source: Griffin and Lim 1984, "Signal estimation from modified short-time Fourier transform"; momentum,
      Perraudin et al. 2013, "A fast Griffin-Lim algorithm".
    """
    if mel.ndim != 2 or not 0 < len(mel) <= LONGEST:
        raise ValueError(
            f"frames of shape {mel.shape} came; expected 1 to {LONGEST} of them, [F M]."
        )
    if not np.isfinite(mel).all():
        raise ValueError("the frames hold NaN or infinity.")
    power = 10.0 ** (4.0 * np.clip(mel.astype(np.float64), -3.0, 2.5) - 4.0)
    size = np.sqrt(spread(power))
    rng = np.random.default_rng(seed)
    spectrum = size * np.exp(2j * np.pi * rng.random(size.shape))
    before = np.zeros_like(spectrum)
    for _ in range(iterations):
        own = _spectrum(_sound(spectrum), len(mel))
        ahead = own + momentum * (own - before)
        before, spectrum = own, size * ahead / np.maximum(np.abs(ahead), 1e-12)
    sound = _sound(spectrum)
    return (sound / max(1.0, np.abs(sound).max())).astype(np.float32)


def spread(power: Float[np.ndarray, "F M"]) -> Float[np.ndarray, "F bins"]:
    """Returns powers of frequencies, none below 0, whose bands are the given ones, as near as there are.

    Source: Lee and Seung 2001, "Algorithms for non-negative matrix factorization", with one factor known.
    """
    filters = mel_filters(power.shape[1])
    wanted, overlap = power @ filters, filters.T @ filters
    found = wanted.copy()
    for _ in range(_SPREAD):
        found *= wanted / np.maximum(found @ overlap, 1e-30)
    return found


def _spectrum(sound: Float[np.ndarray, " samples"], frames: int) -> Complex[np.ndarray, "F bins"]:
    """Returns the spectrum of windows around each ``HOP``th sample, as ``log_mel`` has them."""
    padded = np.pad(sound, WINDOW // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP][:frames]
    return np.fft.rfft(windows * _HANN)


def _sound(spectrum: Complex[np.ndarray, "F bins"]) -> Float[np.ndarray, " samples"]:
    """Returns the sound whose windows are nearest, by least squares."""
    F = len(spectrum)
    pieces = np.fft.irfft(spectrum, WINDOW) * _HANN
    places = (HOP * np.arange(F)[:, None] + np.arange(WINDOW)).ravel()
    size = HOP * (F - 1) + WINDOW
    whole = np.bincount(places, pieces.ravel(), size)
    share = np.bincount(places, np.tile(_HANN**2, F), size)
    begun = WINDOW // 2
    sound = np.zeros(max(HOP * F, WINDOW // 2 + 1))
    part = (whole / np.maximum(share, 1e-3))[begun : begun + HOP * F]
    sound[: len(part)] = part
    return sound
