"""Sub-word tokenizers, trained on the fly with Hugging Face `tokenizers`.

Both kinds fall back on the bytes of UTF-8, so any text can be written and nothing is ever unknown:
decoding gives the text back, up to white space. Words and punctuation never share a token, so
tokens map to words by their spans.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from tokenizers import (
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers import Tokenizer as _Backend

from crossattn.data.errors import DataError
from crossattn.files import whole

PAD, BOS, EOS, UNK = 0, 1, 2, 3
SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")
_BYTES = [
    f"<0x{byte:02X}>" for byte in range(256)
]  # of a unigram model, for characters it does not have

# A piece is a word (with an elided article's or genitive's apostrophe when a letter follows), one
# digit, or a run of one punctuation mark; each takes the blank before it. Marks count as letters,
# or Devanagari falls apart.
_PIECE = r" ?[\p{L}\p{M}]+(?:['’](?=\p{L}))?| ?\p{N}| ?([^\s\p{L}\p{M}\p{N}])\1*|\s+"


@dataclass(frozen=True)
class Frame:
    """The tokens around those of a text.

    Attributes:
        start: the first token that a decoder reads.
        before, after: the tokens that begin and end a text; a decoder predicts both.
    """

    start: int = BOS
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = (EOS,)

    def __len__(self) -> int:
        return len(self.before) + len(self.after)

    def read(self, ids: Sequence[int], length: int) -> list[int]:
        """Returns a text that is read, at most `length` tokens: cutting it keeps its end."""
        return [*self.before, *ids[: max(length - len(self), 0)], *self.after][-length:]

    def predicted(self, ids: Sequence[int], length: int) -> list[int]:
        """Returns a text that is predicted: the start of the decoder, and at most `length` tokens.

        Cutting it loses its end, so that nothing learns to stop there.
        """
        return [self.start, *self.before, *ids, *self.after][: length + 1]


class Tokenizer:
    """A tokenizer trained here; ids 0 to 3 are padding, beginning, end and (never produced) unknown.

    Attributes:
        frame: the tokens around those of a text.
    """

    frame = Frame()

    def __init__(self, backend: _Backend):
        self._backend = backend
        # Text that spells a special token is text.
        self._backend.encode_special_tokens = True
        self._byte_level = not isinstance(backend.model, models.Unigram)
        self._blank = "Ġ" if self._byte_level else " "  # a blank, as the byte alphabet writes it

    @property
    def vocab_size(self) -> int:
        """Number of ids, specials included."""
        return self._backend.get_vocab_size()

    @property
    def most_id(self) -> int:
        """The greatest id, which is beyond `vocab_size` where a published vocabulary leaves numbers out."""
        return most_id(self._backend)

    @property
    def mask_id(self) -> int:
        """The id of a masked token, to which no text is encoded."""
        return UNK

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without beginning or end."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of many texts, in parallel."""
        encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def encode_with_spans(self, text: str) -> tuple[list[int], Int[np.ndarray, "tokens 2"]]:
        """Returns ids and the span of each in characters of `text`, white space trimmed.

        The bytes of one character share its span; a token of a blank alone has an empty span.
        """
        encoding = self._backend.encode(text, add_special_tokens=False)
        spans = encoding.offsets if self._byte_level else _spread_bytes(encoding, text)
        trimmed = []
        for token, (start, end) in zip(encoding.tokens, spans, strict=True):
            if token == self._blank:  # the first one stands before the text
                start = end = end if text[start].isspace() else start
            while start < end and text[start].isspace():
                start += 1
            trimmed.append((start, end))
        return encoding.ids, np.array(trimmed, np.int32).reshape(-1, 2)

    def decode(self, ids: Iterable) -> str:
        """Returns the text of ids; specials are skipped, bytes that are no UTF-8 become U+FFFD."""
        visible = [int(i) for i in ids if i >= len(SPECIALS)]
        return self._backend.decode(visible, skip_special_tokens=False).strip()

    def decode_batch(self, batch: Iterable[Iterable]) -> list[str]:
        """Returns the texts of many rows of ids."""
        return [self.decode(ids) for ids in batch]

    def tokens(self, ids: Iterable) -> list[str]:
        """Returns a readable piece for each id: "▁" is a blank, "<E2 96>" bytes that are no character."""
        return [self._readable(int(i)) for i in ids]

    def _readable(self, id: int) -> str:
        token = self._backend.id_to_token(id)
        if token is None:
            raise DataError(f"id {id} is not in the vocabulary of {self.vocab_size}")
        if id < len(SPECIALS):
            return token
        text = self._backend.decode([id], skip_special_tokens=False)
        if "\ufffd" in text and not self._byte_level:
            return token.replace("0x", "")
        if "\ufffd" in text:
            return "<" + " ".join(f"{_BYTE_OF[character]:02X}" for character in token) + ">"
        return text.replace(" ", "▁")

    def save(self, folder: str | os.PathLike, name: str = "tokenizer") -> Path:
        """Writes `name`.json in `folder`, whole or not at all, and returns its path."""
        path = Path(folder) / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as unfinished:
            unfinished.write_text(self._backend.to_str(), encoding="utf-8")
        return path

    @classmethod
    def load(cls, folder: str | os.PathLike, name: str = "tokenizer") -> "Tokenizer":
        """Reads what `save` wrote.

        Raises:
            DataError: there is no such file, or it is no tokenizer of this library.
        """
        path = Path(folder) / f"{name}.json"
        try:
            backend = open_backend(path)
        except FileNotFoundError:
            raise DataError(f"there is no tokenizer at {path}") from None
        except (ValueError, OSError) as error:
            raise DataError(f"{path} is not a saved tokenizer: {error}") from error
        if backend.padding or backend.truncation:
            raise DataError(f"{path} cuts or pads what it encodes; expected a tokenizer saved here")
        if [backend.id_to_token(i) for i in range(len(SPECIALS))] != list(SPECIALS):
            raise DataError(f"{path} does not begin its vocabulary with {', '.join(SPECIALS)}")
        return cls(backend)

    def to_json(self) -> str:
        """Returns the whole tokenizer, as `save` writes it."""
        return self._backend.to_str()

    @classmethod
    def from_json(cls, text: str) -> "Tokenizer":
        """Returns the tokenizer of a text of `to_json`."""
        return cls(_Backend.from_str(text))

    def __reduce__(self) -> tuple[Any, ...]:
        # The backend's own pickle forgets that text which spells a special token is text.
        return type(self).from_json, (self.to_json(),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())


