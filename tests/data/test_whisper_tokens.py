"""Whisper's vocabulary: prefixes, text, words, what is never written."""

import pytest

from crossattn.data.errors import DataError
from crossattn.data.whisper_tokens import WhisperTokens
from tests import whisper_vocabulary


@pytest.fixture(scope="module")
def tokens():
    return whisper_vocabulary.tokens()


def names(tokens, ids):
    return [tokens._backend.id_to_token(id).strip("<|>") for id in ids]


def test_a_prefix_names_language_and_task(tokens):
    found = names(tokens, tokens.prefix("de", "translate"))
    assert found == ["startoftranscript", "de", "translate"]
    assert names(tokens, tokens.prefix("en", times=False))[-1] == "notimestamps"


def test_an_english_only_prefix_names_neither():
    english = whisper_vocabulary.tokens(multilingual=False)
    assert english.prefix() == english.prefix("en") == [english.start]
    with pytest.raises(DataError, match="only transcribes English; transcribe of de"):
        english.prefix("de")


def test_unknown_languages_and_tasks_are_refused(tokens):
    with pytest.raises(DataError, match="no language 'xx'"):
        tokens.prefix("xx")
    with pytest.raises(DataError, match="no task 'sing'"):
        tokens.prefix("en", "sing")


def test_text_comes_back_without_specials_and_times(tokens):
    ids = tokens.encode(" Grüße, 你好!")
    mixed = [tokens.start, tokens.first_time, *ids, tokens.first_time + 50, tokens.end]
    assert tokens.decode(mixed) == " Grüße, 你好!"
    assert tokens.first_time + whisper_vocabulary.TIMES == whisper_vocabulary.VOCABULARY


def test_words_keep_their_space_and_their_ids(tokens):
    text = " He was, wasn't he?"
    ids = tokens.encode(text)
    words = tokens.words(ids)
    assert [word for word, _ in words] == [" He", " was", ",", " wasn", "'t", " he", "?"]
    assert [id for _, group in words for id in group] == ids


def test_words_without_spaces_are_whole_characters(tokens):
    words = tokens.words(tokens.encode("你好。"), "zh")
    assert [(word, len(ids)) for word, ids in words] == [("你", 3), ("好", 3), ("。", 3)]


def test_bytes_that_are_no_character_stay_together(tokens):
    ids = tokens.encode(" a é")[:-1]  # the second half of é is missing
    assert [id for _, group in tokens.words(ids) for id in group] == ids


def test_brackets_notes_and_specials_are_never_written(tokens):
    kept = set(range(whisper_vocabulary.VOCABULARY)) - set(tokens.suppressed)
    assert set(tokens.encode("abc.,?!'")) - set(tokens.encode("'")) <= kept
    assert not set(tokens.encode("[]()#♪")) - set(tokens.encode("♪")[1:]) & kept
    assert tokens.end in kept and tokens.no_times in kept and tokens.start not in kept
    assert tokens.suppressed_first == (*tokens.encode(" "), tokens.end)


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be read"):
        WhisperTokens.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="is no tokenizer"):
        WhisperTokens.load(tmp_path)
    other = whisper_vocabulary.backend().to_str().replace("startofprev", "other")
    (tmp_path / "tokenizer.json").write_text(other)
    with pytest.raises(DataError, match=r"no token <\|startofprev\|>; expected that of a Whisper"):
        WhisperTokens.load(tmp_path)
