"""mBART's tokenizers, held to SentencePiece for the pieces and to transformers for ids and languages."""

import json

import pytest

from crossattn.weights import CheckpointError, with_language
from crossattn.weights.tokenizers.tokenizer import read_tokenizer
from tests.peers import package, peer
from tests.weights.test_tokenizer import SEEN, TEXTS, trained

package("sentencepiece", "test")

KINDS = {"mbart": ("MBartTokenizer", 25), "mbart50": ("MBart50Tokenizer", 52)}


@pytest.fixture(params=KINDS)
def folder(request, tmp_path):
    """Returns a folder, SentencePiece's own model, the name of the class, the number of languages."""
    name, languages = KINDS[request.param]
    pieces = trained(tmp_path / "sentencepiece.bpe.model")
    config = {"src_lang": "fr_XX"} | ({"tokenizer_class": name} if languages > 25 else {})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path, pieces, name, languages


def marked(ids, language, languages):
    """Returns the ids with language and end, in mBART's or mBART-50's order."""
    return [*ids, 2, language] if languages == 25 else [language, *ids, 2]


def test_pieces_are_sentencepieces_one_later_and_the_language_is_marked(folder):
    path, pieces, _, languages = folder
    ours = read_tokenizer(path, "mbart")
    assert ours.get_vocab_size() == len(pieces) + 1 + languages + 1
    unknown = pieces.unk_id()
    for text in SEEN:
        ids = [3 if i == unknown else i + 1 for i in pieces.encode(text)]
        french, german = (ours.token_to_id(name) for name in ("fr_XX", "de_DE"))
        assert ours.encode(text).ids == marked(ids, french, languages), text
        other = with_language(ours, "de_DE")
        assert other.encode(text).ids == marked(ids, german, languages), text
        assert ours.decode(ours.encode(text).ids) == pieces.decode(pieces.encode(text)).replace(
            " ⁇ ", ""
        )


@pytest.mark.filterwarnings("ignore")
def test_ids_are_those_of_transformers(folder):
    transformers = peer("transformers")
    path, _, name, _ = folder
    ours = read_tokenizer(path, "mbart")
    theirs = getattr(transformers, name).from_pretrained(
        str(path), src_lang="fr_XX", tgt_lang="ro_RO"
    )
    assert ours.get_vocab() == theirs.get_vocab()
    into = with_language(ours, "ro_RO")
    for text in [*TEXTS[:4], "noirest", "the <mask> mat"]:
        assert ours.encode(text).ids == theirs(text).input_ids, text
        assert into.encode(text).ids == theirs(text_target=text).input_ids, text
    pair = theirs("the cat", "le chat").input_ids
    assert ours.encode("the cat", "le chat").ids == pair


@pytest.mark.filterwarnings("ignore")
def test_the_language_of_a_tokenizer_json_can_be_another(folder):
    transformers = peer("transformers")
    path, _, name, _ = folder
    theirs = getattr(transformers, name).from_pretrained(str(path), src_lang="fr_XX")
    theirs.save_pretrained(path / "whole")
    ours = with_language(read_tokenizer(path / "whole", "mbart"), "hi_IN")
    theirs.src_lang = "hi_IN"
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text).input_ids


def test_languages_that_are_not_there_are_refused(folder):
    path, *_ = folder
    ours = read_tokenizer(path, "mbart")
    for language in ("xx_XX", "the"):
        with pytest.raises(ValueError, match=f"no language '{language}'; expected one of a.*zh_CN"):
            with_language(ours, language)
    (path / "tokenizer_config.json").write_text('{"src_lang": "tlh_KX"}')
    with pytest.raises(CheckpointError, match="src_lang 'tlh_KX'; expected one of ar_AR"):
        read_tokenizer(path, "mbart")
    (path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n")
    with pytest.raises(ValueError, match="marks no language"):
        with_language(read_tokenizer(path, "bert"), "fr_XX")


def test_a_vocabulary_of_another_family_is_refused(tmp_path):
    trained(tmp_path / "sentencepiece.bpe.model", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    with pytest.raises(CheckpointError, match="begins with <pad>; expected <unk>, <s>, </s>"):
        read_tokenizer(tmp_path, "mbart")
