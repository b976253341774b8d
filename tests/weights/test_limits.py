"""Damaged tokenizers are refused by name, in little memory."""

import json
import re
import sys

import pytest

from crossattn.data.errors import DataError
from crossattn.data.tokenizers import Tokenizer, train_tokenizer
from crossattn.data.whisper_tokens import WhisperTokens
from crossattn.weights.tokenizers.tokenizer import read_tokenizer
from tests import whisper_vocabulary
from tests.peers import package
from tests.weights.checkpoints import refused


def refuses(match, call, *arguments, **options):
    assert re.search(match, refused(call, *arguments, **options))


schema = package("sentencepiece.sentencepiece_model_pb2", "test")


def pieces(*more, **options):
    """Returns a SentencePiece model of few pieces."""
    own = [("<pad>", 0, 3), ("</s>", 0, 3), ("<unk>", 0, 2), ("▁a", -1, 1), ("b", -1, 1), *more]
    listed = [dict(piece=text, score=score, type=kind) for text, score, kind in own]
    return schema.ModelProto(pieces=listed, **options).SerializeToString()


CUT_MAP = dict(precompiled_charsmap=b"\xff\xff\xff\x7f" + bytes(40))


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"\xff" * 10**6, "is no SentencePiece model, or is damaged"),
        (b"\x0a" + b"\xff" * 9 + b"\x01", "is no SentencePiece model, or is damaged"),
        (pieces(("", 0, 1)), "a piece lacks its text"),
        (pieces(("c", float("nan"), 1)), "or its score is no number"),
        (pieces(("d", 0, 2)), "it has 2 unknown tokens, not 1"),
        (pieces(normalizer_spec=CUT_MAP), "is no tokenizer"),
    ],
    ids=["numbers", "length", "no text", "no score", "unknown", "characters"],
)
def test_a_damaged_sentencepiece_model_is_refused(tmp_path, raw, said):
    (tmp_path / "spiece.model").write_bytes(pieces())
    assert read_tokenizer(tmp_path, "t5").encode("ab").tokens == ["▁a", "b", "</s>"]
    (tmp_path / "spiece.model").write_bytes(raw)
    refuses(said, read_tokenizer, tmp_path, "t5")


def test_a_missing_sentencepiece_is_named(tmp_path, monkeypatch):
    (tmp_path / "spiece.model").write_bytes(pieces())
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    said = r"spiece\.model needs sentencepiece: pip install 'crossattn\[sentencepiece\]'"
    refuses(said, read_tokenizer, tmp_path, "t5", error=ImportError)


@pytest.mark.parametrize(("kind", "name"), [("t5", "extra_ids"), ("pegasus", "offset")])
@pytest.mark.parametrize("count", [10**12, -1, 1.5, "9"])
def test_a_config_adds_no_more_tokens_than_a_vocabulary_has(tmp_path, kind, name, count):
    (tmp_path / "spiece.model").write_bytes(pieces())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({name: count}))
    refuses(f"has {name} .*; expected 0 to 100000", read_tokenizer, tmp_path, kind)


@pytest.fixture(scope="module")
def tokenizer():
    texts = ["the black cat sees a small bird", "a bird"]
    return json.loads(train_tokenizer(texts, 300)._backend.to_str())


PADDING = dict(direction="Right", pad_id=0, pad_type_id=0, pad_token="<pad>")


@pytest.mark.parametrize(
    ("change", "said", "said_of_own"),
    [
        ({"padding": PADDING | {"strategy": {"Fixed": 10**11}, "pad_to_multiple_of": None}},
         "pads texts to 100000000000 tokens; expected at most 1048576",
         "cuts or pads what it encodes"),
        ({"padding": PADDING | {"strategy": "BatchLongest", "pad_to_multiple_of": 10**11}},
         "pads texts to 100000000000 tokens; expected at most 1048576",
         "cuts or pads what it encodes"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "////f///"}},
         "is no tokenizer: .*precompiled_charsmap",
         "is not a saved tokenizer: .*precompiled_charsmap"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////9h"}},
         "is no tokenizer: index out of bounds",
         "is not a saved tokenizer: index out of bounds"),
    ],
    ids=["pads", "pads_to_multiples", "panics_when_read", "panics_when_used"],
)  # fmt: skip
def test_a_tokenizer_that_would_end_the_process_is_refused(
    tokenizer, tmp_path, change, said, said_of_own
):
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer | change))
    refuses(said, read_tokenizer, tmp_path)
    refuses(said_of_own, Tokenizer.load, tmp_path, error=DataError)


def test_a_tokenizer_that_cuts_texts_is_none_of_ours(tokenizer, tmp_path):
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer | {"truncation": cut}))
    refuses("cuts or pads what it encodes", Tokenizer.load, tmp_path, error=DataError)


def test_a_damaged_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    refuses("tokenizer.json is no tokenizer", read_tokenizer, tmp_path)


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(\w+\s?)*$", r"(x+x+)+y", r"(.|.)*(.|.)*z"])
def test_a_tokenizer_whose_pattern_never_ends(tmp_path, pattern):
    """It would load, and end the first long text in a panic."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    made.save(str(tmp_path / "tokenizer.json"))
    refuses("tokenizer.json is no tokenizer.*Regex search error", read_tokenizer, tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"a": ' * 100_000])
def test_the_hints_beside_a_whispers_tokenizer_are_json(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(whisper_vocabulary.backend().to_str())
    (tmp_path / "generation_config.json").write_text(text)
    match = r"generation_config\.json is not JSON"
    refuses(match, WhisperTokens.load, tmp_path, error=DataError)
