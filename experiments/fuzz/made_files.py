"""Small whole files of every kind that is read, and bombs; made without what reads them."""

import gzip
import hashlib
import io
import json
import lzma
import struct
import tarfile
import wave
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

PART = "model-00001-of-00001.safetensors"
TEXT = "".join(f"line {i}: the quick brown fox, ünïcödé ✓ {i * 7919}\n" for i in range(40))
WORDS = sorted(set(TEXT.split()))


def deb(random: np.random.Generator) -> bytes:
    """A Debian package with one document, its data in one of the compressions."""
    names, text = ("usr/share/doc/a.txt", "usr/share/doc/b.txt"), TEXT.encode()
    data = _tar({f"./{name}": text for name in names})
    name, pack = (("data.tar.xz", lzma.compress), ("data.tar.gz", gzip.compress))[
        random.integers(2)
    ]
    members = (
        ("debian-binary", b"2.0\n"),
        ("control.tar.xz", lzma.compress(_control({name: text for name in names}))),
        (name, pack(data)),
    )
    return b"!<arch>\n" + b"".join(_member(*each) for each in members)


def _control(files: dict[str, bytes]) -> bytes:
    """What a package says about its files."""
    sums = "".join(f"{hashlib.md5(raw).hexdigest()}  {name}\n" for name, raw in files.items())
    return _tar({"./control": b"Package: a\n", "./md5sums": sums.encode()})


def _tar(files: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, raw in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))
    return made.getvalue()


def _member(name: str, body: bytes) -> bytes:
    head = f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(body):<10}`\n".encode()
    return head + body + b"\n" * (len(body) % 2)


def zipped(random: np.random.Generator) -> bytes:
    """A zip file of two texts."""
    made = io.BytesIO()
    how = (zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED)[random.integers(2)]
    with zipfile.ZipFile(made, "w", how) as archive:
        archive.writestr("a.txt", TEXT)
        archive.writestr("b.txt", TEXT[:100])
    return made.getvalue()


def wav(random: np.random.Generator) -> bytes:
    """A tenth of a second."""
    made, rate = io.BytesIO(), int(random.choice([8_000, 16_000, 44_100]))
    with wave.open(made, "wb") as file:
        file.setnchannels(int(random.integers(1, 3)))
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((random.integers(-9999, 9999, 2 * rate // 10)).astype("<i2").tobytes())
    return made.getvalue()


def table(random: np.random.Generator) -> bytes:
    """Sentence pairs, tab-separated."""
    return "".join(f"{line}\t{line[::-1]}\n" for line in TEXT.splitlines()).encode()


def jsonl(random: np.random.Generator) -> bytes:
    """Sentence pairs, an object a line."""
    lines = (
        {"source": line, "target": line[::-1], "n": i}
        for i, line in enumerate(TEXT.split("\n")[:-1])
    )
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()


def safetensors(random: np.random.Generator) -> bytes:
    """Two tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in (
        ("a", np.arange(12.0, dtype=np.float32)),
        ("b", np.arange(6, dtype=np.int8)),
    ):
        kind = {"float32": "F32", "int8": "I8"}[array.dtype.name]
        ends = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": kind, "shape": [2, array.size // 2], "data_offsets": ends}
        data += array.tobytes()
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def index(random: np.random.Generator) -> bytes:
    """Of those tensors, in one more file."""
    return json.dumps(
        {"metadata": {"total_size": 54}, "weight_map": {"a": PART, "b": PART}}
    ).encode()


def tokenizer(random: np.random.Generator) -> bytes:
    """A ``tokenizer.json``."""
    from crossattn.data.tokenizers import train_tokenizer

    return train_tokenizer(TEXT.splitlines(), 300)._backend.to_str().encode()


def vocabulary(random: np.random.Generator) -> bytes:
    """A ``vocab.json``."""
    return json.dumps(
        {word: i for i, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", *WORDS])}
    ).encode()


def word_pieces(random: np.random.Generator) -> bytes:
    """A ``vocab.txt``."""
    return "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]).encode()


def sentence_pieces(random: np.random.Generator) -> bytes:
    """A SentencePiece model of the unigram kind: one protocol buffer message."""
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"▁{word}", -float(i), 1) for i, word in enumerate(WORDS)]
    body = b""
    for text, score, kind in pieces:
        raw = text.encode()
        message = (
            b"\x0a"
            + bytes([len(raw)])
            + raw
            + b"\x15"
            + struct.pack("<f", score)
            + b"\x18"
            + bytes([kind])
        )
        body += b"\x0a" + bytes([len(message)]) + message
    return body + b"\x12\x02\x18\x01"


def settings(random: np.random.Generator) -> bytes:
    """A ``config.json`` of a BART."""
    return json.dumps(
        dict(
            model_type="bart", vocab_size=20, d_model=8, encoder_layers=1, decoder_layers=1,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=12,
            decoder_ffn_dim=12, max_position_embeddings=10, activation_function="gelu",
            pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2,
        )
    ).encode()  # fmt: skip


MAKERS: dict[str, Callable[[np.random.Generator], bytes]] = {
    maker.__name__: maker
    for maker in (
        deb, zipped, wav, table, jsonl, safetensors, index, tokenizer, vocabulary, word_pieces,
        sentence_pieces, settings,
    )
}  # fmt: skip


def bomb(kind: str, size: int) -> bytes:
    """A small file that unpacks, or says that it unpacks, to ``size`` bytes."""
    if kind == "wav":  # one sample a second, so that resampling multiplies what there is
        data = b"\0" * (size // 16_000)
        head = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + len(data), b"WAVE", b"fmt ", 16, 1, 1,
                           1, 1, 1, 8, b"data", len(data))  # fmt: skip
        return head + data
    if kind == "zipped":
        made = io.BytesIO()
        with (
            zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive,
            archive.open("a.txt", "w", force_zip64=True) as file,
        ):
            for _ in range(size >> 20):
                file.write(bytes(1 << 20))
        return made.getvalue()
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=6) as file:
        member = tarfile.TarInfo("./usr/share/doc/a.txt")
        member.size = size
        file.write(member.tobuf())
        for _ in range(size >> 20):
            file.write(bytes(1 << 20))
        file.write(bytes(1024))
    control = gzip.compress(_tar({"./control": b"Package: a\n"}))
    members = (
        ("debian-binary", b"2.0\n"),
        ("control.tar.gz", control),
        ("data.tar.gz", packed.getvalue()),
    )
    return b"!<arch>\n" + b"".join(_member(*each) for each in members)
