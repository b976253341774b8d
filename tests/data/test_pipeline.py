"""Batches: static shapes, nothing lost or mixed up, and a state that resumes bit for bit."""

import json
from collections import Counter

import numpy as np
import pytest

from crossattn.data import packing, pipeline, sources, tokenizers
from crossattn.data.errors import DataError

from .batches import joined, same, take

SHAPE = {"batch_size": 8, "source_len": 32, "target_len": 40}


@pytest.fixture(scope="module")
def pairs():
    return sources.open_source("phrases", "train")[:900]


@pytest.fixture(scope="module")
def tokenizer(pairs):
    return tokenizers.train_tokenizer([p[s] for p in pairs for s in ("source", "target")], 400)


def train(pairs, tokenizer, **options):
    return pipeline.make_train_iterator(pairs, tokenizer, **(SHAPE | options))


def examples_of(batch) -> list[tuple[tuple, tuple, tuple]]:
    """(source, target_in, target_out) of every segment, read back by an independent loop."""
    found = []
    for row in range(len(batch["target_in"])):
        for segment in range(1, batch["target_segment_ids"][row].max() + 1):
            at = np.flatnonzero(batch["target_segment_ids"][row] == segment)
            assert batch["target_positions"][row, at].tolist() == list(range(len(at)))
            source = ()
            if "source" in batch:
                there = np.flatnonzero(batch["source_segment_ids"][row] == segment)
                assert batch["source_positions"][row, there].tolist() == list(range(len(there)))
                source = tuple(batch["source"][row, there].tolist())
            out = tuple(batch["target_out"][row, at].tolist())
            found.append((source, tuple(batch["target_in"][row, at].tolist()), out))
    return found


def expected(pairs, tokenizer) -> Counter:
    out = Counter()
    for pair in pairs:
        source, target = (tokenizer.encode(pair[side]) for side in ("source", "target"))
        out[tuple(source + [2]), tuple([1] + target), tuple(target + [2])] += 1
    return out


@pytest.mark.parametrize("mode", ["pack", "bucket"])
def test_an_epoch_holds_every_pair_once_and_intact(pairs, tokenizer, mode):
    iterator = train(pairs, tokenizer, mode=mode)
    wanted, found = expected(pairs, tokenizer), Counter()
    while sum(found.values()) < len(pairs):
        found.update(examples_of(next(iterator)))
    assert found == wanted


@pytest.mark.parametrize("mode", ["pack", "bucket"])
def test_batches_are_int32_of_few_static_shapes(pairs, tokenizer, mode):
    batches = take(train(pairs, tokenizer, mode=mode), 120)
    assert {a.dtype for b in batches for a in b.values()} == {np.dtype(np.int32)}
    for batch in batches:
        for name, array in batch.items():
            assert (array[batch[f"{name.split('_')[0]}_segment_ids"] == 0] == 0).all()
    shapes = {(b["source"].shape, b["target_in"].shape) for b in batches}
    if mode == "pack":
        assert shapes == {((8, 32), (8, 40))}
    else:
        assert 2 <= len(shapes) <= 8
        for _, (rows, width) in shapes:
            assert 0.6 * 8 * 40 <= rows * width <= 8 * 40


def test_packing_leaves_little_padding(pairs, tokenizer):
    batches = take(train(pairs, tokenizer, target_len=64, source_len=64), 100)
    assert np.mean([(b["target_segment_ids"] > 0).mean() for b in batches]) > 0.93


@pytest.mark.quick(4)
@pytest.mark.parametrize("mode", ["pack", "bucket"])
@pytest.mark.parametrize(("prefetch", "link_share"), [(0, 0.0), (3, 0.5)])
@pytest.mark.parametrize("before", [0, 1, 37])
def test_a_restored_iterator_continues_bit_for_bit(
    pairs, tokenizer, mode, prefetch, link_share, before
):
    options = {"mode": mode, "prefetch": prefetch, "link_share": link_share, "window": 200}
    first = train(pairs, tokenizer, **options)
    take(first, before)
    state = json.loads(json.dumps(first.get_state()))
    following = take(first, 60)
    second = train(pairs, tokenizer, **options)
    take(second, 5)
    second.set_state(state)
    assert second.get_state() == state
    assert same(take(second, 60), following)


def test_the_state_does_not_depend_on_prefetching(pairs, tokenizer):
    states = []
    for prefetch in (0, 4):
        iterator = train(pairs, tokenizer, prefetch=prefetch)
        take(iterator, 11)
        states.append(iterator.get_state())
    assert states[0] == states[1]


def test_a_state_of_other_data_or_options_is_refused(pairs, tokenizer):
    state = train(pairs, tokenizer).get_state()
    for other in (
        train(pairs, tokenizer, seed=1),
        train(pairs[:800], tokenizer),
        train(pairs, tokenizer, batch_size=4),
        train(pairs, tokenizer, mode="bucket"),
        train(pairs, tokenizer, link_share=0.5),
    ):
        with pytest.raises(DataError, match="belongs to other data"):
            other.set_state(state)


