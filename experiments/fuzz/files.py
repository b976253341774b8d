"""Damaged and hostile files: what is read is what was written, or one line of the documented kind says no.

Memory and time are bounded: a file of kilobytes that asks for gigabytes is refused.
"""

import contextlib
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from crossattn.data.audio import read_audio
from crossattn.data.errors import DataError, DataUnavailable
from crossattn.data.fetch import read_deb, read_zip
from crossattn.data.textfiles import read_pairs
from crossattn.data.tokenizers import Tokenizer
from crossattn.weights.formats import safetensors
from crossattn.weights.formats.safetensors import CheckpointError
from crossattn.weights.settings import read_settings
from crossattn.weights.tokenizers.sentencepiece import read_pieces
from crossattn.weights.tokenizers.tokenizer import read_tokenizer
from experiments.fuzz import Wrong, made_files
from experiments.fuzz.damage import damaged

ABOUT = "archives, tables, sound, tensors and tokenizers with bytes changed, and bombs"
NEEDS = ("hypothesis", "soundfile", "soxr", "safetensors", "tokenizers")
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}

_ROOM = 3 << 29  # bytes that reading a small file may ask for
_SECONDS = 30
_BOMB = 2 << 30


def start(folder: Path) -> Callable[[np.random.Generator], None]:
    """A file of one kind, damaged, or hostile JSON, or now and then a bomb."""

    def case(random: np.random.Generator) -> None:
        how = random.random()
        if how < 0.02:
            return _bomb(random, folder)
        if how < 0.1:
            return _hostile_json(random, folder)
        kind = list(_READERS)[random.integers(len(_READERS))]
        name, maker, expected, read, checked = _READERS[kind]
        whole = made_files.MAKERS[maker](random)
        path = folder / name
        path.write_bytes(whole)
        before = read(path)
        content, what = damaged(random, whole)
        path.write_bytes(content)
        outcome = _read(f"{kind} with {what}", read, path, expected)
        if checked and outcome is not None and outcome != before:
            raise Wrong(f"{kind} with {what}: is read as something else, though it holds checksums")

    return case


def _read(said: str, read: Callable[[Path], Any], path: Path, expected: tuple) -> Any:
    """What is read; None where it is refused as documented."""
    with _bounded(said):
        try:
            return read(path)
        except expected as error:
            text = str(error)
            if "\n" in text or not text or len(text) > 2000:
                raise Wrong(f"{said}: the refusal is no line but {text[:300]!r}") from None
            return None
        except Wrong:
            raise
        except MemoryError:
            raise Wrong(f"{said}: asks for more than {_ROOM / 2**30} GiB") from None
        except Exception as error:
            kinds = " or ".join(kind.__name__ for kind in expected)
            raise Wrong(f"{said}: {type(error).__name__}, not {kinds}: {error}") from error


@contextlib.contextmanager
def _bounded(said: str) -> Iterator[None]:
    """No more memory than a little, no more time than half a minute."""

    def ring(*_: Any) -> None:
        raise Wrong(f"{said}: takes more than {_SECONDS} s")

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


def _bomb(random: np.random.Generator, folder: Path) -> None:
    kind = ("deb", "zipped", "wav")[random.integers(3)]
    name, _, expected, read, _ = _READERS[kind]
    path = folder / "bombs" / name
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(made_files.bomb(kind, _BOMB))
    _read(f"a {kind} of {path.stat().st_size >> 10} KiB", read, path, expected)


def _hostile_json(random: np.random.Generator, folder: Path) -> None:
    """JSON of any shape where a certain one is expected; hypothesis makes it and makes it small."""
    from experiments.fuzz.hostile import check_texts

    kind = ("jsonl", "settings", "tokenizer", "marian vocabulary", "tensor index")[
        random.integers(5)
    ]
    name, _, expected, read, _ = _READERS[kind]

    def check(text: str) -> None:
        path = folder / name
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        _read(f"{kind} that holds {text[:80]!r}", read, path, expected)

    check_texts(check, int(random.integers(2**32)))


def _tensors(path: Path) -> Any:
    files = safetensors.open_folder(path.parent)
    return {name: array.tobytes() for name, array in files.read(set(files.shapes))}


def _index(path: Path) -> Any:
    folder = path.parent / "split"
    folder.mkdir(exist_ok=True)
    (folder / made_files.PART).write_bytes(made_files.safetensors(np.random.default_rng(0)))
    (folder / path.name).write_bytes(path.read_bytes())
    return safetensors.open_folder(folder)


def _deb(path: Path) -> Any:
    return list(read_deb(path, "usr/"))


def _zip(path: Path) -> Any:
    return read_zip(path, ["a.txt"])


def _pairs(path: Path) -> Any:
    return read_pairs(str(path), "train")


def _sound(path: Path) -> Any:
    return len(read_audio(path))


def _own(path: Path) -> Any:
    tokenizer = Tokenizer.load(path.parent, path.stem)
    return tokenizer.decode(tokenizer.encode("the quick fox"))


def _kept(model_type: str) -> Callable[[Path], Any]:
    """A checkpoint's tokenizer from this file and what stands beside it."""

    def read(path: Path) -> Any:
        folder = path.parent / f"{model_type} {path.stem}"
        folder.mkdir(exist_ok=True)
        beside = {"bart": {"merges.txt": b"#version: 0.2\n"}}.get(model_type, {})
        if model_type == "marian":
            beside = {"source.spm": made_files.sentence_pieces(np.random.default_rng(0))}
        for name, content in (beside | {path.name: path.read_bytes()}).items():
            (folder / name).write_bytes(content)
        tokenizer = read_tokenizer(folder, model_type)
        return tokenizer.encode("the quick fox").ids

    return read


_READERS: dict[str, tuple[str, str, tuple, Callable[[Path], Any], bool]] = {
    "deb": ("a_1.0_all.deb", "deb", (DataUnavailable,), _deb, True),
    "zipped": ("a.zip", "zipped", (DataUnavailable,), _zip, True),
    "wav": ("a.wav", "wav", (DataError,), _sound, False),
    "table": ("a.tsv", "table", (DataError,), _pairs, False),
    "jsonl": ("a.jsonl", "jsonl", (DataError,), _pairs, False),
    "safetensors": (safetensors.WEIGHTS, "safetensors", (CheckpointError,), _tensors, False),
    "tensor index": (safetensors.INDEX, "index", (CheckpointError,), _index, False),
    "tokenizer": ("own.json", "tokenizer", (DataError,), _own, False),
    "settings": ("config.json", "settings", (CheckpointError,), read_settings, False),
    "unigram model": ("a.spm", "sentence_pieces", (CheckpointError,), read_pieces, False),
    "tokenizer.json": ("tokenizer.json", "tokenizer", (CheckpointError,), _kept("t5"), False),
    "vocab.txt": ("vocab.txt", "word_pieces", (CheckpointError,), _kept("bert"), False),
    "spiece.model": ("spiece.model", "sentence_pieces", (CheckpointError,), _kept("t5"), False),
    "vocab.json": ("vocab.json", "vocabulary", (CheckpointError,), _kept("bart"), False),
    "marian vocabulary": ("vocab.json", "vocabulary", (CheckpointError,), _kept("marian"), False),
}
"""What it is -> file name, maker, documented errors, reader, whether it holds checksums of its contents."""
