"""Any text survives a tokenizer, and its tokens know where they stand."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossattn.data import tokenizers, words
from crossattn.data.errors import DataError
from crossattn.data.sources import open_source

TEXTS = [
    "the black cat",
    "Ἐν ἀρχῇ ἦν ὁ λόγος, καὶ ὁ λόγος ἦν πρὸς τὸν θεόν·",
    "हिन्दी में सहायता पुस्तक",
    "書式メニューを選択してください。",
    "👩‍👩‍👧 naïve 😀!",
    "  two \u00a0 blanks\tand\nlines ",
    "</s> <pad> <0x41> Ġ ▁ \x00",
    "",
]


def corpus() -> list[str]:
    return [e[side] for e in open_source("phrases", "test") for side in ("source", "target")]


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def tokenizer(request):
    return tokenizers.train_tokenizer(corpus() + TEXTS[1:3], 700, request.param)


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == " ".join(text.split())
    assert all(3 < i < tokenizer.vocab_size for i in ids)


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(codec="utf-8")))
def test_any_unicode_text_survives(tokenizer, text):
    ids, spans = tokenizer.encode_with_spans(text)
    assert tokenizers.UNK not in ids and ids == tokenizer.encode(text)
    restored = tokenizer.decode(ids)
    assert " ".join(restored.split()) == " ".join(text.split())
    covered = {i for start, end in spans for i in range(start, end)}
    assert covered >= {i for i, character in enumerate(text) if not character.isspace()}


@pytest.mark.parametrize("text", TEXTS)
def test_spans_cut_the_text_where_the_tokens_are(tokenizer, text):
    ids, spans = tokenizer.encode_with_spans(text)
    assert spans.shape == (len(ids), 2)
    assert (np.diff(spans[:, 0]) >= 0).all()
    for i, (start, end) in zip(ids, spans, strict=True):
        piece = tokenizer.tokens([i])[0]
        if not piece.startswith("<"):  # those are bytes
            assert text[start:end] == piece.removeprefix("▁") or piece == "▁"


def test_accented_greek_words_map_to_their_own_tokens(tokenizer):
    text = "ὁ λόγος, ἦν."
    ids, spans = tokenizer.encode_with_spans(text)
    word_spans = words.word_spans(text)
    owner = words.words_of_tokens(spans, word_spans)
    assert [text[a:b] for a, b in word_spans] == ["ὁ", "λόγος", ",", "ἦν", "."]
    for word, (start, end) in enumerate(word_spans):
        tokens = np.flatnonzero(owner == word)
        assert (spans[tokens[0], 0], spans[tokens[-1], 1]) == (start, end)


def test_every_byte_of_an_unseen_character_has_its_span(tokenizer):
    text = "the ꙮꚙ"
    ids, spans = tokenizer.encode_with_spans(text)
    assert [(a, b) for a, b in spans.tolist() if b > a >= 4] == [(4, 5)] * 3 + [(5, 6)] * 3


def test_punctuation_never_joins_a_word(tokenizer):
    for piece in tokenizer.tokens(tokenizer.encode("cat, (dog)! l'oiseau... x_y")):
        bare = piece.removeprefix("▁").removesuffix("'")
        assert bare.isalnum() or not any(c.isalnum() for c in bare) or piece.startswith("<")


def test_a_first_word_is_the_same_token_as_a_later_one(tokenizer):
    assert tokenizer.encode("cat") == tokenizer.encode("the cat")[len(tokenizer.encode("the")) :]


def test_batches_encode_as_single_texts_do(tokenizer):
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_training_twice_gives_the_same_tokenizer(kind):
    first, second = (tokenizers.train_tokenizer(corpus(), 600, kind) for _ in range(2))
    assert first == second and first.vocab_size <= 600


def test_a_saved_tokenizer_is_the_same_when_loaded(tokenizer, tmp_path):
    path = tokenizer.save(tmp_path / "run")
    assert path == tmp_path / "run" / "tokenizer.json"
    loaded = tokenizers.Tokenizer.load(tmp_path / "run")
    assert loaded == tokenizer
    for text in TEXTS:
        assert (
            loaded.encode_with_spans(text)[1].tolist()
            == tokenizer.encode_with_spans(text)[1].tolist()
        )


def test_specials_are_skipped_and_have_fixed_ids(tokenizer):
    ids = tokenizer.encode("cat")
    assert tokenizer.decode([1, *ids, 2, 0, 0]) == "cat"
    assert tokenizer.tokens([0, 1, 2, 3]) == ["<pad>", "<s>", "</s>", "<unk>"]


def test_another_process_is_given_the_same_tokenizer(tokenizer):
    again = pickle.loads(pickle.dumps(tokenizer))
    text = "a </s> and <pad> in the text"
    assert again == tokenizer and again.encode(text) == tokenizer.encode(text)
    assert tokenizers.EOS not in again.encode(text)


def test_bad_requests_are_refused(tmp_path):
    with pytest.raises(DataError, match="vocab_size is 100"):
        tokenizers.train_tokenizer(["a"], 100)
    with pytest.raises(DataError, match="no text"):
        tokenizers.train_tokenizer(["", " "], 300)
    with pytest.raises(DataError, match="kind is 'word'"):
        tokenizers.train_tokenizer(["a"], 300, "word")
    with pytest.raises(DataError, match="there is no tokenizer"):
        tokenizers.Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="not a saved tokenizer"):
        tokenizers.Tokenizer.load(tmp_path)


def test_tokens_between_words_belong_to_none():
    token_spans = np.array([[0, 2], [2, 3], [3, 3], [4, 9], [20, 21]])
    word_spans = np.array([[0, 3], [4, 6], [6, 9]])
    assert words.words_of_tokens(token_spans, word_spans).tolist() == [0, 0, -1, 2, -1]
