"""Damaged and hostile files: read as what was written, or refused in one line of the documented kind.

Memory and time are bounded: a file of kilobytes that asks for gigabytes is refused.
"""

import contextlib
import io
import json
import resource
import signal
import struct
import wave
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from crossattn.data.archives import read_deb, read_zip
from crossattn.data.audio import read_audio
from crossattn.data.errors import DataError, DataUnavailable
from crossattn.data.textfiles import read_pairs
from crossattn.data.tokenizers import Tokenizer, train_tokenizer
from crossattn.weights.formats import safetensors
from crossattn.weights.formats.safetensors import CheckpointError
from crossattn.weights.settings import read_settings
from crossattn.weights.tokenizers.sentencepiece import read_pieces
from crossattn.weights.tokenizers.tokenizer import read_tokenizer
from tests.data.conftest import write_deb
from tests.properties import examples
from tests.properties.damage import TEXTS, damaged

_ROOM = 3 << 29  # bytes that reading a small file may ask for
_SECONDS = 30
TEXT = "".join(f"line {i}: the quick brown fox, ünïcödé ✓ {i * 7919}\n" for i in range(40))
WORDS = sorted(set(TEXT.split()))
PART = "model-00001-of-00001.safetensors"
TENSORS = save({"a": np.arange(12, dtype=np.float32).reshape(2, 6), "b": np.ones((2, 3), np.int8)})


def packed(folder):
    path = folder / "made.deb"
    write_deb(path, {"usr/a.txt": TEXT, "usr/b.txt": TEXT}, "xz")
    return path.read_bytes()


def zipped(folder):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", TEXT)
        archive.writestr("b.txt", TEXT[:100])
    return made.getvalue()


def wav(folder):
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setparams((2, 2, 44_100, 0, "NONE", ""))
        file.writeframes(np.arange(17_640, dtype="<i2").tobytes())
    return made.getvalue()


def sentence_pieces(folder):
    """A SentencePiece model of the unigram kind: one protocol buffer message."""
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"▁{word}", -float(i), 1) for i, word in enumerate(WORDS)]
    body = b""
    for text, score, kind in pieces:
        raw = text.encode()
        piece = b"\x0a" + bytes([len(raw)]) + raw + b"\x15" + struct.pack("<f", score)
        piece += b"\x18" + bytes([kind])
        body += b"\x0a" + bytes([len(piece)]) + piece
    return body + b"\x12\x02\x18\x01"


def tokenizer(folder):
    train_tokenizer(TEXT.splitlines(), 300).save(folder, "made")
    return (folder / "made.json").read_bytes()


PAIRS = [{"source": line, "target": line[::-1]} for line in TEXT.splitlines()]
BART = dict(
    model_type="bart", vocab_size=20, d_model=8, encoder_layers=1, decoder_layers=1,
    encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=12,
    decoder_ffn_dim=12, max_position_embeddings=10, activation_function="gelu",
    pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2,
)  # fmt: skip


def as_json(value):
    return lambda folder: json.dumps(value).encode()


def tensors(path):
    files = safetensors.open_folder(path.parent)
    return {name: array.tobytes() for name, array in files.read(set(files.shapes))}


def split_tensors(path):
    (path.parent / PART).write_bytes(TENSORS)
    return safetensors.open_folder(path.parent)


def own(path):
    found = Tokenizer.load(path.parent, path.stem)
    return found.decode(found.encode("the quick fox"))


def of_checkpoint(model_type):
    """The tokenizer that a checkpoint of this type has by this file and those beside it."""

    def read(path):
        if model_type == "bart":
            (path.parent / "merges.txt").write_bytes(b"#version: 0.2\n")
        elif model_type == "marian":
            (path.parent / "source.spm").write_bytes(sentence_pieces(path.parent))
        return read_tokenizer(path.parent, model_type).encode("the quick fox").ids

    return read


def table(folder):
    return "".join(f"{pair['source']}\t{pair['target']}\n" for pair in PAIRS).encode()


def lines(folder):
    return "\n".join(map(json.dumps, PAIRS)).encode()


