"""The tokenizer that lies beside a checkpoint, in whatever files: always a ``tokenizers.Tokenizer``."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crossattn.weights.safetensors import CheckpointError
from crossattn.weights.sentencepiece import Piece, SentencePieces, read_pieces

Vocabulary = list[tuple[str, float]]


def read_tokenizer(folder: Path, model_type: str = "") -> Any:
    """The folder's tokenizer; None where it has none that is known here.

    ``tokenizer.json`` wherever there is one. Else the vocabulary that the kind of model comes with:
    ``source.spm`` and ``vocab.json`` (Marian), ``spiece.model`` (T5, Pegasus), ``vocab.json`` and
    ``merges.txt`` (GPT-2, BART), ``vocab.txt`` (BERT).

    Raises:
      CheckpointError: a file is damaged.
      ImportError: there is a tokenizer, but no ``tokenizers`` to read it.
    """
    kinds = {
        "": (_whole, "tokenizer.json"),
        "marian": (_marian, "source.spm", "vocab.json"),
        "t5": (_t5, "spiece.model"),
        "pegasus": (_pegasus, "spiece.model"),
        "gpt2": (_byte_level, "vocab.json", "merges.txt"),
        "bart": (_bart, "vocab.json", "merges.txt"),
        "bert": (_bert, "vocab.txt"),
    }
    for kind in ("", model_type):
        make, *names = kinds.get(kind, (None, ""))
        paths = [folder / name for name in names]
        if make is None or not all(path.is_file() for path in paths):
            continue
        try:
            import tokenizers  # noqa: F401
        except ImportError:
            raise ImportError(
                f"reading {paths[0]} needs tokenizers: pip install 'crossattn[weights]'"
            ) from None
        try:
            return make(*paths)
        except CheckpointError:
            raise
        except Exception as error:  # the backend raises bare Exception on a malformed file
            raise CheckpointError(f"{paths[0]} is no tokenizer: {error}") from None
    return None


def _whole(path: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def _marian(source: Path, ids: Path) -> Any:
    """The source's pieces under the ids of the vocabulary that both languages share.

    Text of the target is cut by the same pieces. The file of the target's own, ``target.spm``, is
    not read; decoding needs no more than the ids.
    """
    model, order = read_pieces(source), json.loads(ids.read_text(encoding="utf-8"))
    scores = {piece.text: piece.score for piece in model.pieces}
    # A token of the target alone is taken for what no other token covers, as if it were a character.
    least = min(scores.values()) - 10.0
    vocabulary = [(text, scores.get(text, least)) for text in sorted(order, key=order.__getitem__)]
    if [order[text] for text, _ in vocabulary] != list(range(len(order))):
        raise CheckpointError(f"{ids} does not number its tokens from 0 on, each once.")
    languages = [text for text in order if text.startswith(">>") and text.endswith("<<")]
    special = ["</s>", "<unk>", *(["<pad>"] if "<pad>" in order else []), *languages]
    return _unigram(model, vocabulary, order["<unk>"], special)


def _t5(path: Path) -> Any:
    """Behind the pieces stand the places of missing spans, ``<extra_id_0>`` last."""
    model, count = read_pieces(path), _setting(path, "extra_ids", 100)
    extra = [f"<extra_id_{i}>" for i in reversed(range(count))]
    vocabulary = [(p.text, p.score) for p in model.pieces] + [(text, 0.0) for text in extra]
    return _unigram(model, vocabulary, model.unknown, [*_controls(model), *extra])


def _pegasus(path: Path) -> Any:
    """Before the pieces stand padding, end, two masks and tokens that are never used, 105 in all."""
    model, offset = read_pieces(path), _setting(path, "offset", 103)
    special = ["<pad>", "</s>", "<mask_1>", "<mask_2>"]
    special += [f"<unk_{i}>" for i in range(2, offset)][: offset + 2 - len(special)]
    own = [(piece.text, piece.score) for piece in model.pieces[2:]]
    vocabulary = [(text, 0.0) for text in special] + own
    return _unigram(model, vocabulary, model.unknown + offset, special)


def _unigram(
    model: SentencePieces, vocabulary: Vocabulary, unknown: int, special: Sequence[str]
) -> Any:
    """Text as SentencePiece cuts it; an end is added."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers.pre_tokenizers import Metaspace

    backend = Tokenizer(models.Unigram(vocabulary, unknown, model.bytes))
    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    backend.normalizer = normalizers.Sequence(steps)
    backend.pre_tokenizer = Metaspace(prepend_scheme="always")
    metaspace = decoders.Metaspace(prepend_scheme="always")
    backend.decoder = (
        decoders.Sequence([decoders.ByteFallback(), metaspace]) if model.bytes else metaspace
    )
    backend.add_special_tokens(list(special))
    whole = [piece.text for piece in model.pieces if piece.is_user_defined]
    backend.add_tokens([AddedToken(text, normalized=True) for text in whole])
    return _ending(backend, "</s>")


def _byte_level(vocabulary: Path, merges: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    backend = Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.decoder = decoders.ByteLevel()
    _mark_special(backend, ["<|endoftext|>"])
    return backend


def _bart(vocabulary: Path, merges: Path) -> Any:
    from tokenizers import AddedToken, processors

    backend = _byte_level(vocabulary, merges)
    _mark_special(backend, ["<s>", "<pad>", "</s>", "<unk>"])
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])  # it takes the blank before it
    ends = [(text, backend.token_to_id(text)) for text in ("</s>", "<s>")]
    backend.post_processor = processors.RobertaProcessing(
        *ends, trim_offsets=True, add_prefix_space=False
    )
    return backend


def _bert(path: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    backend = Tokenizer(models.WordPiece.from_file(str(path), unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=_setting(path, "do_lower_case", True),
        handle_chinese_chars=_setting(path, "tokenize_chinese_chars", True),
        strip_accents=_setting(path, "strip_accents", None),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    _mark_special(backend, ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    ends: Any = [(text, backend.token_to_id(text)) for text in ("[SEP]", "[CLS]")]
    backend.post_processor = processors.BertProcessing(*ends)
    return backend


def _mark_special(backend: Any, names: Sequence[str]) -> None:
    """Those of the names that the vocabulary has stand for themselves wherever they are written."""
    backend.add_special_tokens([text for text in names if backend.token_to_id(text) is not None])


def _ending(backend: Any, end: str) -> Any:
    from tokenizers import processors

    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {end}",
        pair=f"$A {end} $B {end}",
        special_tokens=[(end, backend.token_to_id(end))],
    )
    return backend


def _controls(model: SentencePieces) -> list[str]:
    unknown: Piece = model.pieces[model.unknown]
    return [piece.text for piece in model.pieces if piece.is_control] + [unknown.text]


def _setting(path: Path, name: str, default: Any) -> Any:
    """From the ``tokenizer_config.json`` beside a file, if there is one."""
    config = path.parent / "tokenizer_config.json"
    if not config.is_file():
        return default
    return json.loads(config.read_text(encoding="utf-8")).get(name, default)
