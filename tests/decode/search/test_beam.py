"""Beam search against exhaustive search and against plain Python."""

import functools

import jax
import numpy as np
import pytest

from crossattn.decode import beam_search, greedy
from tests.decode import markov
from tests.decode.markov import EOS, Markov


def search(model, *, num_beams, alpha=0.6, batch=1):
    """[(tokens without padding, score)] of row 0, best first."""
    found = jax.jit(
        lambda states: beam_search(
            model.decode_step,
            states,
            batch=batch,
            num_beams=num_beams,
            max_new_tokens=model.length,
            length_penalty=alpha,
        )
    )(model.states(batch, num_beams))
    jax.effects_barrier()
    return read(found)


def read(found, row=0):
    tokens, lengths = np.asarray(found.tokens[row]), np.asarray(found.lengths[row])
    for sequence, n in zip(tokens, lengths, strict=True):
        assert not sequence[n:].any() and sequence[:n].all()
    return [
        (tuple(int(t) for t in sequence[:n]), float(score))
        for sequence, n, score in zip(tokens, lengths, np.asarray(found.scores[row]), strict=True)
    ]


def same(actual, expected):
    assert [tokens for tokens, _ in actual] == [tokens for tokens, _ in expected]
    np.testing.assert_allclose([s for _, s in actual], [s for _, s in expected], rtol=1e-4)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_enough_beams_find_what_exhaustive_search_finds(seed, alpha):
    model = Markov(seed, vocab=5, length=4)
    num_beams = 16
    every = [(t, markov.penalised(s, len(t), alpha)) for t, s in model.all_hypotheses()]
    every.sort(key=lambda pair: -pair[1])
    same(search(model, num_beams=num_beams, alpha=alpha)[:5], every[:5])


@pytest.mark.parametrize(("num_beams", "alpha"), [(1, 0.6), (2, 0.0), (3, 1.0)])
@pytest.mark.parametrize("seed", range(3))
def test_few_beams_find_what_a_plain_beam_search_finds(seed, num_beams, alpha):
    model = Markov(seed, vocab=8, length=6)
    plain = markov.plain_beam_search(
        lambda tokens: model.log_p[len(tokens), (1, *tokens)[-1]], num_beams, model.length, alpha
    )
    same(search(model, num_beams=num_beams, alpha=alpha), plain)


def test_the_search_stops_early_and_changes_nothing_by_it():
    model = Markov(0, vocab=8, length=30, eos_bonus=4.0)
    plain = markov.plain_beam_search(
        lambda tokens: model.log_p[len(tokens), (1, *tokens)[-1]], 3, model.length, 0.6
    )
    same(search(model, num_beams=3), plain)
    assert 3 < len(model.calls) < 30


def test_without_an_end_the_search_runs_to_max_length():
    model = Markov(0, length=5, eos_bonus=-1e4)
    found = search(model, num_beams=2)
    assert [len(tokens) for tokens, _ in found] == [5, 5]
    assert len(model.calls) == 5
    for tokens, score in found:
        expected = markov.penalised(model.score(tokens), 5, 0.6)
        np.testing.assert_allclose(score, expected, rtol=1e-5)


def test_a_larger_length_penalty_finds_longer_hypotheses():
    model = Markov(3, vocab=5, length=4, sharpness=0.5)
    lengths = [len(search(model, num_beams=16, alpha=alpha)[0][0]) for alpha in (0.0, 3.0)]
    assert lengths[0] < lengths[1]


def test_hypotheses_come_best_first_and_differ():
    found = search(Markov(4, vocab=8), num_beams=4)
    scores = [score for _, score in found]
    assert scores == sorted(scores, reverse=True)
    assert len({tokens for tokens, _ in found}) == 4


@pytest.mark.parametrize("seed", range(3))
def test_one_beam_is_never_worse_than_greedy(seed):
    model = Markov(seed, vocab=8)
    run = functools.partial(greedy, model.decode_step, batch=1, max_new_tokens=model.length)
    [(tokens, score)] = read(jax.jit(run)(model.states(1, 1)))
    [(_, best)] = search(model, num_beams=1, alpha=0.0)
    np.testing.assert_allclose(score, model.score(tokens), rtol=1e-5)
    assert best >= score - 1e-5


def test_one_beam_is_greedy_where_ending_is_never_second_best():
    model = Markov(0, vocab=8, length=5, sharpness=2.0)
    end = np.zeros(5, bool)
    end[3] = True
    logits = model.log_p.copy()
    logits[..., EOS] = np.where(end[:, None], 5.0, -1e4)
    model.log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    run = functools.partial(greedy, model.decode_step, batch=1, max_new_tokens=model.length)
    found = read(jax.jit(run)(model.states(1, 1)))
    assert len(found[0][0]) == 4
    same(search(model, num_beams=1, alpha=0.0), found)