def word_pieces(folder):
    return "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]).encode()


def pairs(path):
    return read_pairs(str(path), "train")


index = as_json({"metadata": {"total_size": 54}, "weight_map": {"a": PART, "b": PART}})
vocabulary = as_json({w: i for i, w in enumerate(["<s>", "<pad>", "</s>", "<unk>", *WORDS])})

# kind -> name of the file, its content, the documented error, the reader
READERS = {
    "deb": ("a_1.0_all.deb", packed, DataUnavailable, lambda path: list(read_deb(path, "usr/"))),
    "zip": ("a.zip", zipped, DataUnavailable, lambda path: read_zip(path, ["a.txt"])),
    "wav": ("a.wav", wav, DataError, lambda path: len(read_audio(path))),
    "table": ("a.tsv", table, DataError, pairs),
    "jsonl": ("a.jsonl", lines, DataError, pairs),
    "safetensors": (safetensors.WEIGHTS, lambda folder: TENSORS, CheckpointError, tensors),
    "tensor index": (safetensors.INDEX, index, CheckpointError, split_tensors),
    "tokenizer": ("own.json", tokenizer, DataError, own),
    "settings": ("config.json", as_json(BART), CheckpointError, read_settings),
    "unigram model": ("a.spm", sentence_pieces, CheckpointError, read_pieces),
    "tokenizer.json": ("tokenizer.json", tokenizer, CheckpointError, of_checkpoint("t5")),
    "vocab.txt": ("vocab.txt", word_pieces, CheckpointError, of_checkpoint("bert")),
    "spiece.model": ("spiece.model", sentence_pieces, CheckpointError, of_checkpoint("t5")),
    "vocab.json": ("vocab.json", vocabulary, CheckpointError, of_checkpoint("bart")),
    "marian": ("vocab.json", vocabulary, CheckpointError, of_checkpoint("marian")),
}
CHECKSUMS = ("deb", "zip")  # what is read of these at all is what was written


@contextlib.contextmanager
def bounded():
    """No more memory than a little, no more time than half a minute."""

    def ring(*_):
        raise AssertionError(f"reading takes more than {_SECONDS} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages + _ROOM, before[1]))
    previous = signal.signal(signal.SIGALRM, ring)
    signal.alarm(_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        resource.setrlimit(resource.RLIMIT_AS, before)


def outcome(read, path, error):
    """Returns what is read, None where it is refused as documented. Other exceptions go through."""
    try:
        with bounded():
            return read(path)
    except error as refusal:
        text = str(refusal)
        assert text and "\n" not in text and len(text) <= 2000, text
        return None


@pytest.fixture
def written(tmp_path):
    """(the file of a kind, written anew with what stands beside it; error; reader)"""

    def write(kind):
        name, make, error, read = READERS[kind]
        path = tmp_path / name
        path.write_bytes(make(tmp_path))
        return path, error, read

    return write


@pytest.mark.parametrize("kind", READERS)
@examples(12)
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_in_a_line(kind, data, written):
    path, error, read = written(kind)
    before, content = read(path), path.read_bytes()
    path.write_bytes(data.draw(damaged(content)))
    found = outcome(read, path, error)
    assert kind not in CHECKSUMS or found is None or found == before


@pytest.mark.parametrize("kind", ["jsonl", "settings", "tokenizer", "marian", "tensor index"])
@examples(20)
@given(text=TEXTS)
def test_json_of_any_shape_is_read_or_refused_in_a_line(kind, text, written):
    path, error, read = written(kind)
    path.write_bytes(text)
    outcome(read, path, error)


def test_a_reader_that_asks_for_too_much_or_raises_another_error_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.properties.test_files._SECONDS", 1)

    def wait(path):
        while True:
            pass

    for read, expected in (
        (lambda path: {}[path], KeyError),
        (lambda path: np.ones(1 << 40, np.int8), MemoryError),
        (wait, AssertionError),
    ):
        with pytest.raises(expected):
            outcome(read, tmp_path, ValueError)
