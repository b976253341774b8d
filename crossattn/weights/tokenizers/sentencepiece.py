"""Makes a ``tokenizers.Tokenizer`` of SentencePiece's files, with the ids and specials of each family.

The package ``sentencepiece`` has the files' schema.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crossattn.weights.formats.safetensors import CheckpointError

_UNIGRAM = 1
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # types of pieces
_MOST = 100_000  # tokens that a config may add to a vocabulary

Vocabulary = list[tuple[str, float]]

# The order of fairseq, behind the pieces. The first line is mBART's, both are mBART-50's.
_LANGUAGES = (
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM "
    "ne_NP nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN"
).split()
_MORE_LANGUAGES = (
    "af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE "
    "sw_KE ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI"
).split()


def read_pieces(path: Path) -> Any:
    """Reads a model file, a ``ModelProto`` of ``sentencepiece_model.proto``.

    Raises:
      CheckpointError: the file is no SentencePiece model, or one of another kind than unigram.
      ImportError: the package is missing.
    """
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2 as schema
    except ImportError:
        raise ImportError(
            f"reading {path} needs sentencepiece: pip install 'crossattn[sentencepiece]'"
        ) from None
    try:
        model = schema.ModelProto.FromString(path.read_bytes())
    except DecodeError:
        raise CheckpointError(f"{path} is no SentencePiece model, or is damaged.") from None
    unknown = [piece.type for piece in model.pieces].count(_UNKNOWN)
    if unknown != 1:
        raise CheckpointError(
            f"{path} is no SentencePiece model: it has {unknown} unknown tokens, not 1."
        )
    if not all(piece.piece and math.isfinite(piece.score) for piece in model.pieces):
        raise CheckpointError(
            f"{path} is damaged: a piece lacks its text, or its score is no number."
        )
    if model.trainer_spec.model_type != _UNIGRAM:
        raise CheckpointError(
            f"{path} is a SentencePiece model of another kind than unigram; save its tokenizer as "
            "tokenizer.json with transformers first."
        )
    return model


def marian(source: Path, ids: Path) -> Any:
    """Returns the tokenizer of one language's pieces, with the ids that both languages share."""
    model, order = read_pieces(source), json.loads(ids.read_text(encoding="utf-8"))
    scores = {piece.piece: piece.score for piece in model.pieces}
    # Tokens of the other language alone come last, for text that no piece covers.
    least = min(scores.values()) - 10.0
    vocabulary = [(text, scores.get(text, least)) for text in sorted(order, key=order.__getitem__)]
    if [order[text] for text, _ in vocabulary] != list(range(len(order))):
        raise CheckpointError(f"{ids} does not number its tokens from 0 on, each once.")
    languages = [text for text in order if text.startswith(">>") and text.endswith("<<")]
    special = ["</s>", "<unk>", *(["<pad>"] if "<pad>" in order else []), *languages]
    return _unigram(model, vocabulary, order["<unk>"], special)


def t5(path: Path) -> Any:
    """Returns the tokenizer of the pieces, then the sentinels of missing spans, ``<extra_id_0>`` last."""
    model, count = read_pieces(path), _count(path, "extra_ids", 100)
    extra = [f"<extra_id_{i}>" for i in reversed(range(count))]
    vocabulary = _scored(model.pieces) + _unscored(extra)
    special = [piece.piece for piece in model.pieces if piece.type in (_CONTROL, _UNKNOWN)]
    return _unigram(model, vocabulary, _unknown(model), [*special, *extra])


def pegasus(path: Path) -> Any:
    """Returns the tokenizer of padding, end, two masks, unused tokens (105 in all), then the pieces."""
    model, offset = read_pieces(path), _count(path, "offset", 103)
    special = ["<pad>", "</s>", "<mask_1>", "<mask_2>"]
    special += [f"<unk_{i}>" for i in range(2, offset)][: offset + 2 - len(special)]
    vocabulary = _unscored(special) + _scored(model.pieces[2:])
    return _unigram(model, vocabulary, _unknown(model) + offset, special)


