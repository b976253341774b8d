"""A Whisper vocabulary of bytes, small enough for tests."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from crossattn.data.whisper_tokens import WhisperTokens

TIMES = 51
"""Time tokens: 0.00 to 1.00 s."""


def backend(times: int = TIMES) -> Tokenizer:
    """Bytes, then the specials of a Whisper that knows English and German; times have no names there."""
    letters = {letter: id for id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = "endoftext startoftranscript en de translate transcribe startoflm startofprev nospeech"
    special = [*names.split(), "notimestamps"]
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in special])
    return tokenizer


def tokens(multilingual: bool = True) -> WhisperTokens:
    """The vocabulary."""
    return WhisperTokens(backend(), multilingual=multilingual)


VOCABULARY = 256 + 10 + TIMES


def save(folder) -> None:
    """Writes tokenizer.json."""
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(backend().to_str())))


def save_apart(folder) -> None:
    """Writes the same as vocab.json, merges.txt and added_tokens.json."""
    ids = backend().get_vocab()
    text = {token: id for token, id in ids.items() if id < 256}
    added = {token: id for token, id in ids.items() if id >= 256}
    (folder / "vocab.json").write_text(json.dumps(text), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    (folder / "added_tokens.json").write_text(json.dumps(added), encoding="utf-8")