def open_backend(path: Path) -> _Backend:
    """Returns the tokenizer in a file, tried on a text.

    Raises:
        ValueError: it is no tokenizer.
        OSError: it cannot be read.
    """
    text = path.read_text(encoding="utf-8")
    try:
        backend = _Backend.from_str(text)
        if backend.padding is None:  # to any length it likes
            backend.encode("A word, 2 é 中 \U0001f600")
        return backend
    except BaseException as error:
        # The backend raises bare Exception on a malformed file; its panics are not even that.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(str(error)) from None


def most_id(backend: _Backend) -> int:
    """Returns the greatest id of a vocabulary."""
    return max(backend.get_vocab().values())


def train_tokenizer(texts: Iterable[str], vocab_size: int, kind: str = "bpe") -> Tokenizer:
    """Trains a tokenizer of at most `vocab_size` ids; the same texts give the same tokenizer.

    `kind` is byte-pair encoding (arXiv:1508.07909) or a unigram language model (arXiv:1804.10959),
    either over the bytes of UTF-8.

    Raises:
        DataError: the vocabulary cannot hold the bytes, there is no text, or the kind is unknown.
    """
    least = len(_BYTES) + len(SPECIALS) + 1
    if vocab_size < least:
        raise DataError(f"vocab_size is {vocab_size}; bytes and specials alone take {least}")
    if kind not in ("bpe", "unigram"):
        raise DataError(f"kind is {kind!r}; expected 'bpe' or 'unigram'")
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise DataError("there is no text to train a tokenizer on")
    train = _train_bpe if kind == "bpe" else _train_unigram
    return Tokenizer(train(texts, vocab_size))


def _train_bpe(texts: list[str], vocab_size: int) -> _Backend:
    backend = _with_text_rules(_Backend(models.BPE()))
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([backend.pre_tokenizer, to_bytes])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer, length=len(texts))
    return backend


def _train_unigram(texts: list[str], vocab_size: int) -> _Backend:
    backend = _with_text_rules(_Backend(models.Unigram()))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size - len(_BYTES),
        special_tokens=list(SPECIALS),
        unk_token=SPECIALS[UNK],
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer, length=len(texts))
    return _rescored(backend, texts, vocab_size)


def _rescored(backend: _Backend, texts: list[str], vocab_size: int, rounds: int = 3) -> _Backend:
    """Returns the unigram model with bytes among its pieces and scores estimated again by hard EM.

    The trainer sums in the order of a hash table, so its scores differ a little from run to run
    while its choice of pieces does not. Counting pieces in best segmentations, from equal scores
    on, is exact.
    """
    content = json.loads(backend.to_str())
    model = content["model"]
    specials = model["vocab"][: len(SPECIALS)]
    pieces = sorted(token for token, _ in model["vocab"][len(SPECIALS) :])
    scores = [-10.0] * len(pieces)
    model["byte_fallback"] = True

    def rebuilt(scored: list[tuple[str, float]]) -> _Backend:
        floor = min(score for _, score in scored) - 1
        fallback = [[token, floor] for token in _BYTES]
        model["vocab"] = specials + fallback + [list(pair) for pair in scored]
        return _Backend.from_str(json.dumps(content))

    for _ in range(rounds):
        backend = rebuilt(list(zip(pieces, scores, strict=True)))
        ids = [i for encoding in backend.encode_batch_fast(texts) for i in encoding.ids]
        first = len(specials) + len(_BYTES)
        counts = np.bincount(ids, minlength=first + len(pieces))[first:] + 0.5
        scores = [round(score, 6) for score in np.log(counts / counts.sum()).tolist()]
    best = sorted(zip(pieces, scores, strict=True), key=lambda pair: (-pair[1], pair[0]))
    # The trainer keeps every character, which may be too many; the rarest are left to the bytes.
    return rebuilt(best[: vocab_size - len(specials) - len(_BYTES)])


def _with_text_rules(backend: _Backend) -> _Backend:
    # Every word carries its blank, the first one too: "cat" has one id wherever it stands.
    backend.normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip(), normalizers.Prepend(" ")]
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECE), "isolated")
    return backend


def _spread_bytes(encoding: Any, text: str) -> list[tuple[int, int]]:
    """Returns offsets with the character of each byte token; the backend gives a run one span."""
    spans = list(encoding.offsets)
    index = 0
    while index < len(spans):
        start, end = spans[index]
        size = len(text[start:end].encode("utf-8"))
        if encoding.tokens[index] in _BYTE_TOKENS and end - start > 1:
            owners = [i for i in range(start, end) for _ in text[i].encode("utf-8")]
            spans[index : index + size] = [(i, i + 1) for i in owners]
            index += size
        else:
            index += 1
    return spans


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte of each character of the byte-level alphabet: printable ones are their own."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
_BYTE_TOKENS = frozenset(_BYTES)
