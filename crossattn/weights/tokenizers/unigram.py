"""SentencePiece vocabularies of the families: pieces, under ids and with specials of their own."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crossattn.weights.formats.safetensors import CheckpointError
from crossattn.weights.tokenizers.sentencepiece import Piece, SentencePieces, read_pieces

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


def marian(source: Path, ids: Path) -> Any:
    """The pieces of one language under the ids of the vocabulary that both share.

    Text of the target is cut by the same pieces, where the file is that of the source; decoding needs no
    more than the ids.
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


def t5(path: Path) -> Any:
    """Behind the pieces stand the places of missing spans, ``<extra_id_0>`` last."""
    model, count = read_pieces(path), _count(path, "extra_ids", 100)
    extra = [f"<extra_id_{i}>" for i in reversed(range(count))]
    vocabulary = [(p.text, p.score) for p in model.pieces] + [(text, 0.0) for text in extra]
    return _unigram(model, vocabulary, model.unknown, [*_controls(model), *extra])


def pegasus(path: Path) -> Any:
    """Before the pieces stand padding, end, two masks and tokens that are never used, 105 in all."""
    model, offset = read_pieces(path), _count(path, "offset", 103)
    special = ["<pad>", "</s>", "<mask_1>", "<mask_2>"]
    special += [f"<unk_{i}>" for i in range(2, offset)][: offset + 2 - len(special)]
    own = [(piece.text, piece.score) for piece in model.pieces[2:]]
    vocabulary = [(text, 0.0) for text in special] + own
    return _unigram(model, vocabulary, model.unknown + offset, special)


def mbart(path: Path) -> Any:
    """The four specials of fairseq, the pieces one id later than theirs, languages, and a mask.

    Text is marked with its language, behind the end in mBART and before the text in mBART-50; the language is
    the ``src_lang`` of ``tokenizer_config.json``, or English. ``with_language`` makes it another.
    """
    from tokenizers import AddedToken

    model, configs = read_pieces(path), ("tokenizer_config.json", "config.json")
    classes = [setting(path, "tokenizer_class", "", config) or "" for config in configs]
    fifty = any(name.startswith("MBart50") for name in classes)
    languages = _LANGUAGES + _MORE_LANGUAGES if fifty else _LANGUAGES
    if [piece.text for piece in model.pieces[:3]] != ["<unk>", "<s>", "</s>"]:
        raise CheckpointError(
            f"{path} begins with {model.pieces[0].text}; expected <unk>, <s>, </s>, as mBART's does."
        )
    first = ["<s>", "<pad>", "</s>", "<unk>"]
    vocabulary = [(text, 0.0) for text in first] + [(p.text, p.score) for p in model.pieces[3:]]
    vocabulary += [(text, 0.0) for text in [*languages, "<mask>"]]
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


def _unigram(
    model: SentencePieces, vocabulary: Vocabulary, unknown: int, special: Sequence[Any]
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
    return _template(backend, "$A </s>", "$A </s> $B </s>", ("</s>",))


def _template(backend: Any, single: str, pair: str, special: Sequence[str]) -> Any:
    from tokenizers import processors

    tokens = [(text, backend.token_to_id(text)) for text in special]
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=tokens
    )
    return backend


def _controls(model: SentencePieces) -> list[str]:
    unknown: Piece = model.pieces[model.unknown]
    return [piece.text for piece in model.pieces if piece.is_control] + [unknown.text]


def _count(path: Path, name: str, default: int) -> int:
    """How many tokens the config beside a file adds."""
    value = setting(path, name, default)
    if type(value) is not int or not 0 <= value <= _MOST:
        raise CheckpointError(
            f"{path.with_name('tokenizer_config.json')} has {name} {value!r}; expected 0 to {_MOST}."
        )
    return value


def setting(path: Path, name: str, default: Any, config: str = "tokenizer_config.json") -> Any:
    """From the config beside a file, if there is one."""
    beside = path.with_name(config)
    if not beside.is_file():
        return default
    return json.loads(beside.read_text(encoding="utf-8")).get(name, default)
