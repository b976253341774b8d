"""Sizes and types in a checkpoint's files are not believed: refused by name, in little memory."""

import json
import shutil
import struct
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import crossattn as xa
from crossattn.data.errors import DataError
from crossattn.data.tokenizers import Tokenizer, train_tokenizer
from crossattn.data.whisper_tokens import WhisperTokens
from crossattn.weights import CheckpointError
from crossattn.weights.formats import ctranslate2, safetensors
from crossattn.weights.tokenizers.tokenizer import read_tokenizer
from tests import whisper_vocabulary
from tests.weights import checkpoints, ctranslate2_files


def raises_one_line(match, call, *arguments, error=CheckpointError):
    """The call is refused in one line and little memory."""
    tracemalloc.start()
    with pytest.raises(error, match=match) as caught:
        call(*arguments)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert peak < 2**27


@pytest.fixture(scope="module")
def bart(tmp_path_factory):
    return checkpoints.fresh(checkpoints.BART, tmp_path_factory.mktemp("bart"))


def safetensors_of(path, dtype, shape, size):
    head = {"some.weight": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}
    raw = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(size))


@pytest.mark.parametrize(
    "dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3"]
)
def test_types_that_mean_nothing_without_scales_are_refused_by_name(tmp_path, dtype):
    size = {"F4": 4, "F6_E2M3": 6}.get(dtype, 8)
    safetensors_of(tmp_path / "model.safetensors", dtype, [8], size)
    match = f"has some.weight in {dtype}; expected F64, F32, F16 or BF16"
    raises_one_line(match, safetensors.open_folder, tmp_path)


def test_types_that_the_models_compute_in_are_read(tmp_path):
    for dtype in ("F64", "F32", "F16", "BF16"):
        size = {"F64": 16, "F32": 8, "F16": 4, "BF16": 4}[dtype]
        safetensors_of(tmp_path / "model.safetensors", dtype, [2], size)
        [(name, tensor)] = safetensors.open_folder(tmp_path).read({"some.weight"})
        assert (name, tensor.shape) == ("some.weight", (2,))


def test_integers_in_the_place_of_parameters_are_refused(bart, tmp_path):
    folder = Path(shutil.copytree(bart, tmp_path / "bart"))

    def quantise(tensors):
        name = "model.encoder.layers.0.fc1.weight"
        tensors[name] = (tensors[name] * 100).astype(np.int8)

    checkpoints.rewrite(folder, quantise)
    raises_one_line(r"fc1\.weight in .* has dtype int8; expected floating-point", xa.load, folder)


@pytest.mark.parametrize("size", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_a_header_of_any_size_is_no_allocation(tmp_path, size):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", size) + b"{}")
    raises_one_line("no safetensors file", safetensors.open_folder, tmp_path)


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"weight_map": ' + b"[" * 100_000, b"\xff{}"])
def test_an_index_that_cannot_be_read(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    raises_one_line("is no index", safetensors.open_folder, tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "decoder_layers",
            10**9,
            r"expected a whole number from 0 to \d+, as many as there are tens",
        ),
        ("encoder_layers", -1, "expected a whole number from 0 to"),
        (
            "d_model",
            10**18,
            "d_model 1000000000000000000; expected a whole number from 0 to 2147483647",
        ),
        ("d_model", 2.5, "expected a whole number"),
        ("d_model", "8", "expected a whole number"),
        ("d_model", None, "describes no bart that can be built"),
        ("d_model", 0, "describes no .* that can be built"),
        ("decoder_attention_heads", 3, "num_heads is 3; expected a divisor of dim, 8"),
        ("decoder_ffn_dim", [12], "expected a whole number"),
        ("activation_function", ["gelu"], r"has activation_function \[.gelu.\]; expected one of"),
        ("model_type", ["bart"], "expected one of"),
    ],
)
def test_sizes_that_no_model_has_are_refused_at_once(bart, key, value, said, tmp_path):
    for file in bart.iterdir():
        (tmp_path / file.name).symlink_to(file)
    settings = json.loads((bart / "config.json").read_text()) | {key: value}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(settings))
    raises_one_line(said, xa.load, tmp_path)


def test_a_deeply_nested_config_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"a": ' * 100_000)
    raises_one_line("nested too deeply", xa.load, tmp_path)


def message(*fields):
    """A protocol buffer of (number, bytes or integer)."""
    out = b""
    for number, value in fields:
        if isinstance(value, bytes):
            out += bytes([number << 3 | 2]) + varint(len(value)) + value
        else:
            out += bytes([number << 3]) + varint(value)
    return out


def varint(value):
    out = b""
    while value >= 0x80:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def piece(text, score=-1.0, kind=1):
    scored = message((1, text.encode())) + b"\x15" + struct.pack("<f", score)
    return 1, scored + message((3, kind))


PIECES = [
    piece("<pad>", kind=3),
    piece("</s>", kind=3),
    piece("<unk>", kind=2),
    piece("▁a"),
    piece("b"),
]