def mbart(path: Path) -> Any:
    """Returns the tokenizer of four specials, the pieces, languages, and a mask, in fairseq's order.

    The code of a text's language comes after its end in mBART and before the text in mBART-50: the
    ``src_lang`` of ``tokenizer_config.json``, by default English. ``with_language`` changes it.
    """
    from tokenizers import AddedToken

    model, configs = read_pieces(path), ("tokenizer_config.json", "config.json")
    classes = [setting(path, "tokenizer_class", "", config) or "" for config in configs]
    fifty = any(name.startswith("MBart50") for name in classes)
    languages = _LANGUAGES + _MORE_LANGUAGES if fifty else _LANGUAGES
    if [piece.piece for piece in model.pieces[:3]] != ["<unk>", "<s>", "</s>"]:
        raise CheckpointError(
            f"{path} begins with {model.pieces[0].piece}; expected <unk>, <s>, </s>, as mBART's does."
        )
    first = ["<s>", "<pad>", "</s>", "<unk>"]
    vocabulary = _unscored(first) + _scored(model.pieces[3:]) + _unscored([*languages, "<mask>"])
    # The mask takes the blank before it.
    special = [*first, *languages, AddedToken("<mask>", lstrip=True)]
    backend = _unigram(model, vocabulary, first.index("<unk>"), special)
    own = setting(path, "src_lang", None) or "en_XX"
    if own not in languages:
        raise CheckpointError(
            f"tokenizer_config.json has src_lang {own!r}; expected one of {', '.join(languages)}."
        )
    single = f"{own} $A </s>" if fifty else f"$A </s> {own}"
    return _template(backend, single, single.replace("$A", "$A $B"), (own, "</s>"))


def _unigram(model: Any, vocabulary: Vocabulary, unknown: int, special: Sequence[Any]) -> Any:
    """Returns a tokenizer that cuts text as SentencePiece does, and adds an end."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers.pre_tokenizers import Metaspace

    spelt, charsmap = model.trainer_spec.byte_fallback, model.normalizer_spec.precompiled_charsmap
    backend = Tokenizer(models.Unigram(vocabulary, unknown, spelt))
    steps: list[Any] = [normalizers.Precompiled(charsmap)] if charsmap else []
    steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    backend.normalizer = normalizers.Sequence(steps)
    backend.pre_tokenizer = Metaspace(prepend_scheme="always")
    metaspace = decoders.Metaspace(prepend_scheme="always")
    backend.decoder = (
        decoders.Sequence([decoders.ByteFallback(), metaspace]) if spelt else metaspace
    )
    backend.add_special_tokens(list(special))
    whole = [piece.piece for piece in model.pieces if piece.type == _USER_DEFINED]
    backend.add_tokens([AddedToken(text, normalized=True) for text in whole])
    return _template(backend, "$A </s>", "$A </s> $B </s>", ("</s>",))


def _template(backend: Any, single: str, pair: str, special: Sequence[str]) -> Any:
    from tokenizers import processors

    tokens = [(text, backend.token_to_id(text)) for text in special]
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=tokens
    )
    return backend


def _scored(pieces: Any) -> Vocabulary:
    return [(piece.piece, piece.score) for piece in pieces]


def _unscored(texts: Sequence[str]) -> Vocabulary:
    return [(text, 0.0) for text in texts]


def _unknown(model: Any) -> int:
    """Returns the id of text without a piece."""
    return [piece.type for piece in model.pieces].index(_UNKNOWN)


def _count(path: Path, name: str, default: int) -> int:
    """Returns the number of tokens that the config beside a file adds."""
    value = setting(path, name, default)
    if type(value) is not int or not 0 <= value <= _MOST:
        raise CheckpointError(
            f"{path.with_name('tokenizer_config.json')} has {name} {value!r}; expected 0 to {_MOST}."
        )
    return value


def setting(path: Path, name: str, default: Any, config: str = "tokenizer_config.json") -> Any:
    """Returns an entry of the config beside a file, if there is one."""
    beside = path.with_name(config)
    if not beside.is_file():
        return default
    return json.loads(beside.read_text(encoding="utf-8")).get(name, default)
