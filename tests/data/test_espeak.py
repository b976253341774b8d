"""Sentences read by espeak-ng: what is a sentence, its split, and what is kept of a sound."""

import base64
import io
import json
import shutil
import subprocess
import wave

import numpy as np
import pytest

from crossattn.data import fetch, sources
from crossattn.data.errors import DataError, DataUnavailable
from crossattn.data.mel import HOP
from crossattn.data.sources import espeak
from tests.data.conftest import help_pages, write_deb

TEXTS = [f"read the {a} of {b}." for a in ("name", "line", "page") for b in "abcdefghijklmnopqrst"]


def line(sound, events):
    """What the process says of a text: a sound of 16-bit numbers, and events."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(np.asarray(sound).astype("<i2").tobytes())
    said = {"wav": base64.b64encode(buffer.getvalue()).decode(), "events": events}
    return json.dumps(said).encode()


@pytest.fixture
def voices(monkeypatch, tmp_path):
    """A process that says a tone of a hundredth of a second for each letter, between silences."""
    said = []

    def run(command, *, input, env, capture_output):
        voice, lines = command[-2], []
        if voice == "xx":
            wrong = b"Error: The specified espeak-ng voice does not exist.\n"
            return subprocess.CompletedProcess(command, 1, b"", wrong)
        for text in json.loads(input):
            said.append((voice, text))
            tone = np.sin(np.arange(160 * len(text)) * (0.2 if voice == "low" else 0.9))
            sound = np.concatenate([np.zeros(4000), 0.5 * tone, np.zeros(8000)])
            each = [("phoneme", i, 0, 0.25 + i / 100, "a") for i in range(len(text))]
            end = ("phoneme", len(text), 0, 0.25 + len(text) / 100, "_:")
            lines.append(line(sound * 2**15, [("word", 0, len(text), 0.25, ""), *each, end]))
        return subprocess.CompletedProcess(command, 0, b"\n".join(lines), b"")

    monkeypatch.setattr(espeak.subprocess, "run", run)
    monkeypatch.setattr(espeak, "all_sentences", lambda data_dir: TEXTS)
    monkeypatch.setattr(
        fetch, "debian_program", lambda *given: (tmp_path / "usr/bin/espeak-ng", {})
    )
    monkeypatch.setenv("CROSSATTN_DATA", str(tmp_path))
    return said


def test_a_sentence_is_in_one_split_whoever_reads_it(voices):
    found = {
        split: sources.open_source("espeak/low,high", split, longest=30) for split in sources.SPLITS
    }
    texts = {split: {example["text"] for example in own} for split, own in found.items()}
    assert sum(map(len, texts.values())) == len(TEXTS) and set().union(*texts.values()) == {*TEXTS}
    assert all(len(own) == 2 * len(texts[split]) for split, own in found.items())
    assert {example["voice"] for example in found["train"]} == {"low", "high"}
    every = [example for own in found.values() for example in own]
    assert len({example["id"] for example in every}) == len(every)
    assert all(example["family"] == example["text"] for example in every)
    assert espeak.split_of("Read the name of a") == espeak.split_of("read the name of a.")


def test_silence_around_the_words_is_cut_and_sounds_are_made_once(voices):
    first = sources.open_source("espeak/low", "train")
    lengths = [len(example["audio"]) - 160 * len(example["text"]) for example in first]
    assert all(0 < more <= 3 * 160 for more in lengths)
    assert np.abs(first[0]["audio"]).max() == pytest.approx(0.5, abs=0.01)
    for example in first:  # a letter lasts a hundredth of a second, after the silence that stays
        letters = len(example["text"])
        expected = (160 * np.arange(letters + 1) + HOP) / 16000
        np.testing.assert_allclose(example["times"], expected, atol=0.01)
    before = len(voices)
    again = sources.open_source("espeak/low", "train")
    assert len(voices) == before == len(first)
    np.testing.assert_array_equal(again[3]["audio"], first[3]["audio"])
    fewer = sources.open_source("espeak/low", "train", sentences=5)
    assert len(fewer) == 5 and {e["text"] for e in fewer} <= {e["text"] for e in first}


def test_held_out_voices_read_what_no_other_voice_reads(voices):
    found = {
        split: sources.open_source("espeak/low,high", split, held_out="mid")
        for split in sources.SPLITS
    }
    heard = {split: {example["voice"] for example in own} for split, own in found.items()}
    assert heard == {"train": {"low", "high"}, "validation": {"mid"}, "test": {"mid"}}
    texts = {split: {example["text"] for example in own} for split, own in found.items()}
    assert not texts["train"] & (texts["validation"] | texts["test"])
    assert sum(map(len, texts.values())) == len(TEXTS)


def test_voices_read_in_turn(voices):
    opened = {split: sources.open_source("espeak/low,high", split) for split in sources.SPLITS}
    found = {
        split: sources.open_source("espeak/low,high", split, turns=True) for split in sources.SPLITS
    }
    texts = [example["text"] for example in found["train"]]
    assert len(set(texts)) == len(texts) and set(texts) == {e["text"] for e in opened["train"]}
    heard = [example["voice"] for example in found["train"]]
    assert abs(heard.count("low") - heard.count("high")) <= 1
    for example in found["train"]:
        assert len(example["audio"]) == pytest.approx(160 * len(example["text"]), abs=480)
    assert len(found["test"]) == len(opened["test"]) == 2 * len({e["text"] for e in found["test"]})


def test_sentences_of_frequent_words_alone(voices):
    # "read", "the", "of", three names, and ten of the letters, which are all as frequent.
    found = [sources.open_source("espeak/low", split, words=16) for split in sources.SPLITS]
    assert sum(map(len, found)) == 30
    assert {each["text"][-2] for own in found for each in own} == set("abcdefghij")
    texts = ["a b c", "a b", "a d", "b a"]
    assert espeak.of_words(texts, 2) == ["a b", "b a"]
    assert espeak.of_words(texts, 4) == texts


def test_voices_that_are_none_are_refused_in_a_sentence(voices):
    with pytest.raises(DataError, match="espeak-ng has no voice 'xx'"):
        sources.open_source("espeak/xx", "validation")
    with pytest.raises(DataError, match="there is no voice '--path=x'"):
        sources.open_source("espeak/--path=x", "validation")
    for rest, held_out in (("low,low", "none"), ("low,high", "high"), ("low", "mid,mid")):
        with pytest.raises(DataError, match="named 2 times .*; name each voice once."):
            sources.open_source(f"espeak/{rest}", "train", held_out=held_out)


def test_sentences_are_words_alone():
    assert all(
        map(
            espeak.is_sentence,
            ["Select the cells.", "Opens, and closes, a file", "What is it now?"],
        )
    )
    wrong = ["select the cells.", "Sheet1 is it", "Two words", "Press Ctrl now", "A (b) c d e f g"]
    assert not any(map(espeak.is_sentence, wrong))


def test_a_program_that_nothing_brings_is_asked_for_by_name(monkeypatch, tmp_path):
    monkeypatch.setattr(fetch.shutil, "which", lambda name: None)
    with pytest.raises(DataUnavailable, match="no program espeak-ng here, and no apt-get"):
        fetch.debian_program("espeak-ng", tmp_path)
    monkeypatch.setattr(fetch.shutil, "which", lambda name: f"/bin/{name}")
    assert str(fetch.debian_program("espeak-ng", tmp_path)[0]) == "/bin/espeak-ng"


def test_a_program_comes_with_the_packages_that_this_machine_lacks(monkeypatch, tmp_path):
    """The lists of apt and dpkg-deb are played; what they bring lies in the data folder, once."""
    calls = []

    def said(command):
        calls.append(command[-1])
        return ["Inst libb (1)", "Inst prog (2)", "Conf prog (2)"]

    def run(command, cwd):
        folder = tmp_path / command[-1]
        name = command[2].rpartition("/")[2].partition("_")[0]
        (folder / "usr/bin").mkdir(parents=True, exist_ok=True)
        (folder / "usr/lib/there").mkdir(parents=True, exist_ok=True)
        (folder / ("usr/bin/prog" if name == "prog" else "usr/lib/there/libb.so.1")).touch()
        return ""

    monkeypatch.setattr(fetch.shutil, "which", lambda name: None if name == "prog" else name)
    monkeypatch.setattr(fetch, "_said", said)
    monkeypatch.setattr(fetch, "_run", run)
    packages = lambda names, data_dir: [tmp_path / f"{name}_1.deb" for name in names]  # noqa: E731
    monkeypatch.setattr(fetch, "debian_packages", packages)
    for _ in range(2):
        program, environment = fetch.debian_program("prog", tmp_path)
        assert program.is_file()
        assert environment["LD_LIBRARY_PATH"] == str(program.parents[1] / "lib/there")
    assert calls == ["prog"]


def test_sentences_are_those_of_the_help_without_its_tags(tmp_path):
    body = '<p id="par_id1">Opens the <span class="emph">print</span> dialog box.</p><p id="par_id2">OK</p>'
    write_deb(
        tmp_path / "downloads" / "libreoffice-help-en-us_1-1_all.deb",
        help_pages("en-US", {"a.html": body}),
    )
    assert espeak.all_sentences(tmp_path) == ["opens the print dialog box."]


EVENTS = [  # of "Press, an icon of the key." as espeak-ng tells them
    ("word", 0, 5, 0.0, ""), ("phoneme", 0, 0, 0.05, "p"), ("phoneme", 0, 0, 0.15, "E"),
    ("phoneme", 5, 0, 0.31, "_:"), ("phoneme", 5, 0, 0.45, "_"),
    ("word", 7, 2, 0.45, ""), ("phoneme", 7, 0, 0.46, "a#"), ("phoneme", 7, 0, 0.5, "n"),
    ("word", 10, 4, 0.5, ""), ("phoneme", 10, 0, 0.57, "aI"), ("phoneme", 10, 0, 0.7, "k"),
    ("word", 15, 2, 0.8, ""), ("phoneme", 15, 0, 0.81, "@"), ("phoneme", 15, 0, 0.9, "D"),
    ("word", 22, 3, 1.0, ""), ("phoneme", 22, 0, 1.05, "k"), ("phoneme", 26, 0, 1.3, "_:"),
    ("phoneme", 26, 0, 1.31, "_"),
]  # fmt: skip
SAID = "Press, an icon of the key."


def test_words_last_from_phoneme_to_phoneme_or_pause():
    assert espeak.words_of(SAID, EVENTS) == [
        ("Press", 0.05, 0.31), ("an", 0.46, 0.57), ("icon", 0.57, 0.81), ("of the", 0.81, 1.05),
        ("key", 1.05, 1.3),
    ]  # fmt: skip
    assert espeak.words_of("", []) == []


def test_letters_share_the_phonemes_of_their_word():
    times = dict(enumerate(espeak.letter_times(SAID, EVENTS)))
    expected = {  # "Press" has two phonemes and five letters
        0: 0.05, 2: 0.05 + 0.8 * 0.1, 5: 0.31, 7: 0.46, 8: 0.5, 10: 0.57, 12: 0.7, 14: 0.81,
        15: 0.81, 18: 0.9, 22: 1.05, 25: 1.3, 26: 1.3,
    }  # fmt: skip
    for place, seconds in expected.items():
        assert times[place] == pytest.approx(seconds), SAID[place:]
    assert len(times) == len(SAID) + 1 and np.all(np.diff([*times.values()]) >= 0)
    assert espeak.letter_times("", []).tolist() == [0.0]


def test_sounds_come_with_times_from_a_process_of_its_own(monkeypatch, tmp_path):
    silent, rate = 0.3, 16000

    def run(command, *, input, env, capture_output):
        voice, folder = command[-2:]
        assert env == {"LD_LIBRARY_PATH": "there"} and json.loads(input) == [SAID] and not folder
        if voice == "xx":
            return subprocess.CompletedProcess(command, 1, b"", b"the voice does not exist\n")
        if voice == "yy":
            return subprocess.CompletedProcess(command, 1, b"", b"OSError: libespeak-ng.so.1\n")
        sound = np.repeat([0, 2**14], [int(silent * rate), 800])
        return subprocess.CompletedProcess(command, 0, line(sound, EVENTS), b"")

    monkeypatch.setattr(espeak.subprocess, "run", run)
    program = tmp_path / "usr/bin/espeak-ng", {"LD_LIBRARY_PATH": "there"}
    monkeypatch.setattr(fetch, "debian_program", lambda *given: program)
    ((audio, words),) = espeak.timed([SAID], "en-us")
    assert audio.shape == (5600,) and np.all(audio[4800:] == 0.5)
    assert words == espeak.words_of(SAID, EVENTS)
    monkeypatch.setattr(espeak, "all_sentences", lambda data_dir: [SAID])
    monkeypatch.setattr(espeak, "split_of", lambda text: "train")
    for _ in range(2):  # made, and read again
        (example,) = espeak.open_split("en-us", "train", data_dir=tmp_path)
        np.testing.assert_array_equal(example["audio"], audio[4800 - HOP :])
        cut = espeak.letter_times(SAID, EVENTS) - (silent - HOP / rate)
        np.testing.assert_allclose(example["times"], cut, atol=1e-6)
    with pytest.raises(DataError, match="espeak-ng has no voice 'xx'"):
        espeak.timed([SAID], "xx")
    with pytest.raises(DataUnavailable, match="espeak-ng does not run .*libespeak-ng"):
        espeak.timed([SAID], "yy")


@pytest.mark.skipif(
    not (shutil.which("espeak-ng") or (fetch.cache_dir() / "programs" / "espeak-ng").is_dir()),
    reason="no espeak-ng here, and it is not fetched: crossattn.data.sources.open_source('espeak/en-us')",
)
def test_the_times_are_those_of_the_sound():
    """Where a word ends in a pause the sound is silent until the next word, and nowhere in a word."""
    ((audio, words),) = espeak.timed(["press the keys, then open a menu; and close it."], "en-us")
    assert [word.text for word in words] == "press the keys then open a menu and close it".split()
    loud = np.abs(audio) > 0.01 * np.abs(audio).max()
    for before, after in ((words[2], words[3]), (words[6], words[7])):
        assert after.start - before.end > 0.1
        assert not loud[round(16000 * before.end) + 320 : round(16000 * after.start) - 800].any()
    for word in words:
        assert loud[round(16000 * word.start) : round(16000 * word.end)].mean() > 0.2
