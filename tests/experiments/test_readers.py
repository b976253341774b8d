"""Baselines that read the source: what it tells is used, what it does not tell costs nothing."""

import numpy as np
import pytest

from experiments.tasks import readers

RANDOM = np.random.default_rng(0)
SPLITS = {"train": 1500, "validation": 200, "test": 200}


class Task:
    """Texts of five tokens [n 5] and sources [n ...] by split, in one batch each."""

    def __init__(self, draw):
        self.splits = {name: draw(count) for name, count in SPLITS.items()}

    def eval_batches(self, split, mesh):
        texts, sources = self.splits[split]
        yield {"target_out": texts, "source": sources, "segments": np.ones(texts.shape, int)}


def scored(draw):
    source_of = lambda batch, row, number: batch["source"][row]  # noqa: E731
    found = readers.scores(Task(draw), "test", lambda x: x["segments"], None, source_of)
    assert list(found) == ["trigrams_nll", "trigrams_and_source_nll"]
    return found.values()


def translated(count):
    sources = RANDOM.integers(1, 6, (count, 5))
    return 6 - sources, sources


def unrelated(count):
    return RANDOM.integers(1, 6, (count, 5)), RANDOM.integers(1, 6, (count, 5))


def coloured(count):
    """The mean of a picture of 300 numbers tells the third token, which others tell nothing of."""
    texts, third = RANDOM.integers(1, 3, (count, 5)), RANDOM.integers(3, 9, count)
    texts[:, 2] = third
    return texts, third[:, None] + RANDOM.normal(size=(count, 300))


def test_the_reader_is_chosen_on_validation_alone():
    """Sources of the test split tell something else than before, so that the reader does harm there."""
    task = Task(translated)
    texts, sources = task.splits["test"]
    task.splits["test"] = texts, 6 - sources
    source_of = lambda batch, row, number: batch["source"][row]  # noqa: E731
    blind, reading = readers.scores(task, "test", lambda x: x["segments"], None, source_of).values()
    assert reading > 1.5 * blind


def test_each_text_of_a_packed_row_has_its_own_source_and_counts_as_told():
    def packed(count):
        texts, sources = translated(2 * count)
        return texts.reshape(count, 10), sources.reshape(count, 10)

    task, segments = Task(packed), np.repeat([1, 2, 0], [5, 5, 2])
    for split, (texts, sources) in task.splits.items():
        task.splits[split] = tuple(np.pad(x, [(0, 1), (0, 2)]) for x in (texts, sources))

    def owners(batch):
        found = np.tile(segments, (len(batch["target_out"]), 1))
        found[-1] = 0  # a row of padding
        return found

    source_of = lambda batch, row, number: batch["source"][row][segments == number]  # noqa: E731
    found = readers.scores(task, "test", owners, None, source_of)
    alone = readers.scores(
        task, "test", owners, lambda x: (owners(x) > 0) & (np.arange(12) % 5 == 2), source_of
    )
    for each in (found, alone):
        assert each["trigrams_and_source_nll"] < 0.3 * each["trigrams_nll"]
    assert found != alone


def test_what_a_source_tells_is_used():
    blind, reading = scored(translated)
    assert blind == pytest.approx(np.log(5), abs=0.05) and reading < 0.3 * blind
    blind, seeing = scored(coloured)
    most = np.log(2) * 4 / 5  # of four tokens that are heads or tails
    assert blind > most + 0.9 * np.log(6) / 5 and most - 0.02 < seeing < most + 0.2


@pytest.mark.parametrize("numbers", [False, True])
def test_what_tells_nothing_costs_little(numbers):
    def draw(count):
        texts, sources = unrelated(count)
        return texts, RANDOM.normal(size=(count, 300)) if numbers else sources

    blind, reading = scored(draw)
    assert blind - 0.03 < reading < blind + 0.03


def test_tokens_that_do_not_count_are_read_all_the_same():
    """A first token that tells the language is no surprise of the text, and part of its n-grams."""

    class Task:
        def eval_batches(self, split, mesh):
            texts = [[7, 1, 2], [8, 2, 1]] * 20
            yield {"target_out": np.array(texts), "segments": np.ones((40, 3), int)}

    def nats(**options):
        return readers.scores(Task(), "test", lambda x: x["segments"], **options)["trigrams_nll"]

    told = nats(told=lambda x: (x["segments"] > 0) & (np.arange(3) > 0))
    untold = nats(told=None)
    assert told < 0.05 and untold == pytest.approx(np.log(2) / 3, abs=0.05)
