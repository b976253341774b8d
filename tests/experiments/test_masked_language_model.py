"""Filling in masks: what is hidden, what is counted; and the n-grams beside it against a loop."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from configs import finetune, masked_bytes
from experiments.settings import check
from experiments.tasks import make_task
from experiments.tasks.ngrams import surprises


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


def test_ngrams_equal_a_loop_and_sum_to_one():
    rng = np.random.default_rng(0)
    train, other = ([rng.integers(1, 5, n) for n in sizes] for sizes in ((9, 30, 2), (7, 12)))
    *_, found = surprises(train, other, 3, 5)

    def p(word, history):
        if history is None:
            return 1 / 5
        after = [
            text[i]
            for text in train
            for i in range(len(text))
            if tuple([0, 0, *text][i + 2 - len(history) : i + 2]) == history
        ]
        kinds, lower = len(set(after)), p(word, history[1:] if history else None)
        return (after.count(word) + kinds * lower) / (len(after) + kinds) if after else lower

    expected = [
        -math.log(p(text[i], tuple([0, 0, *text][i : i + 2])))
        for text in other
        for i in range(len(text))
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert sum(p(word, (1, 2)) for word in range(5)) == 1
