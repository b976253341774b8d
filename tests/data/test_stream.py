"""Streams: every line once a round, whoever reads them, and on from a state as if never stopped."""

import json
import time
from collections import Counter

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from crossattn.data import sources, stream, tokenizers
from crossattn.data.encoded import Encoding
from crossattn.data.errors import DataError

PAIRS = [(e["source"], e["target"]) for e in sources.open_source("phrases", "train")[:600]]
WINDOW = 512


@pytest.fixture(scope="module")
def encoding():
    tokenizer = tokenizers.train_tokenizer([text for pair in PAIRS for text in pair], 300)
    return Encoding(tokenizer, source_len=48, target_len=64)


def line(pair):
    return json.dumps({"source": pair[0], "target": pair[1]})


def write(path, pairs, end="\n"):
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(line, pairs)) + end)
        return
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for pair in pairs:
        writer.write(line(pair).encode())
    writer.close()


@pytest.fixture(params=["jsonl", "array_record"])
def pattern(request, tmp_path):
    """Three shards of the pairs, of unlike sizes."""
    for number, (start, stop) in enumerate([(0, 250), (250, 257), (257, 600)]):
        write(tmp_path / f"train-{number}.{request.param}", PAIRS[start:stop])
    return f"{tmp_path}/{{split}}-*.{request.param}"


def batches(pattern, encoding, at_end="repeat", lanes=None, **options):
    given = {"batch_size": 8, "window": WINDOW} | options
    return stream.stream_batches(
        stream.Stream.named(pattern, at_end=at_end, lanes=lanes), encoding, **given
    )


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def texts(batch, encoding):
    """(source, target) of every segment."""
    decode = encoding.tokenizer.decode
    for row in range(len(batch["target_in"])):
        for segment in range(1, batch["target_segment_ids"][row].max() + 1):
            source = batch["source"][row][batch["source_segment_ids"][row] == segment]
            target = batch["target_out"][row][batch["target_segment_ids"][row] == segment]
            yield decode(source), decode(target)


def assert_same(left, right):
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


def test_every_line_comes_as_often_as_any_other(pattern, encoding):
    iterator, found = batches(pattern, encoding), Counter()
    for batch in take(iterator, 500):
        assert batch["target_in"].shape == (8, 64) and batch["source"].dtype == np.int32
        found.update(texts(batch, encoding))
    assert found.keys() == set(PAIRS)
    # Windows are shuffled as a whole, so a line is at most a window ahead of another.
    assert max(found.values()) - min(found.values()) <= 2


def test_processes_share_the_batches_of_one_and_another_number_goes_on(pattern, encoding):
    def together(count):
        return [
            batches(pattern, encoding, process_index=i, process_count=count) for i in range(count)
        ]

    def joined(iterators, steps):
        every = [[next(iterator) for iterator in iterators] for _ in range(steps)]
        return [{k: np.concatenate([part[k] for part in step]) for k in step[0]} for step in every]

    one, several = together(1), together(4)
    assert_same(joined(one, 30), joined(several, 30))
    states = [iterator.get_state() for iterator in several]
    whole = states[0] | {"lanes": {k: v for state in states for k, v in state["lanes"].items()}}
    assert whole == one[0].get_state()
    again = together(1)
    again[0].set_state(json.loads(json.dumps(whole)))
    assert_same(joined(one, 30), joined(again, 30))


@pytest.mark.parametrize(("before", "prefetch"), [(0, 2), (1, 0), (40, 2)])
def test_a_restored_stream_continues_bit_for_bit(pattern, encoding, prefetch, before):
    first = batches(pattern, encoding, prefetch=prefetch)
    take(first, before)
    state = json.loads(json.dumps(first.get_state()))
    second = batches(pattern, encoding, prefetch=prefetch)
    take(second, 5)
    second.set_state(state)
    assert second.get_state() == state
    assert_same(take(first, 30), take(second, 30))


def test_a_state_is_a_few_numbers_a_lane(pattern, encoding):
    iterator = batches(pattern, encoding, lanes=2)
    take(iterator, 60)
    lanes = iterator.get_state()["lanes"]
    assert list(lanes) == ["0", "1"] and len(json.dumps(lanes)) < 2 * 200


def test_lines_and_shards_that_come_while_training_are_read(tmp_path, encoding):
    path = tmp_path / "a.jsonl"
    write(path, PAIRS[:303], end="\n" + line(PAIRS[303])[:20])  # of which half a line is there
    iterator = batches(
        f"{tmp_path}/*.jsonl", encoding, at_end="wait", batch_size=2, window=1, prefetch=1
    )
    found = Counter()

    def read(upto):
        while len(found) < upto:
            found.update(texts(next(iterator), encoding))

    read(200)
    with path.open("a") as file:
        file.write(line(PAIRS[303])[20:] + "\n")
    write(tmp_path / "b.jsonl", PAIRS[304:])
    read(500)
    assert PAIRS[303] in found and set(found.values()) == {1}
    iterator.close()


def test_one_that_waits_is_closed_at_once(tmp_path, encoding, caplog):
    write(tmp_path / "a.jsonl", PAIRS[:10])
    iterator = batches(f"{tmp_path}/*.jsonl", encoding, at_end="wait")
    iterator._iterator.start_prefetch()
    while "waiting for more of stream:" not in caplog.text:
        time.sleep(0.01)
    start = time.monotonic()
    iterator.close()
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("size", [1, 3, 7])
def test_fewer_lines_than_lanes_are_dealt_to_all(tmp_path, encoding, size):
    write(tmp_path / "train.jsonl", PAIRS[:size])
    iterator = batches(f"{tmp_path}/{{split}}.jsonl", encoding, batch_size=8, window=8)
    found = Counter()
    for batch in take(iterator, 20):
        found.update(texts(batch, encoding))
    assert found.keys() == set(PAIRS[:size])


