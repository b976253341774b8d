"""Times of letters in recordings: tones whose times are known, and voices of espeak-ng that tell theirs."""

import shutil

import numpy as np
import pytest

from configs import speak as config_file
from crossattn.data import fetch
from crossattn.data.errors import DataError
from crossattn.data.mel import RATE
from crossattn.data.sources import espeak
from experiments.errors import SettingsError
from experiments.tasks import find, forced_alignment, make_task

LETTERS = "abcdefgh"
TEXTS = ["select the cells of the second table.", "close the dialog, and save the document."]


def tones(text, seconds, silence=0.0):
    """A tone for each letter, and when each begins and the last ends; silence on both sides."""
    hertz = 300.0 * 1.3 ** np.array([LETTERS.index(letter) for letter in text])
    samples = np.round(np.asarray(seconds) * RATE).astype(int)
    sound = np.sin(2 * np.pi * np.cumsum(np.repeat(hertz, samples)) / RATE)
    around = np.zeros(round(silence * RATE))
    times = silence + np.concatenate([[0], np.cumsum(samples)]) / RATE
    return np.concatenate([around, sound, around]).astype(np.float32), times


@pytest.mark.parametrize("silence", [0.0, 0.35])
def test_letters_that_are_said_faster_and_slower_are_found(silence):
    rng = np.random.default_rng(0)
    for text in ("abcdefgh", "hagbfced", "abababcdcd"):
        said, times = tones(text, rng.uniform(0.06, 0.4, len(text)))
        sound, expected = tones(text, rng.uniform(0.06, 0.4, len(text)), silence)
        found = forced_alignment.carried(times, said, sound)
        assert np.abs(found - expected).max() < 0.04 and np.abs(found - expected).mean() < 0.01
        even = np.linspace(expected[0], expected[-1], len(expected))
        assert np.abs(even - expected).max() > 0.1


def test_a_task_reads_the_letters_where_the_synthesisers_reading_has_them(monkeypatch):
    config = config_file.get_config("tiny")
    config.loss.alignment = "times"
    config.data.timed_by = "en-us"
    task = make_task(config)
    (said, times), (sound, expected) = (
        tones("badcab", [0.1] * 6),
        tones("badcab", [0.2, 0.05, 0.1, 0.1, 0.3, 0.1]),
    )

    def lettered(texts, voice, data_dir):
        assert (texts, voice) == (["badcab"], "en-us")
        return [(said, times)]

    monkeypatch.setattr(espeak, "lettered", lettered)
    monkeypatch.setattr(
        task.corpus, "split", lambda split: [{"id": 0, "text": "BadCab", "audio": sound}]
    )
    task.refuse_unready()  # though the example has no times
    (example,) = task.examples("train")
    middles = (np.arange(len(example["place"])) + 0.5) * 0.04  # of groups of four frames
    true = np.interp(middles, expected, np.arange(7)) - 0.5
    assert np.abs(example["place"][:, 0] - true).max() < 0.6
    assert np.abs(np.linspace(-0.5, 5.5, len(true)) - true).max() > 0.85


def test_a_text_that_is_not_said_is_named(monkeypatch):
    nothing = np.zeros(0, np.float32), np.zeros(4, np.float32)
    monkeypatch.setattr(espeak, "lettered", lambda *_: [nothing])
    with pytest.raises(DataError, match="voice fr says nothing for the text '...'"):
        forced_alignment.letter_times(["..."], [np.ones(800, np.float32)], "fr")


def test_times_that_no_loss_reads_are_refused():
    config = config_file.get_config("tiny")
    config.data.timed_by = "fr"
    with pytest.raises(SettingsError, match="timed_by is 'fr', but .*alignment is 'diagonal'"):
        find(config.task).check(config)


@pytest.mark.skipif(
    not (shutil.which("espeak-ng") or (fetch.cache_dir() / "programs" / "espeak-ng").is_dir()),
    reason="no espeak-ng here, and it is not fetched: crossattn.data.sources.open_source('espeak/en-us')",
)
def test_a_womans_letters_are_found_by_a_mans_reading():
    woman = espeak.lettered(TEXTS, "en-us+f4")
    found = forced_alignment.letter_times(TEXTS, [sound for sound, _ in woman], "en-us")
    for own, (_, times) in zip(found, woman, strict=True):
        even = np.linspace(0, times[-1], len(times))
        assert np.abs(own - times).mean() < min(0.012, np.abs(even - times).mean() / 4)
