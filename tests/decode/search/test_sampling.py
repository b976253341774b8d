"""Greedy decoding and sampling: distributions, constraints, prefixes, limits, scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crossattn.decode import constraints, greedy, sample, sampling
from tests.decode.markov import BOS, EOS, Markov, check_frequencies

MODEL = Markov(0, vocab=7, length=6, sharpness=1.5)
KEY = jax.random.key(3)


def run(model=MODEL, *, search=greedy, batch=1, length=None, **options):
    """Hypotheses of a table model, jitted."""
    options["max_new_tokens"] = length or model.length
    call = jax.jit(lambda s: search(model.table_step, s, batch=batch, **options))
    return jax.device_get(call(model.states(batch, 1)))


def words(found, row=0):
    return tuple(found.tokens[row, 0, : found.lengths[row, 0]].tolist())


def test_drawn_sequences_have_their_probabilities():
    model, batch = Markov(1, vocab=5, length=2), 20_000
    found = run(model, search=sample, batch=batch, key=KEY)
    every = dict(model.all_hypotheses())
    drawn = [words(found, row) for row in range(batch)]
    counts = [drawn.count(tokens) for tokens in every]
    check_frequencies(counts, batch * np.exp(list(every.values())))
    for row in range(20):
        np.testing.assert_allclose(found.scores[row, 0], model.score(words(found, row)), rtol=1e-4)


def test_a_shaped_distribution_is_drawn_from_and_scores_stay_the_models_own():
    batch, shape = 4000, [sampling.temperature(0.5), sampling.top_k(2)]
    found = run(search=sample, batch=batch, length=1, key=KEY, processors=shape)
    expected = np.exp(2 * MODEL.log_p[0, BOS])
    expected[np.argsort(-expected)[2:]] = 0
    counts = np.bincount(found.tokens[:, 0, 0], minlength=7)
    check_frequencies(counts, batch * expected / expected.sum())
    own = MODEL.log_p[0, BOS, found.tokens[:, 0, 0]]
    np.testing.assert_allclose(found.scores[:, 0], own, rtol=1e-4)


def plain_greedy(model, allowed, length, before=(BOS,)):
    """Tokens by a loop over a list; ``allowed(tokens)`` says which may come."""
    tokens = []
    while len(tokens) < length and tokens[-1:] != [EOS]:
        last = [*before, *tokens][-1]
        log_p = model.log_p[len(before) - 1 + len(tokens), last].copy()
        log_p[[t for t in range(model.vocab) if not allowed(tokens, t)]] = -np.inf
        tokens.append(int(log_p.argmax()))
    return tuple(tokens)


@pytest.mark.parametrize("seed", range(3))
def test_constraints_leave_the_best_of_what_they_allow(seed):
    model = Markov(seed, vocab=7, length=6)

    def allowed(tokens, token):
        pairs = set(zip(tokens, tokens[1:], strict=False))
        if token == EOS:
            return len(tokens) >= 3
        if len(tokens) == 4:
            return False
        return token != 4 and (*tokens[-1:], token) not in pairs

    found = run(
        model,
        processors=[
            constraints.ban(4),
            constraints.no_repeat_ngram(2),
            constraints.min_new_tokens(3, EOS),
            constraints.max_new_tokens(5, EOS),
        ],
    )
    assert words(found) == plain_greedy(model, allowed, 6)
    np.testing.assert_allclose(found.scores[0, 0], model.score(words(found)), rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"search": sample, "key": KEY}])
def test_scores_are_measured_after_the_rules_and_before_the_processors(options):
    rules, flat = [constraints.ban([4, EOS])], [sampling.temperature(2.0)]
    found = run(batch=2, length=3, rules=rules, processors=flat, **options)
    for row in range(2):
        tokens, score = words(found, row), 0.0
        for t, (last, token) in enumerate(zip((BOS, *tokens), tokens, strict=False)):
            left = np.delete(MODEL.log_p[t, last], [4, EOS])
            score += MODEL.log_p[t, last, token] - np.logaddexp.reduce(left)
        assert not {4, EOS} & {*tokens}
        np.testing.assert_allclose(found.scores[row, 0], score, rtol=1e-4)


def test_a_prefix_is_continued_and_enters_in_one_step():
    prefix, steps = (BOS, 5, 3), []

    def step(tokens, states):
        steps.append(tokens.shape[-1])
        return MODEL.table_step(tokens, states)

    found = greedy(step, MODEL.states(2, 1), batch=2, max_new_tokens=3, prefix=prefix)
    expected = plain_greedy(MODEL, lambda tokens, token: True, 3, before=prefix)
    assert words(found) == words(found, 1) == expected
    assert steps == [2, 1]  # traced once each: the prefix but for its last, then the loop


def test_rows_may_have_prefixes_and_limits_of_their_own():
    prefix = np.array([[BOS, 3], [BOS, 4], [BOS, 5]])
    banned = [constraints.ban(EOS)]
    found = run(batch=3, length=4, prefix=prefix, limits=jnp.array([4, 0, 2]), processors=banned)
    for row, limit in enumerate([4, 0, 2]):
        before = prefix[row].tolist()
        assert words(found, row) == plain_greedy(MODEL, lambda _, t: t != EOS, limit, before)


def test_any_of_several_ends_is_an_end():
    plain = words(run(processors=[constraints.ban(EOS)]))
    found = words(run(processors=[constraints.ban(EOS)], eos_id=(EOS, plain[2])))
    assert found == plain[: plain.index(plain[2]) + 1]


def test_the_loop_stops_when_every_row_has_ended():
    model = Markov(0, vocab=8, length=30, eos_bonus=3.0)
    call = jax.jit(lambda s: greedy(model.decode_step, s, batch=4, max_new_tokens=30))
    found = jax.device_get(call(model.states(4, 1)))
    jax.effects_barrier()
    assert len(model.calls) == found.lengths.max() < 30


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"length": 2, "batch": 0}, "batch is 0"),
        ({"prefix": np.zeros((3, 2), int)}, r"prefix has shape \(3, 2\)"),
        ({"prefix": np.zeros((1, 0), int)}, "prefix has shape"),
    ],
)
def test_a_target_that_cannot_be_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        run(**options)


def test_a_key_a_row_draws_the_same_in_any_batch():
    keys = jax.random.split(KEY, 4)
    every = run(search=sample, batch=4, key=keys).tokens
    assert len(np.unique(every[:, 0], axis=0)) > 2
    for row in range(4):
        alone = run(search=sample, batch=1, key=keys[row : row + 1]).tokens
        np.testing.assert_array_equal(alone[0], every[row])
    with pytest.raises(
        ValueError, match=r"key has shape \(3,\); expected one key, or one for each"
    ):
        run(search=sample, batch=4, key=keys[:3])