def test_a_last_line_without_a_line_feed_counts_when_another_shard_is_there(tmp_path, encoding):
    write(tmp_path / "train-0.jsonl", PAIRS[:50], end="")
    write(tmp_path / "train-1.jsonl", PAIRS[50:100], end="")
    iterator, found = batches(f"{tmp_path}/{{split}}-*.jsonl", encoding), Counter()
    for batch in take(iterator, 500):
        found.update(texts(batch, encoding))
    assert found.keys() == set(PAIRS[:99])


def test_what_is_held_out_is_not_trained_on(tmp_path, encoding):
    write(tmp_path / "a.jsonl", PAIRS[:200])
    write(tmp_path / "b.jsonl", PAIRS[200:300])
    name = f"stream:{tmp_path}/*.jsonl"
    held = {
        split: [(e["source"], e["target"]) for e in sources.open_source(name, split)]
        for split in ("train", "validation", "test")
    }
    assert held["test"] == PAIRS[0:200:20] and held["validation"] == PAIRS[1:200:20]
    assert sorted(sum(held.values(), [])) == sorted(PAIRS[:300])
    found = Counter()
    for batch in take(batches(f"{tmp_path}/*.jsonl", encoding), 300):
        found.update(texts(batch, encoding))
    assert found.keys() == set(held["train"])


def test_splits_may_have_shards_of_their_own(pattern, tmp_path):
    suffix = pattern.rpartition(".")[2]
    write(tmp_path / f"validation-0.{suffix}", PAIRS[:30], end="")
    found = sources.open_source(f"stream:{pattern}", "validation", reverse=True)
    assert [(e["target"], e["source"]) for e in found] == PAIRS[:30]


def test_a_state_of_another_stream_is_refused(pattern, encoding, tmp_path):
    iterator = batches(pattern, encoding)
    state = iterator.get_state()
    for other in (
        batches(pattern, encoding, seed=1),
        batches(pattern, encoding, batch_size=4),
        batches(pattern, encoding, lanes=4),
    ):
        with pytest.raises(DataError, match="belongs to other data"):
            other.set_state(state)
    part = batches(pattern, encoding, process_index=1, process_count=2).get_state()
    with pytest.raises(DataError, match="lacks lane 0"):
        iterator.set_state(part)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_shards_that_are_gone_or_shorter_are_told_of(tmp_path, encoding, prefetch):
    path = tmp_path / "train-0.jsonl"
    write(path, PAIRS)
    first = batches(f"{tmp_path}/{{split}}-*.jsonl", encoding)
    take(first, 30)
    state = first.get_state()
    for content, complaint in (("{}\n", "shorter than it was"), (None, "cannot be read: No such")):
        path.unlink() if content is None else path.write_text(content)
        write(tmp_path / "train-1.jsonl", PAIRS)
        second = batches(f"{tmp_path}/{{split}}-*.jsonl", encoding, prefetch=prefetch)
        with pytest.raises(DataError, match=complaint):
            second.set_state(state)
            take(second, 3)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "a.jsonl, line 7: not JSON"),
        ('{"source": "x"}', "a.jsonl, line 7: no text under the key 'target'"),
        ('{"source": " ", "target": "y"}', "a.jsonl, line 7: the source text is empty"),
        (b"\xff", "a.jsonl, line 7: not UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path, encoding, content, complaint):
    raw = content if isinstance(content, bytes) else content.encode()
    good = line(PAIRS[0]).encode() + b"\n"
    (tmp_path / "a.jsonl").write_bytes(good * 6 + raw + b"\n" + good * 6)
    with pytest.raises(DataError, match=complaint):
        next(batches(f"{tmp_path}/*.jsonl", encoding, batch_size=1))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"lanes": 3}, "lanes is 3; expected a divisor of batch_size, 8"),
        ({"lanes": 1, "process_count": 2}, "a multiple of the number of processes, 2"),
        (
            {"batch_size": 6, "process_count": 4},
            "batch_size is 6; expected a positive multiple of 4",
        ),
        ({"at_end": "stop"}, "at_end is 'stop'"),
    ],
)
def test_bad_options_are_refused(pattern, encoding, options, complaint):
    with pytest.raises(DataError, match=complaint):
        batches(pattern, encoding, **options)


def test_what_is_no_stream_is_refused_in_one_line(tmp_path, encoding):
    with pytest.raises(DataError, match="has no shards yet; at_end 'wait' waits"):
        batches(f"{tmp_path}/*.jsonl", encoding)
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="has no examples to train on"):
        next(batches(f"{tmp_path}/*.jsonl", encoding))
    with pytest.raises(DataError, match="has no validation examples"):
        sources.open_source(f"stream:{tmp_path}/*.jsonl", "validation")
    (tmp_path / "a.array_record").write_bytes(b"half of one")
    with pytest.raises(DataError, match="a.array_record is no whole ArrayRecord file") as caught:
        next(batches(f"{tmp_path}/*.array_record", encoding))
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="is no shard of a stream"):
        (tmp_path / "a.txt").write_text("")
        batches(f"{tmp_path}/*", encoding)
    with pytest.raises(DataError, match="stream takes .*lanes; colour was given"):
        sources.open_source(f"stream:{tmp_path}/*.jsonl", colour=1)
