"""Filling in masks: what is hidden, what is counted, and what n-grams are given."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import finetune, lm_small, masked_bytes
from experiments.settings import check
from experiments.tasks import make_task


def spied(task, monkeypatch):
    """What the loss of a task gives to its model, filled in when it is called."""
    seen, bind = {}, task.bind

    class Spy:
        def __init__(self, model):
            self.model = model

        def hidden(self, tokens, **options):
            seen.update(tokens=tokens, **options)
            return self.model.hidden(tokens, **options)

        def logits(self, hidden):
            return self.model.logits(hidden)

    monkeypatch.setattr(task, "bind", lambda params: Spy(bind(params)))
    return seen


def test_only_what_was_taken_out_is_counted_and_never_seen(monkeypatch):
    config = masked_bytes.get_config("tiny")
    check(config)
    task = make_task(config)
    params, batch = task.init(jax.random.key(0)), next(iter(task.eval_batches("test", None)))
    seen = spied(task, monkeypatch)

    @jax.jit
    def counted(batch):
        return task.loss(params, batch, None)[1] | {"seen": jnp.asarray(seen["tokens"])}

    sums, again = counted(batch), counted(batch)
    present = batch["target_segment_ids"] > 0
    masked = np.asarray(sums["seen"]) == 3
    assert not np.any(batch["target_out"] == 3) and not np.any(masked & ~present)
    assert sums["weight"] == masked.sum() and 0.08 < masked.sum() / present.sum() < 0.25
    np.testing.assert_array_equal(sums["seen"], again["seen"])
    shown = ~masked
    np.testing.assert_array_equal(np.asarray(sums["seen"])[shown], batch["target_out"][shown])


@pytest.mark.parametrize("key", [None, jax.random.key(1)], ids=["evaluation", "training"])
def test_a_row_has_the_same_masks_in_any_batch_and_beside_any_padding(key):
    task = make_task(masked_bytes.get_config("tiny"))
    batch = next(iter(task.eval_batches("test", None)))
    masked = np.asarray(task.masked(batch, key))
    assert len({row.tobytes() for row in masked}) > len(masked) // 2 > 2
    few = {name: value[1:3] for name, value in batch.items()}
    np.testing.assert_array_equal(task.masked(few, key), masked[1:3])
    long = {name: np.pad(value, ((0, 0), (0, 7))) for name, value in few.items()}
    np.testing.assert_array_equal(task.masked(long, key)[:, :-7], masked[1:3])


@pytest.mark.parametrize(
    "config", [masked_bytes.get_config("tiny"), lm_small.get_config("tiny")], ids=["masked", "next"]
)
def test_outcomes_are_the_losses_of_texts_in_their_files(config, monkeypatch):
    task = make_task(config)
    params = task.init(jax.random.key(0))
    kin = [e | {"family": f"page {i // 2}"} for i, e in enumerate(task.examples("test"))]
    monkeypatch.setattr(task, "examples", lambda split, count=None: kin)
    found, scores = task.outcomes(params, "test"), task.split_loss(params, "test")
    nll, weight = np.array(found["nll"]), np.array(found["weight"])
    assert nll.sum() / weight.sum() == pytest.approx(scores["nll"], rel=1e-5)
    assert found["group"] == [f"page {i // 2}" for i in range(len(nll))] and len(nll) == len(kin)
    # The first text alone, where nothing is drawn.
    if "density" not in config.data:
        item = next(iter(task.numbered_batches("test", None)))
        one = {name: jnp.asarray(x[:1]) for name, x in item.batch.items()}
        alone = task.loss(params, one, None)[1]
        index = item.indices[0]
        assert nll[index] == pytest.approx(float(alone["nll"]), rel=1e-5)
        assert weight[index] == float(alone["weight"])


@pytest.mark.slow
def test_training_alone_also_learns_the_tokens_that_are_seen():
    """The loss is linear in their weight, and what an evaluation counts does not change with it."""
    found, counted = [], []
    for weight in (0.0, 0.5, 1.0):
        config = masked_bytes.get_config("tiny")
        config.loss.seen_weight = weight
        task = make_task(config)
        params = task.init(jax.random.key(0))
        batch = jax.tree.map(jnp.asarray, next(task.train_iterator(0, 1)))
        loss, sums = task.loss(params, batch, jax.random.key(1))
        found.append((float(loss), float(sums["weight"])))
        counted.append(float(task.loss(params, batch, None)[0]))
    masked, half, whole = np.array(found)
    np.testing.assert_allclose(half, (masked + whole) / 2, rtol=1e-5)
    assert whole[1] == (batch["target_segment_ids"] > 0).sum() > 4 * masked[1]
    assert counted[0] == counted[1] == counted[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [masked_bytes.get_config("tiny"), finetune.get_config("masked_language_model,tiny")],
    ids=["Perceiver IO", "BERT"],
)
def test_chunks_hold_fewer_logits_and_the_loss_is_that_of_all(config):
    """Labels are smoothed, so that every logit counts."""
    config.loss.update(chunks=4, label_smoothing=0.1)
    check(config)
    task = make_task(config)
    model = task.bind(params := task.init(jax.random.key(0)))
    batch = jax.tree.map(jnp.asarray, next(task.train_iterator(0, 1)))
    (B, T), V = batch["target_out"].shape, task.corpus.tokenizer.vocab_size
    program = str(jax.make_jaxpr(task.loss)(params, batch, jax.random.key(1)))
    assert f"[{B},{T // 4},{V}]" in program and f"[{B},{T},{V}]" not in program

    present = batch["target_segment_ids"] > 0
    masked = np.asarray(task.masked(batch, jax.random.key(1)))
    weights = np.where(masked, 1.0, config.loss.get("seen_weight", 0.0)) * present
    read = dict(segment_ids=present.astype(int))
    if task.checkpoint is not None:
        read = dict(segment_ids=batch["target_segment_ids"], positions=batch["target_positions"])
    seen = np.where(masked, task.corpus.tokenizer.mask_id, batch["target_out"])
    whole = np.asarray(model.logits(model.hidden(jnp.asarray(seen), **read)), np.float64)
    log_p = whole - np.logaddexp.reduce(whole, -1, keepdims=True)
    own = np.take_along_axis(log_p, np.asarray(batch["target_out"])[..., None], -1)[..., 0]
    expected = -(weights * (0.9 * own + 0.1 * log_p.mean(-1))).sum()
    np.testing.assert_allclose(task.loss(params, batch, jax.random.key(1))[0], expected, rtol=1e-5)


@pytest.mark.slow
def test_a_published_bert_reads_each_text_alone_and_fills_in_nothing_of_its_frame(monkeypatch):
    config = finetune.get_config("masked_language_model,tiny")
    check(config)
    task = make_task(config)
    params = task.init(jax.random.key(0))
    batch = next(task.train_iterator(0, 1))
    seen = spied(task, monkeypatch)
    sums = task.loss(params, jax.tree.map(jnp.asarray, batch), None)[1]
    begin, end, mask = 257, 258, 262
    masked = np.asarray(seen["tokens"]) == mask
    assert {begin, end} <= {*batch["target_out"].flat} and batch["target_segment_ids"].max() > 1
    assert sums["weight"] == masked.sum() > 0 and mask not in batch["target_out"]
    assert not {begin, end} & {*batch["target_out"][masked]}
    np.testing.assert_array_equal(seen["segment_ids"], batch["target_segment_ids"])
    np.testing.assert_array_equal(seen["positions"], batch["target_positions"])


@pytest.mark.slow
def test_baselines_count_the_masked_tokens_and_see_no_masked_neighbour():
    task = make_task(masked_bytes.get_config("tiny"))
    found, rows = task.baselines("test"), task._rows("test")
    batch = next(iter(task.eval_batches("test", None)))
    present = batch["target_segment_ids"][0] > 0
    np.testing.assert_array_equal(rows[0][0], batch["target_out"][0][present])
    assert 0.08 < np.concatenate([own for _, own in rows]).mean() < 0.25
    assert 0 < found["ngrams_both_sides_nll"] < found["ngrams_left_nll"] < math.log(261)
