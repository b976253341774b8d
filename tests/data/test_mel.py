"""The log-mel front end, against the feature extractor of transformers."""

import tracemalloc

import numpy as np
import pytest

from crossattn.data import mel
from tests.closeness import close
from tests.data import golden_log_mel
from tests.peers import peer

# Of log10(power) / 4: in float32 a band that a tone a thousand times its power leaks into keeps three digits.
QUIET_BAND = 3e-4


@pytest.mark.parametrize("mels", [80, 128])
def test_frames_are_those_of_the_reference(mels):
    with np.load(golden_log_mel.PATH) as golden:
        found = mel.log_mel(golden_log_mel.sound(8_000), mels)
        np.testing.assert_allclose(found, golden[f"mels{mels}"], atol=QUIET_BAND)


def test_more_than_one_block_of_frames_is_as_the_reference():
    peer("transformers")
    audio = golden_log_mel.sound(31 * 16_000 + 77)
    found = mel.log_mel(audio, 80)
    np.testing.assert_allclose(found, golden_log_mel.reference(audio, 80), atol=QUIET_BAND)


@pytest.mark.parametrize(("samples", "frames"), [(0, 0), (159, 0), (160, 1), (16_000, 100)])
def test_silence_has_one_level_and_a_frame_every_160_samples(samples, frames):
    found = mel.log_mel(np.zeros(samples, np.float32))
    assert found.shape == (frames, 80) and np.all(found == -1.5)


def test_two_channels_are_refused():
    with pytest.raises(Exception, match="samples"):
        mel.log_mel(np.zeros((2, 16_000), np.float32))


@pytest.mark.parametrize(
    ("samples", "silence"), [(160, 0), (300, 0), (333, 77), (4_007, 3_211), (0, 900)]
)
def test_blocks_leave_no_seam(samples, silence, monkeypatch):
    audio = golden_log_mel.sound(samples)
    whole = mel.log_mel(audio, silence=silence)
    padded = np.pad(np.pad(audio, (0, silence)), mel.WINDOW // 2, mode="reflect")
    seen = np.stack([padded[160 * i :][:400] for i in range(len(whole))])
    power = np.abs(np.fft.rfft(seen * np.hanning(401)[:-1])) ** 2
    expected = np.log10(np.maximum(power @ mel.mel_filters(80).T, 1e-10))
    expected = np.maximum(expected, expected.max() - 8) / 4 + 1
    np.testing.assert_allclose(whole, expected, atol=1e-5)
    monkeypatch.setattr(mel, "_BLOCK", 3)
    close(mel.log_mel(audio, silence=silence), whole)


def test_memory_is_that_of_the_frames():
    audio = golden_log_mel.sound(600 * 16_000)
    tracemalloc.start()
    found = mel.log_mel(audio)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # No copy of the sound beside one block's numbers.
    assert peak < found.nbytes + audio.nbytes
