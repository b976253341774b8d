"""Batches from text alone: nothing of the stream is lost, whoever reads it, and states resume bit for bit."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossattn.data import denoising, pairs, prepared, sources, tokenizers
from crossattn.data.corruption import PrefixLM, SpanCorruption
from crossattn.data.errors import DataError

from .batches import joined, same, take

BOS, EOS = 1, 2


def whole(examples, tokenizer):
    features = pairs.pair_features(tokenizer, target_len=pairs.ANY_LENGTH, side="source")
    return prepared.prepare_examples(pairs.pair_examples(examples, "source"), features)


def chunks_of(rows, longest):
    lengths = np.array([len(row) - 1 for row in rows])
    return denoising.Chunks(lengths, lambda row: np.array(rows[row]), longest)


@pytest.fixture(scope="module")
def examples():
    return sources.open_source("phrases", "train")[:400]


@pytest.fixture(scope="module")
def tokenizer(examples):
    return tokenizers.train_tokenizer([e["source"] for e in examples], 300)


@pytest.fixture(scope="module")
def texts(examples, tokenizer):
    return whole(examples, tokenizer)


@pytest.fixture(scope="module")
def stream(examples, tokenizer):
    """All tokens of the texts, joined by an independent loop."""
    return [i for e in examples for i in (BOS, *tokenizer.encode(e["source"]))]


@pytest.fixture(params=["spans", "prefix"])
def objective(request, tokenizer):
    if request.param == "prefix":
        return PrefixLM(40, 40)
    return SpanCorruption(40, 20, vocab_size=tokenizer.vocab_size, sentinels=10)


def train(texts, objective, **options):
    return denoising.make_denoising_iterator(texts, objective, **({"batch_size": 4} | options))


def texts_of(batch, objective):
    """The text of every segment, put together again; source, target_in and target_out must agree."""
    found = []
    for row in range(len(batch["source"])):
        for segment in range(1, batch["source_segment_ids"][row].max() + 1):
            there = batch["source_segment_ids"][row] == segment
            at = batch["target_segment_ids"][row] == segment
            source, read, said = (
                batch[name][row, where]
                for name, where in (("source", there), ("target_in", at), ("target_out", at))
            )
            assert batch["source_positions"][row, there].tolist() == list(range(len(source)))
            assert batch["target_positions"][row, at].tolist() == list(range(len(said)))
            assert read[0] == BOS and read[1:].tolist() == said[:-1].tolist()
            assert source[-1] == said[-1] == EOS
            assert EOS not in source[:-1] and EOS not in said[:-1]
            found.append(objective.filled(source, said).tolist())
    return found


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.integers(4, 25))
def test_chunks_are_the_stream_cut_evenly(lengths, longest):
    rows = [[BOS, *(100 * i + j for j in range(n)), EOS] for i, n in enumerate(lengths)]
    chunks = chunks_of(rows, longest)
    pieces = [chunks[i] for i in range(len(chunks))]
    assert np.concatenate(pieces).tolist() == [t for row in rows for t in row[:-1]]
    sizes = set(map(len, pieces))
    assert max(sizes) <= longest and max(sizes) - min(sizes) <= 1
    assert len(pieces) == -(-sum(n + 1 for n in lengths) // longest)


def test_chunks_reach_over_blocks_of_texts(monkeypatch):
    monkeypatch.setattr(denoising, "_BLOCK", 3)
    rows = [[BOS, *range(10, 10 + i % 4), EOS] for i in range(20)]
    chunks = chunks_of(rows, 9)
    joined = np.concatenate([chunks[i] for i in range(len(chunks))])
    assert joined.tolist() == [t for row in rows for t in row[:-1]]


def test_an_epoch_holds_the_whole_stream_once(texts, objective, stream):
    chunks = denoising._chunks(texts, objective)
    wanted = Counter(tuple(chunks[i].tolist()) for i in range(len(chunks)))
    assert sum(len(chunk) * count for chunk, count in wanted.items()) == len(stream)
    iterator, found = train(texts, objective), []
    while len(found) < len(chunks):
        found += map(tuple, texts_of(next(iterator), objective))
    assert Counter(found[: len(chunks)]) == wanted
    assert found[: len(chunks)] != list(wanted)  # it is shuffled


def test_batches_are_int32_of_one_shape_and_full(texts, objective):
    batches = take(train(texts, objective), 30)
    for batch in batches:
        assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}
        assert batch["source"].shape == (4, objective.source_len)
        assert batch["target_in"].shape == batch["target_out"].shape == (4, objective.target_len)
        for name, array in batch.items():
            assert (array[batch[f"{name.split('_')[0]}_segment_ids"] == 0] == 0).all()
    assert np.mean([(batch["source_segment_ids"] > 0).mean() for batch in batches]) > 0.95


@pytest.mark.quick(4)
@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("before", [0, 1, 57])
def test_a_restored_iterator_continues_bit_for_bit(texts, objective, prefetch, before):
    first = train(texts, objective, prefetch=prefetch)
    take(first, before)
    state = json.loads(json.dumps(first.get_state()))
    following = take(first, 60)
    second = train(texts, objective, prefetch=2)
    take(second, 5)
    second.set_state(state)
    assert second.get_state() == state and same(take(second, 60), following)


@pytest.mark.parametrize("count", [2, 4])
def test_another_number_of_processes_goes_on_with_the_same_batches(texts, objective, count):
    one = train(texts, objective)
    parts = [train(texts, objective, process_index=i, process_count=count) for i in range(count)]
    assert same(joined(parts, 9), take(one, 9))
    for iterator in parts:
        iterator.set_state(one.get_state())
    assert same(joined(parts, 20), take(one, 20))


@pytest.mark.quick(1)
def test_every_epoch_has_noise_of_its_own(texts, objective):
    iterator, chunks = train(texts, objective), denoising._chunks(texts, objective)
    sources: dict[tuple, set] = {}
    for batch in take(iterator, 3 * len(chunks)):
        for row in range(4):
            there = batch["source_segment_ids"][row] == 1
            at = batch["target_segment_ids"][row] == 1
            source, said = batch["source"][row, there], batch["target_out"][row, at]
            text = tuple(objective.filled(source, said).tolist())
            sources.setdefault(text, set()).add(tuple(source.tolist()))
    assert np.mean([len(each) for each in sources.values()]) > 4


def test_a_state_of_other_data_or_another_objective_is_refused(
    texts, objective, examples, tokenizer
):
    state = train(texts, objective).get_state()
    fewer = whole(examples[:300], tokenizer)
    for other in (
        train(texts, objective, seed=1),
        train(texts, objective, batch_size=8),
        train(fewer, objective),
        train(texts, PrefixLM(48, 48)),
    ):
        with pytest.raises(DataError, match="belongs to other data"):
            other.set_state(state)


def test_evaluation_holds_every_chunk_once_under_the_same_noise(texts, objective, stream):
    batches = list(denoising.denoising_eval_batches(texts, objective, batch_size=4))
    read = [text for item in batches for text in texts_of(item.batch, objective)]
    assert [token for text in read for token in text] == stream
    again = denoising.denoising_eval_batches(texts, objective, batch_size=4)
    assert same([item.batch for item in again], [item.batch for item in batches])
    wider = denoising.denoising_eval_batches(texts, objective, batch_size=8)
    sources = [
        np.concatenate([item.batch["source"] for item in found]) for found in (batches, wider)
    ]
    real = len(texts_of(batches[-1].batch, objective))
    rows = sum((item.indices >= 0).sum() for item in batches)
    assert real and np.array_equal(sources[1][:rows], sources[0][:rows])


def test_rows_that_do_not_divide_are_refused(texts, objective):
    with pytest.raises(DataError, match="batch_size is 4; expected a positive multiple of 3 "):
        train(texts, objective, process_count=3)