def test_buckets_come_in_one_order_by_any_seed_and_in_another_the_next_epoch(pairs, tokenizer):
    """Seeds that are trained as one program then have batches of one shape at each step."""

    def shapes(batches):
        return [batch["source"].shape + batch["target_in"].shape for batch in batches]

    found = []
    for seed in range(3):
        iterator = train(pairs, tokenizer, mode="bucket", seed=seed, batch_size=4)
        first, seen = [], 0
        while seen < iterator.examples:
            first.append(next(iterator))
            seen += first[-1]["target_segment_ids"].any(1).sum()
        assert seen == iterator.examples
        found.append((shapes(first), shapes(take(iterator, len(first)))))
    first, second = found[0]
    assert len(set(first)) > 2 and sorted(first) == sorted(second) and first != second
    assert found[1] == found[2] == found[0]


def test_order_follows_the_seed(pairs, tokenizer):
    first = take(train(pairs, tokenizer), 20)
    assert same(first, take(train(pairs, tokenizer), 20))
    assert not same(first, take(train(pairs, tokenizer, seed=1), 20))
    begun = (examples_of(next(train(pairs, tokenizer, mode="pad", seed=s))) for s in (0, 1))
    assert len(set(map(frozenset, begun))) == 2  # other examples, not the same in another order


def test_every_epoch_has_an_order_of_its_own(pairs, tokenizer):
    iterator = train(pairs, tokenizer)
    epochs = []
    for _ in range(2):
        epochs.append([])
        while len(epochs[-1]) < len(pairs):
            epochs[-1] += examples_of(next(iterator))
    assert Counter(epochs[0]) == Counter(epochs[1]) and epochs[0] != epochs[1]


@pytest.mark.quick(2)
@pytest.mark.parametrize(("mode", "share"), [("pack", 0.0), ("pack", 1.0), ("bucket", 0.0)])
@pytest.mark.parametrize("count", [2, 4])
def test_processes_share_the_batch_that_one_would_see(pairs, tokenizer, mode, share, count):
    options = {"mode": mode, "batch_multiple": 4, "link_share": share}
    whole = take(train(pairs, tokenizer, **options), 25)
    parts = [
        train(pairs, tokenizer, process_index=i, process_count=count, **options)
        for i in range(count)
    ]
    assert same(joined(parts, 25), whole)


@pytest.mark.parametrize("mode", ["pack", "bucket"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4), (4, 1)])
def test_another_number_of_processes_goes_on_with_the_same_batches(
    pairs, tokenizer, mode, before, after
):
    def together(count, **options):
        return [
            train(pairs, tokenizer, mode=mode, process_index=i, process_count=count, **options)
            for i in range(count)
        ]

    first, second = together(before), together(after, batch_multiple=8)
    joined(first, 9)
    (state, *others) = [iterator.get_state() for iterator in first]
    assert all(other == state for other in others)
    for iterator in second:
        iterator.set_state(json.loads(json.dumps(state)))
    for mine, theirs in zip(joined(first, 20), joined(second, 20), strict=True):
        for name in mine:
            rows = min(len(mine[name]), len(theirs[name]))
            assert np.array_equal(mine[name][:rows], theirs[name][:rows])
            assert not mine[name][rows:].any() and not theirs[name][rows:].any()
            assert len(theirs[name]) % 8 == 0


def test_a_small_source_repeats_for_ever(pairs, tokenizer):
    found = Counter()
    for batch in take(train(pairs[:3], tokenizer), 20):
        found.update(examples_of(batch))
    assert len(found) == 3 and set(found.values()) == {20}


def test_overlong_pairs_are_dropped_or_cut_and_counted(pairs, tokenizer, caplog):
    limits = {"source_len": 8, "target_len": 9}
    sizes = [[len(tokenizer.encode(p[s])) + 1 for s in ("source", "target")] for p in pairs]
    long = sum(s > 8 or t > 9 for s, t in sizes)
    dropping = train(pairs, tokenizer, **limits)
    assert (dropping.dropped, dropping.cut["source"]) == (long, 0) and 0 < long < len(pairs)
    assert dropping.examples == len(pairs) - long
    said = f"dropped {long} of {len(pairs)} examples longer than source 8, target 9"
    assert said in caplog.text
    cutting = train(pairs, tokenizer, truncation="cut", **limits)
    assert cutting.dropped == 0
    assert cutting.cut["source"] == sum(s > 8 for s, _ in sizes)
    assert cutting.cut["target"] == sum(t > 9 for _, t in sizes)
    for source, target_in, target_out in examples_of(next(cutting)):
        assert source[-1] == 2 and len(source) <= 8
        assert target_in[0] == 1 and target_in[1:] == target_out[:-1] and len(target_out) <= 9


