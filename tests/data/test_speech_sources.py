"""Sources of sound with its text: real prompts split by their words, and made-up tones."""

import gzip
import io
import wave

import numpy as np
import pytest

from crossattn.data import archives, fetch, sources
from crossattn.data.errors import DataError
from crossattn.data.mel import RATE
from crossattn.data.sources import asterisk, tones
from crossattn.data.speech import open_speech


@pytest.fixture
def prompts(monkeypatch):
    """A hundred prompts, each recorded twice with other punctuation."""
    texts = [f"Press {i} now." for i in range(100)] + [f"press {i} NOW!" for i in range(100)]
    recordings = [
        {"id": str(i), "audio": np.full(RATE * (1 + i % 3), 0.1, np.float32), "text": text}
        for i, text in enumerate(texts)
    ]
    spoken = {"asterisk/en": recordings}
    for language, word in (("fr", "numéro"), ("ru", "номер")):
        spoken[f"asterisk/{language}"] = [
            {**each, "text": each["text"].replace("Press", word)} for each in recordings[:100]
        ]
    monkeypatch.setattr(asterisk, "open_speech", lambda name, data_dir: spoken[name])
    asterisk._prompts.cache_clear()
    yield recordings
    asterisk._prompts.cache_clear()


def test_a_prompt_that_was_recorded_twice_is_on_one_side_only(prompts):
    splits = {name: sources.open_source("asterisk", name) for name in sources.SPLITS}
    assert sum(map(len, splits.values())) == len(prompts)
    numbers = {name: {e["text"].split()[1] for e in split} for name, split in splits.items()}
    assert not numbers["train"] & numbers["test"] and not numbers["validation"] & numbers["test"]
    assert not numbers["train"] & numbers["validation"]
    assert all(numbers.values())


@pytest.mark.parametrize(("language", "word"), [("fr", "numéro"), ("ru", "номер")])
def test_prompts_of_another_language_are_split_by_their_own_letters(prompts, language, word):
    splits = [sources.open_source(f"asterisk/{language}", name) for name in sources.SPLITS]
    assert all(splits) and sum(map(len, splits)) == 100
    assert all(word in example["text"] for split in splits for example in split)
    texts = [f"{word} {letter}" for letter in "абвгдежзийклмнопрст"]
    assert len(set(map(asterisk.split_of, texts))) == 3  # without digits too


def test_prompts_are_chosen_by_their_words_and_seconds(prompts):
    assert not len(sources.open_source("asterisk", "train", min_words=4))
    short = sources.open_source("asterisk", "train", max_seconds=1.0)
    assert short and all(len(example["audio"]) == RATE for example in short)
    with pytest.raises(DataError, match="no prompts in 'de'; expected one of en, es, fr, it, ru"):
        sources.open_source("asterisk/de")
    with pytest.raises(DataError, match="spelled is for English prompts, not for 'fr'"):
        sources.open_source("asterisk/fr", spelled=True)


def test_spelled_prompts_are_what_is_said_and_others_are_left_out(prompts):
    prompts[:] = [
        {**prompts[0], "text": text}
        for text in ("Press 10, for Call-Forward... now!", "<beep>", "press # now", "!", "folder 1")
    ]
    found = [
        e["text"] for s in sources.SPLITS for e in sources.open_source("asterisk", s, spelled=True)
    ]
    assert sorted(found) == ["folder one", "press one zero, for call forward now."]


def test_prompts_of_another_language_are_read_from_its_packages(monkeypatch, tmp_path):
    listed = "\ufeff; Core Sounds in Italian\n\nadded: Aggiunto.\nbeep: [tono]\ndigits/1: Uno.\n"
    spoken = io.BytesIO()
    with wave.open(spoken, "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(1600))
    files = {
        "asterisk-core-sounds-it": {"": gzip.compress(listed.encode())},
        "asterisk-core-sounds-it-wav": {
            f"it_IT_m_Carlo/{name}.wav": spoken.getvalue() for name in ("added", "beep", "digits/1")
        },
    }
    monkeypatch.setattr(fetch, "debian_packages", lambda names, _: [tmp_path / x for x in names])
    folders = "usr/share/doc/asterisk-core-sounds-it/", "usr/share/asterisk/sounds/"

    def read_deb(path, prefix, suffix=""):
        assert prefix.startswith(folders)
        return files[path.name].items()

    monkeypatch.setattr(archives, "read_deb", read_deb)
    found = open_speech("asterisk/it")
    assert [each["text"] for each in found] == ["Aggiunto.", "Uno."]
    assert [len(each["audio"]) for each in found] == [1600, 1600]  # 16 kHz


def test_a_translation_has_a_word_for_each_the_last_one_first():
    known, found = {}, sources.open_source("tones", "train")
    for index in range(len(found)):
        said, told = (found[index][name].split() for name in ("text", "translation"))
        assert len(said) == len(told) and not {*said} & {*told}
        for word, own in zip(said, reversed(told), strict=True):
            assert known.setdefault(word, own) == own
    assert len({*known.values()}) == len(known) == 10


def test_each_letter_is_a_pitch_of_its_own():
    examples = sources.open_source("tones", "test")
    assert len(examples) == tones.NUM_EXAMPLES["test"]
    assert examples[3]["text"] == sources.open_source("tones", "test")[3]["text"]
    example = examples[0]
    letters = example["audio"].reshape(len(example["text"]), -1)
    for letter, own in zip(example["text"], letters, strict=True):
        spectrum = np.abs(np.fft.rfft(own))
        if letter == " ":
            assert not own.any()
        else:
            pitch = spectrum.argmax() * RATE / own.size
            assert pitch == pytest.approx(300 + 100 * (ord(letter) - ord("a")), abs=13)
