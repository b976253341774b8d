"""Tokenizers of published checkpoints, and what they put around a text."""

import pickle

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from crossattn.data.features import Text
from crossattn.data.prepared import prepare_examples
from crossattn.data.published_tokenizer import PublishedTokenizer, frame_of
from crossattn.data.tokenizers import BOS, EOS, Frame, train_tokenizer

WORDS = ("<s>", "</s>", "xx", "a", "cat", "sat", "[UNK]")


@pytest.fixture
def backend():
    """Whole words, framed as `<s> text </s> xx`, cut to three tokens and filled up to ten."""
    ids = {word: id for id, word in enumerate(WORDS)}
    backend = Backend(models.WordLevel(ids, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "</s>", "xx"])
    special = [("<s>", 0), ("</s>", 1), ("xx", 2)]
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s> xx", special_tokens=special
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=10)
    return backend


@pytest.fixture
def published(backend):
    return PublishedTokenizer(backend, Frame(9, (0,), (1, 2)))


@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_a_frame_is_what_the_tokenizer_puts_around_a_text(backend, padding):
    backend.no_truncation()
    backend.no_padding()
    if padding:
        backend.enable_padding(length=10, direction=padding, pad_id=1, pad_token="</s>")
    assert frame_of(backend) == ((0,), (1, 2))
    assert len(Frame(9, (0,), (1, 2))) == 3


def test_texts_are_neither_cut_nor_filled_up_by_the_tokenizer_itself(published):
    assert published.encode("a cat sat a cat") == [3, 4, 5, 3, 4]
    assert published.encode_batch(["a", "a cat"]) == [[3], [3, 4]]


def test_what_is_read_keeps_its_end_and_what_is_predicted_loses_it(published):
    read, predicted = Text(published, 5), Text(published, 5, predicted=True)
    assert read.prepare("a cat sat").tolist() == [0, 3, 4, 1, 2]
    assert predicted.prepare("a cat").tolist() == [9, 0, 3, 4, 1, 2]
    assert predicted.prepare("a cat sat").tolist() == [9, 0, 3, 4, 5, 1]
    assert read.lengths(["a cat sat"]).tolist() == [6]


@pytest.mark.parametrize(("cat", "start"), [(70_000, 0), (2, 70_000)])
def test_ids_beyond_the_size_of_a_vocabulary_with_gaps_are_kept(cat, start):
    backend = Backend(models.WordLevel({"a": 0, "</s>": 1, "cat": cat}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    target = Text(PublishedTokenizer(backend, Frame(start, (), (1,))), 5, predicted=True)
    kept = prepare_examples([{"target": "a cat"}], {"target": target})
    assert kept.values(np.array([0]))["target"][0].tolist() == [start, 0, cat, 1]


def test_what_stands_behind_the_end_is_no_text(published):
    assert published.decode([0, 3, 4, 1, 2, 5, 5]) == "a cat"
    assert published.tokens([0, 3, 1]) == ["<s>", "a", "</s>"]
    ids, spans = published.encode_with_spans("a  cat")
    assert ids == [3, 4] and spans.tolist() == [[0, 1], [3, 6]]


def test_another_process_is_given_the_same_tokenizer_as_one_that_was_trained_here(published):
    again = pickle.loads(pickle.dumps(published))
    assert again == published and again.frame == published.frame
    ours = train_tokenizer(["a cat sat"] * 4, 300)
    assert pickle.loads(pickle.dumps(ours)) == ours != published
    assert ours.frame == Frame(BOS, (), (EOS,))