@pytest.mark.parametrize("mode", ["pack", "bucket"])
@pytest.mark.parametrize("side", ["source", "target"])
def test_language_model_batches_hold_one_side_as_target(pairs, tokenizer, mode, side):
    iterator = train(pairs, tokenizer, side=side, mode=mode)
    wanted = {tuple(tokenizer.encode(p[side]) + [2]) for p in pairs}
    for batch in take(iterator, 10):
        assert all(name.startswith("target_") for name in batch)
        assert {out for _, _, out in examples_of(batch)} <= wanted


def test_each_side_may_have_its_own_tokenizer(pairs, tokenizer):
    other = tokenizers.train_tokenizer([p["target"] for p in pairs], 300)
    iterator = train(pairs, tokenizer, target_tokenizer=other)
    texts = {(p["source"], p["target"]) for p in pairs}
    for source, _, out in examples_of(next(iterator)):
        assert (tokenizer.decode(source), other.decode(out)) in texts


def test_evaluation_batches_hold_every_example_once_in_few_shapes(pairs, tokenizer):
    evaluation = pipeline.eval_batches(pairs, tokenizer, **SHAPE)
    indices = np.concatenate([item.indices for item in evaluation])
    assert sorted(indices[indices >= 0]) == list(range(len(pairs)))
    assert len(evaluation.shapes) <= 8
    for item in evaluation:
        for row, index in enumerate(item.indices):
            text = pairs[index]["source"] if index >= 0 else ""
            assert tokenizer.decode(item.batch["source"][row]) == text
    widths = [item.batch["source"].shape[1] for item in evaluation]
    assert widths == sorted(widths)


def test_evaluation_cuts_long_texts_and_counts_them(pairs, tokenizer, caplog):
    evaluation = pipeline.eval_batches(pairs, tokenizer, batch_size=8, source_len=8, target_len=9)
    long = sum(len(tokenizer.encode(p["source"])) + 1 > 8 for p in pairs)
    assert evaluation.examples == len(pairs) and evaluation.cut["source"] == long > 0
    assert f"cut {long} sources" in caplog.text


def test_evaluation_rows_are_shared_by_processes(pairs, tokenizer):
    options = SHAPE | {"batch_multiple": 2}
    whole = pipeline.eval_batches(pairs, tokenizer, **options)
    halves = [
        pipeline.eval_batches(pairs, tokenizer, process_index=i, process_count=2, **options)
        for i in range(2)
    ]
    for item, *parts in zip(whole, *halves, strict=True):
        assert np.array_equal(np.concatenate([part.indices for part in parts]), item.indices)
        assert same(
            [{k: np.concatenate([p.batch[k] for p in parts]) for k in item.batch}], [item.batch]
        )


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"mode": "window"}, "mode is 'window'"),
        (
            {"batch_size": 6, "process_count": 4},
            "batch_size is 6; expected a positive multiple of 4",
        ),
        ({"truncation": "keep"}, "truncation is 'keep'"),
        ({"side": "left"}, "side is 'left'"),
        ({"source_len": 2, "target_len": 2}, "no example is short enough"),
        ({"process_index": 2, "process_count": 2}, "process_index is 2 of 2"),
    ],
)
def test_bad_options_are_refused(pairs, tokenizer, options, complaint):
    with pytest.raises(DataError, match=complaint):
        train(pairs, tokenizer, **options)


def test_an_empty_source_is_refused(tokenizer):
    with pytest.raises(DataError, match="no examples"):
        train([], tokenizer)


def test_packed_rows_never_overflow():
    rng = np.random.default_rng(0)
    source, target = rng.integers(1, 17, 500), rng.integers(2, 21, 500)
    lengths, widths = {"source": source, "target": target}, {"source": 16, "target": 20}
    layouts = packing.plan_packed(np.arange(500), lengths, rows=4, widths=widths, rng=rng)
    placed = np.concatenate([layout.examples for layout in layouts])
    assert sorted(placed) == list(range(500))
    for layout in layouts:
        for side, width in widths.items():
            used = np.zeros((4, width), int)
            places = zip(layout.row, layout.starts[side], layout.examples, strict=True)
            for row, start, example in places:
                assert start + lengths[side][example] <= width
                used[row, start : start + lengths[side][example]] += 1
            assert used.max() <= 1
    rng = np.random.default_rng(1)
    others = packing.plan_packed(np.arange(500), lengths, rows=4, widths=widths, rng=rng)
    assert [set(x.examples) for x in others] != [set(x.examples) for x in layouts]  # shuffled


def test_seeds_share_the_order_of_no_epoch(pairs, tokenizer):
    """Grain adds the number of an epoch to the seed: the second of seed 0 would be the first of seed 1."""
    few, width = pairs[:24], 4

    def epochs(seed):
        iterator = train(few, tokenizer, mode="pad", batch_size=width, seed=seed)
        batches = [batch["target_in"] for batch in take(iterator, 3 * len(few) // width)]
        rows = [row.tobytes() for batch in batches for row in batch]
        return [tuple(rows[at : at + len(few)]) for at in range(0, len(rows), len(few))]

    every = [epoch for seed in (0, 1, 2) for epoch in epochs(seed)]
    assert len(every) == 9 == len(set(every))