def test_a_model_of_few_pieces_is_read(tmp_path):
    (tmp_path / "spiece.model").write_bytes(message(*PIECES))
    assert read_tokenizer(tmp_path, "t5").encode("ab").tokens == ["▁a", "b", "</s>"]


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"\xff" * 10**6, "is no SentencePiece model, or is damaged"),
        (b"\x0a" + b"\xff" * 9 + b"\x01", "is no SentencePiece model, or is damaged"),
        (message(*PIECES, (1, message((3, 1)))), "a piece lacks its text"),
        (message(*PIECES, piece("c", float("nan"))), "or its score is no number"),
        (message(*PIECES, piece("d", kind=2)), "it has 2 unknown tokens, not 1"),
        (message(*PIECES, (3, message((2, b"\xff\xff\xff\x7f" + bytes(40))))), "is no tokenizer"),
    ],
    ids=["numbers", "length", "no text", "no score", "unknown", "characters"],
)
def test_a_damaged_sentencepiece_model_is_refused(tmp_path, raw, said):
    (tmp_path / "spiece.model").write_bytes(raw)
    raises_one_line(said, read_tokenizer, tmp_path, "t5")


def test_a_missing_sentencepiece_is_named(tmp_path, monkeypatch):
    (tmp_path / "spiece.model").write_bytes(message(*PIECES))
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    said = r"spiece\.model needs sentencepiece: pip install 'crossattn\[sentencepiece\]'"
    raises_one_line(said, read_tokenizer, tmp_path, "t5", error=ImportError)


@pytest.mark.parametrize(("kind", "name"), [("t5", "extra_ids"), ("pegasus", "offset")])
@pytest.mark.parametrize("count", [10**12, -1, 1.5, "9"])
def test_a_config_adds_no_more_tokens_than_a_vocabulary_has(tmp_path, kind, name, count):
    (tmp_path / "spiece.model").write_bytes(message(*PIECES))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({name: count}))
    raises_one_line(f"has {name} .*; expected 0 to 100000", read_tokenizer, tmp_path, kind)


@pytest.fixture(scope="module")
def tokenizer():
    texts = ["the black cat sees a small bird", "a bird"]
    return json.loads(train_tokenizer(texts, 300)._backend.to_str())


PADDING = dict(direction="Right", pad_id=0, pad_type_id=0, pad_token="<pad>")


@pytest.mark.parametrize(
    ("change", "said", "said_of_own"),
    [
        (
            {"padding": PADDING | {"strategy": {"Fixed": 10**11}, "pad_to_multiple_of": None}},
            "pads texts to 100000000000 tokens; expected at most 1048576",
            "cuts or pads what it encodes",
        ),
        (
            {"padding": PADDING | {"strategy": "BatchLongest", "pad_to_multiple_of": 10**11}},
            "pads texts to 100000000000 tokens; expected at most 1048576",
            "cuts or pads what it encodes",
        ),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "////f///"}},
            "is no tokenizer: .*precompiled_charsmap",
            "is not a saved tokenizer: .*precompiled_charsmap",
        ),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////9h"}},
            "is no tokenizer: index out of bounds",
            "is not a saved tokenizer: index out of bounds",
        ),
    ],
    ids=["pads", "pads_to_multiples", "panics_when_read", "panics_when_used"],
)
def test_a_tokenizer_that_would_end_the_process_is_refused(
    tokenizer, tmp_path, change, said, said_of_own
):
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer | change))
    raises_one_line(said, read_tokenizer, tmp_path)
    raises_one_line(said_of_own, Tokenizer.load, tmp_path, error=DataError)


def test_a_tokenizer_that_cuts_texts_is_none_of_ours(tokenizer, tmp_path):
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer | {"truncation": cut}))
    raises_one_line("cuts or pads what it encodes", Tokenizer.load, tmp_path, error=DataError)


@pytest.mark.parametrize("text", ["{", "[]", '{"a": ' * 100_000])
def test_the_hints_beside_a_whispers_tokenizer_are_json(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(whisper_vocabulary.backend().to_str())
    (tmp_path / "generation_config.json").write_text(text)
    match = r"generation_config\.json is not JSON"
    raises_one_line(match, WhisperTokens.load, tmp_path, error=DataError)


def test_shapes_and_names_of_ctranslate2_are_not_believed(tmp_path):
    path = tmp_path / "model.bin"
    good = ctranslate2_files.pack({"a": np.ones((2, 3), np.float32)})
    for shape in ((2**31, 2**31), (2**32 - 1, 3)):
        path.write_bytes(good.replace(struct.pack("<II", 2, 3), struct.pack("<II", *shape)))
        raises_one_line(r"a of shape \[\d+, \d+\] has 24 bytes", ctranslate2.read, path)
    begin = good.index(b"\x02\0a\0")
    deep = good[: begin + 4] + b"\xff" + struct.pack("<255I", *[1] * 255) + good[begin + 13 :]
    path.write_bytes(deep)
    raises_one_line("a of shape", ctranslate2.read, path)
    twice = ctranslate2_files.pack({"a": np.ones(1, np.float32), "b": np.ones(1, np.float32)})
    path.write_bytes(twice.replace(b"\x02\0b\0", b"\x02\0a\0"))
    raises_one_line("two tensors a", ctranslate2.read, path)
    raises_one_line("cannot be read", ctranslate2.read, tmp_path / "nothing")
