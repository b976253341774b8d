"""The vocoder: the sound's own spectrogram is near the given one."""

import tracemalloc

import numpy as np
import pytest

from crossattn.data.mel import HOP, RATE, log_mel, mel_filters
from crossattn.data.vocoder import LONGEST, sound_of, spread

SECONDS = np.arange(RATE) / RATE
CHIRP = 0.4 * np.sin(2 * np.pi * (300 * SECONDS + 900 * SECONDS**2)) * np.sin(9 * SECONDS) ** 2


def test_a_sound_comes_back_with_its_spectrogram_and_its_loudness():
    mel = log_mel(CHIRP)
    found = sound_of(mel)
    assert found.dtype == np.float32 and len(found) == HOP * len(mel)
    assert np.std(found) == pytest.approx(np.std(CHIRP), rel=0.1)
    again = log_mel(found)
    loud = mel > mel.max() - 1.0  # 40 dB
    assert np.abs(again - mel)[loud].mean() < 0.05  # 2 dB
    assert np.abs(log_mel(sound_of(mel, iterations=0)) - mel)[loud].mean() > 0.1, "phases matter"


def test_a_tone_has_its_frequency():
    found = sound_of(log_mel(0.3 * np.sin(2 * np.pi * 1000 * SECONDS)))
    heard = np.argmax(np.abs(np.fft.rfft(found * np.hanning(len(found))))) * RATE / len(found)
    assert heard == pytest.approx(1000, abs=40)  # half a band


def test_powers_of_frequencies_have_the_bands_that_were_asked_for():
    rng = np.random.default_rng(0)
    asked = np.exp(rng.normal(size=(3, 201))) @ mel_filters(80).T
    found = spread(asked)
    assert (found >= 0).all()
    np.testing.assert_allclose(found @ mel_filters(80).T, asked, rtol=0.1)


def test_frames_that_no_sound_has_are_refused_or_held():
    for wrong, message in (
        (np.zeros((0, 80)), "1 to 6000"),
        (np.zeros((LONGEST + 1, 80)), "1 to 6000"),
        (np.full((2, 80), np.nan), "NaN"),
    ):
        with pytest.raises(ValueError, match=message):
            sound_of(wrong)
    loud = sound_of(np.full((20, 80), 99.0), iterations=2)
    assert np.isfinite(loud).all() and np.abs(loud).max() <= 1.0
    assert len(sound_of(np.zeros((1, 80)))) >= HOP


def test_memory_is_thirty_kilobytes_a_frame():
    frames = log_mel(np.tile(CHIRP, 8))
    tracemalloc.start()
    sound_of(frames, iterations=2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 5_000 < peak / len(frames) < 33_000
