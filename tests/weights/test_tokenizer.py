"""Tokenizers read from other files than tokenizer.json, held to the libraries that wrote them."""

import io
import json

import pytest

from crossattn.weights import CheckpointError
from crossattn.weights.tokenizers.tokenizer import read_tokenizer
from tests import whisper_vocabulary
from tests.peers import package, peer

sentencepiece = package("sentencepiece", "test")

TEXTS = [
    "the cat sat on the mat, the black cat",
    "le chat noir est assis sur le tapis",
    "the mat is black and the cat is not",
    "un chat, deux chats; a cat, two cats.",
    "Ünïcode ﬁnds ½ of the letters…",
]
SEEN = [*TEXTS, "  the   cat\tsat ", "noirest", "cat 雪 mat", "", "ﬁne…", "THE CAT"]


def trained(path, vocab_size=80, texts=TEXTS, **options):
    """Trains a model of SentencePiece, and returns its own tokenizer."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        vocab_size=vocab_size,
        minloglevel=2,
        hard_vocab_limit=False,
        **options,
    )
    path.write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


T5_IDS = dict(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)


@pytest.mark.parametrize("byte_fallback", [False, True], ids=["unknown", "bytes"])
def test_t5_cuts_text_as_sentencepiece_does(tmp_path, byte_fallback):
    size = 340 if byte_fallback else 80
    theirs = trained(tmp_path / "spiece.model", size, byte_fallback=byte_fallback, **T5_IDS)
    ours = read_tokenizer(tmp_path, "t5")
    for text in SEEN:
        ids = theirs.encode(text)
        assert ours.encode(text).ids == [*ids, 1], text
        assert ours.decode([*ids, 1]) == theirs.decode(ids).replace(" ⁇ ", "")
    whole = len(theirs)
    assert ours.get_vocab_size() == whole + 100
    spans = ours.encode("the <extra_id_0> sat <extra_id_1>").ids
    assert spans == [*theirs.encode("the"), whole + 99, *theirs.encode("sat"), whole + 98, 1]


def test_pegasus_has_103_ids_before_its_pieces(tmp_path):
    theirs = trained(tmp_path / "spiece.model", **T5_IDS)
    ours = read_tokenizer(tmp_path, "pegasus")
    for text in SEEN:
        assert ours.encode(text).ids == [i + 103 for i in theirs.encode(text)] + [1]
    first = [ours.id_to_token(i) for i in (0, 1, 2, 3, 4, 104)]
    assert first == "<pad> </s> <mask_1> <mask_2> <unk_2> <unk_102>".split()


def marian_files(folder):
    """Pieces of two languages under ids that they share, as OPUS models have them."""
    source = trained(folder / "source.spm", texts=[TEXTS[0], TEXTS[2]] * 3, vocab_size=40)
    target = trained(folder / "target.spm", texts=[TEXTS[1], TEXTS[3]] * 3, vocab_size=40)
    pieces = {
        model.id_to_piece(i)
        for model in (source, target)
        for i in range(len(model))
        if not model.is_control(i) and not model.is_unknown(i)
    }
    order = ["</s>", "<unk>", *sorted(pieces), ">>fra<<", "<pad>"]
    vocabulary = {text: i for i, text in enumerate(order)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    return vocabulary


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_marian_reads_the_source_as_transformers_does(tmp_path):
    transformers = peer("transformers")
    marian_files(tmp_path)
    theirs = transformers.MarianTokenizer(
        *(str(tmp_path / name) for name in ("source.spm", "target.spm", "vocab.json"))
    )
    ours = read_tokenizer(tmp_path, "marian")
    for text in [*TEXTS[:4:2], "the mat", "cat 雪 mat", ">>fra<< the cat", "  the   cat "]:
        assert ours.encode(text).ids == theirs(text).input_ids, text
    french = theirs(text_target="le chat noir").input_ids
    assert ours.decode(french) == theirs.decode(french, skip_special_tokens=True)


def test_marian_numbers_pieces_by_its_vocabulary(tmp_path):
    vocabulary = marian_files(tmp_path)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "source.spm"))
    ours = read_tokenizer(tmp_path, "marian")
    pieces = theirs.encode("the black cat is not on the mat", out_type=str)
    expected = [vocabulary[piece] for piece in pieces]
    assert ours.encode("the black cat is not on the mat").ids == [*expected, vocabulary["</s>"]]
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary | {"the": 7}))
    with pytest.raises(CheckpointError, match="does not number its tokens from 0 on, each once"):
        read_tokenizer(tmp_path, "marian")


def byte_level_files(folder, special):
    from tokenizers import ByteLevelBPETokenizer

    made = ByteLevelBPETokenizer()
    made.train_from_iterator(TEXTS, vocab_size=300, special_tokens=special, show_progress=False)
    made.save_model(str(folder))


@pytest.mark.parametrize(
    "kind, name, special",
    [
        ("gpt2", "GPT2Tokenizer", ["<|endoftext|>"]),
        ("bart", "BartTokenizer", ["<mask>", "<s>", "<pad>", "<unk>", "</s>"]),
    ],
)
def test_byte_pairs_are_cut_as_transformers_cuts_them(tmp_path, kind, name, special):
    transformers = peer("transformers")
    byte_level_files(tmp_path, special)
    theirs = getattr(transformers, name).from_pretrained(str(tmp_path))
    ours = read_tokenizer(tmp_path, kind)
    for text in [*SEEN, f"the cat {special[-1]} the mat"]:
        assert ours.encode(text).ids == theirs(text).input_ids, text
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ours.decode(ids, False) == theirs.decode(ids, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("lower", [True, False])
def test_bert_cuts_words_as_transformers_does(tmp_path, lower):
    transformers = peer("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "mat", ",", "."]
    words += ["u", "##n", "##ni", "##co", "##de", "T", "##HE", "雪", "black", "U"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lower}))
    theirs = transformers.BertTokenizer.from_pretrained(str(tmp_path))
    ours = read_tokenizer(tmp_path, "bert")
    for text in [*SEEN, "the [MASK] mat", "THE cats"]:
        assert ours.encode(text).ids == theirs(text).input_ids, text
    assert ours.encode("the cat", "cats").ids == theirs("the cat", "cats").input_ids


def test_pieces_of_another_kind_than_unigram_are_refused(tmp_path):
    trained(tmp_path / "spiece.model", model_type="bpe", **T5_IDS)
    with pytest.raises(CheckpointError, match="another kind than unigram"):
        read_tokenizer(tmp_path, "t5")


@pytest.mark.parametrize(
    "kind, expected", [("t5", "spiece.model"), ("marian", "source.spm and vocab.json")]
)
def test_a_vocabulary_that_is_not_understood_is_named(tmp_path, kind, expected):
    assert read_tokenizer(tmp_path, kind) is None
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.warns(UserWarning, match=f"merges.txt, vocab.json, .* {kind} .* {expected}"):
        assert read_tokenizer(tmp_path, kind) is None


def test_whisper_in_two_files_is_whisper_in_one(tmp_path):
    whisper_vocabulary.save_apart(tmp_path)
    ours, theirs = read_tokenizer(tmp_path, "whisper"), whisper_vocabulary.backend()
    assert ours.get_vocab() == theirs.get_vocab()
    for text in ("<|startoftranscript|><|en|> Grüße, 你好!<|endoftext|>", *SEEN):
        ids = theirs.encode(text).ids
        assert ours.encode(text, add_special_tokens=False).ids == ids
        assert ours.decode(ids) == theirs.decode(ids)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|endoftext|>": 300}))
    match = r"added_tokens\.json does not go on where vocab\.json"
    with pytest.raises(CheckpointError, match=match):
        read_tokenizer(tmp_path, "whisper")
