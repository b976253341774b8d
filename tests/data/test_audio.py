"""Sound files of any kind, and files that are none."""

import io
import tracemalloc
import wave

import numpy as np
import pytest
import soundfile

from crossattn.data import audio
from crossattn.data.audio import read_audio
from crossattn.data.errors import DataError


def tone(rate, seconds=1.0, hertz=440.0):
    return np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate).astype(np.float32)


def write_wav(path, channels, rate):
    """16 bits, by the standard library; ``channels`` is [samples, channels]."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((channels * 32767).astype("<i2").tobytes())


def test_16_khz_mono_is_read_as_it_is(tmp_path):
    sound = tone(16_000)
    write_wav(tmp_path / "a.wav", sound[:, None], 16_000)
    np.testing.assert_allclose(read_audio(tmp_path / "a.wav"), sound, atol=1e-4)


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_other_rates_are_resampled(tmp_path, rate):
    write_wav(tmp_path / "a.wav", tone(rate)[:, None], rate)
    found = read_audio(tmp_path / "a.wav")
    assert len(found) == 16_000
    np.testing.assert_allclose(found[800:-800], tone(16_000)[800:-800], atol=0.01)


def test_8_khz_stereo_is_the_mean_of_its_channels(tmp_path):
    left = tone(8_000)
    write_wav(tmp_path / "a.wav", np.stack([left, 0 * left], axis=1), 8_000)
    found = read_audio(tmp_path / "a.wav")
    np.testing.assert_allclose(found[800:-800], tone(16_000)[800:-800] / 2, atol=0.01)


def test_other_formats_and_open_files_are_read(tmp_path):
    soundfile.write(tmp_path / "a.flac", tone(16_000), 16_000)
    found = read_audio(io.BytesIO((tmp_path / "a.flac").read_bytes()))
    np.testing.assert_allclose(found, tone(16_000), atol=1e-4)


@pytest.mark.parametrize("suffix", ["mp3", "ogg"])
def test_lossy_formats_are_read_to_their_end(tmp_path, suffix):
    rate = 44_100
    soundfile.write(tmp_path / f"a.{suffix}", tone(rate, seconds=3), rate)
    found = read_audio(tmp_path / f"a.{suffix}")
    assert len(found) == pytest.approx(48_000, abs=16_000 // 10)
    # A tone keeps its loudness and its pitch, wherever the encoder makes it begin.
    middle = found[8_000:40_000]
    assert np.sqrt(np.mean(middle**2)) == pytest.approx(np.sqrt(0.5), rel=0.02)
    loudest = np.argmax(np.abs(np.fft.rfft(middle))) / (len(middle) / 16_000)
    assert loudest == pytest.approx(440, abs=1)


def test_memory_is_that_of_the_sound(tmp_path):
    write_wav(tmp_path / "a.wav", np.zeros((600 * 8_000, 1)), 8_000)
    tracemalloc.start()
    found = read_audio(tmp_path / "a.wav")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.3 * found.nbytes


@pytest.mark.parametrize("announced", [2, audio._AT_FIRST])
def test_blocks_leave_no_seam_even_beyond_the_announced_length(tmp_path, monkeypatch, announced):
    monkeypatch.setattr(audio, "_AT_FIRST", announced)
    write_wav(tmp_path / "a.wav", tone(8_000, seconds=95)[:, None], 8_000)
    found = read_audio(tmp_path / "a.wav")
    assert len(found) == 95 * 16_000
    np.testing.assert_allclose(found[800:-800], tone(16_000, seconds=95)[800:-800], atol=0.01)


def test_silence_is_sound(tmp_path):
    write_wav(tmp_path / "a.wav", np.zeros((800, 1)), 8_000)
    assert not read_audio(tmp_path / "a.wav").any()


def test_what_is_no_sound_is_refused_by_name(tmp_path):
    path = tmp_path / "a.wav"
    with pytest.raises(DataError, match=r"a\.wav cannot be read: No such file"):
        read_audio(path)
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"a\.wav is empty"):
        read_audio(path)
    path.write_text("not sound at all")
    with pytest.raises(DataError, match=r"a\.wav cannot be read as sound .*expected WAV"):
        read_audio(path)
    write_wav(path, np.zeros((0, 1)), 8_000)
    with pytest.raises(DataError, match=r"a\.wav holds no sound"):
        read_audio(path)


def test_a_file_cut_short_is_refused(tmp_path):
    path = tmp_path / "a.wav"
    write_wav(path, tone(16_000)[:, None], 16_000)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(
        DataError, match=r"a\.wav is cut short: 32044 bytes are announced and 31044"
    ):
        read_audio(path)


def test_nan_in_a_file_of_floats_is_refused(tmp_path):
    sound = tone(16_000)
    sound[100] = np.nan
    soundfile.write(tmp_path / "a.wav", sound, 16_000, subtype="FLOAT")
    with pytest.raises(DataError, match=r"a\.wav holds samples that are NaN"):
        read_audio(tmp_path / "a.wav")


def peak_of_refusal(path, said):
    """Bytes that Python held at most while it refused a sound."""
    tracemalloc.start()
    with pytest.raises(DataError, match=said):
        read_audio(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("rate", [1, 7, 999, 768_001, 2**31 - 1])
def test_a_rate_that_no_sound_has_is_refused(tmp_path, rate):
    write_wav(tmp_path / "a.wav", np.zeros((200_000, 1)), 8_000)
    raw = (tmp_path / "a.wav").read_bytes()
    (tmp_path / "a.wav").write_bytes(raw[:24] + rate.to_bytes(4, "little") + raw[28:])
    said = rf"{rate} samples a second; expected 1000 to 768000"
    assert peak_of_refusal(tmp_path / "a.wav", said) < 2**20


def test_more_channels_than_any_sound_has_are_refused(tmp_path):
    write_wav(tmp_path / "a.wav", np.zeros((10, 300)), 8_000)
    with pytest.raises(DataError, match=r"a\.wav has 300 channels; expected 1 to 256"):
        read_audio(tmp_path / "a.wav")


def test_a_sound_that_is_too_long_is_refused_in_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(audio, "LONGEST", 30)
    soundfile.write(tmp_path / "a.flac", np.zeros(1_000_000, np.float32), 1_000)
    said = r"a\.flac lasts more than 12 hours, .*; cut it into parts"
    assert peak_of_refusal(tmp_path / "a.flac", said) < 2**28


def test_a_file_that_announces_years_and_ends_is_cut_short(tmp_path):
    soundfile.write(tmp_path / "a.mp3", tone(8_000, seconds=0.5), 8_000)
    raw = (tmp_path / "a.mp3").read_bytes()
    frames = raw.index(b"Info") + 8 if b"Info" in raw else raw.index(b"Xing") + 8
    (tmp_path / "a.mp3").write_bytes(raw[:frames] + b"\xff" * 4 + raw[frames + 4 :])
    with pytest.raises(DataError, match=r"a\.mp3 is cut short: \d+.\d s are announced"):
        read_audio(tmp_path / "a.mp3")


def test_a_format_that_cannot_seek_is_read(tmp_path):
    soundfile.write(tmp_path / "a.wav", tone(8_000), 8_000, subtype="GSM610")
    assert len(read_audio(tmp_path / "a.wav")) == pytest.approx(16_000, abs=1_000)
