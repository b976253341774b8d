"""Speculative decoding says what its model says, whatever the draft."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from crossattn.decode import (
    ModelDraft,
    PromptLookup,
    constraints,
    generate,
    greedy,
    sampling,
    speculative,
)
from crossattn.decode.search.speculative import verify
from tests.decode.markov import EOS, Markov
from tests.decode.translators import LENGTH, SEGMENTS, SOURCE, bound, language_model, translator

TARGET = Markov(0, vocab=6, length=6)
STEERED = [
    constraints.no_repeat_ngram(2),
    constraints.min_new_tokens(2, EOS),
    sampling.temperature(0.8),
    sampling.top_k(3),
]


def counted(model, calls):
    """Its step, counting how often it ran."""

    def step(tokens, states):
        jax.debug.callback(lambda _: calls.append(1), states.read)
        return model.table_step(tokens, states)

    return step


def run(target, draft, *, batch=4, lookahead=3, calls=None, **options):
    """Hypotheses of table models."""
    step = target.table_step if calls is None else counted(target, calls)
    options = dict(max_new_tokens=target.length) | options

    def call(states, draft_states):
        guess = ModelDraft(draft.table_step, draft_states, lookahead)
        return speculative(step, states, draft=guess, batch=batch, **options)

    found = jax.device_get(jax.jit(call)(target.states(batch, 1), draft.states(batch, 1)))
    jax.effects_barrier()
    return found


@pytest.mark.parametrize("draft", ["itself", "another", "a stubborn one"])
@pytest.mark.parametrize("processors", [(), STEERED], ids=["free", "steered"])
def test_greedy_output_is_the_models_own(draft, processors):
    drafts = {
        "itself": TARGET,
        "another": Markov(9, vocab=6, length=6),
        "a stubborn one": Markov(3, vocab=6, length=6, sharpness=20.0),
    }
    prefix, limits = np.array([[1, 3], [1, 4], [1, 5], [1, 3]]), jnp.array([6, 2, 5, 0])
    options = dict(processors=processors, prefix=prefix, limits=limits)
    found = run(TARGET, drafts[draft], **options)
    alone = jax.jit(lambda s: greedy(TARGET.table_step, s, batch=4, max_new_tokens=6, **options))
    expected = jax.device_get(alone(TARGET.states(4, 1)))
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-4)


def test_a_good_draft_saves_steps():
    long = Markov(0, vocab=8, length=24, eos_bonus=-1e4)
    calls = []
    run(long, long, lookahead=3, calls=calls, batch=1)
    assert len(calls) == 6  # 24 tokens, 4 at a time
    calls.clear()
    run(long, Markov(7, vocab=8, length=24, eos_bonus=-1e4), lookahead=3, calls=calls, batch=1)
    assert 6 < len(calls) <= 24


@pytest.mark.parametrize("processors", [(), STEERED], ids=["free", "steered"])
def test_drawn_sequences_have_the_models_distribution(processors):
    """Every sequence's frequency against its exact probability under the target alone."""
    target, draft = Markov(1, vocab=5, length=3), Markov(2, vocab=5, length=3)
    batch = 20_000
    key = jax.random.key(5)
    found = run(target, draft, batch=batch, lookahead=2, key=key, processors=processors)
    held_to(target, found, steered=bool(processors))


@pytest.mark.parametrize("processors", [(), STEERED], ids=["free", "steered"])
def test_sequences_drawn_with_a_prompt_have_the_models_distribution(processors):
    """Every row with a prompt of its own, from which nothing but guesses may come."""
    target, batch = Markov(1, vocab=5, length=3), 20_000
    prompt = jnp.asarray(np.random.default_rng(0).integers(1, 5, (batch, 6)))

    def call(states):
        options = dict(batch=batch, max_new_tokens=3, key=jax.random.key(6), processors=processors)
        return speculative(target.table_step, states, draft=PromptLookup(prompt, 2), **options)

    found = jax.device_get(jax.jit(call)(target.states(batch, 1)))
    held_to(target, found, steered=bool(processors))


def held_to(target, found, steered):
    """Frequencies of sequences against their probabilities, and scores."""
    batch = len(found.tokens)
    words = [tuple(t[0][:n]) for t, n in zip(found.tokens, found.lengths[:, 0], strict=True)]
    probabilities = {
        tokens: np.exp(chance(target, tokens, steered)) for tokens, _ in target.all_hypotheses()
    }
    expected = {tokens: p * batch for tokens, p in probabilities.items() if p > 0}
    np.testing.assert_allclose(sum(expected.values()), batch, rtol=1e-6)
    counts = np.array([words.count(tokens) for tokens in expected])
    assert counts.sum() == batch, "a sequence came that cannot come"
    wanted = np.array(list(expected.values()))
    often = wanted > 5
    counts = np.append(counts[often], counts[~often].sum())
    wanted = np.append(wanted[often], wanted[~often].sum())
    keep = wanted > 0
    assert stats.chisquare(counts[keep], wanted[keep]).pvalue > 1e-3
    for row in range(10):
        np.testing.assert_allclose(found.scores[row, 0], target.score(words[row]), rtol=1e-4)


def chance(model, tokens, steered):
    """log p of a sequence under STEERED or not, in plain Python."""
    total, said = 0.0, (1,)
    for time, token in enumerate(tokens):
        log_p = model.log_p[time, said[-1]].copy()
        if steered:
            pairs = set(zip(said, said[1:], strict=False))
            for other in range(model.vocab):
                if (said[-1], other) in pairs or (other == EOS and time < 2):
                    log_p[other] = -np.inf
            log_p = log_p / 0.8
            log_p[log_p < np.sort(log_p)[-3]] = -np.inf
        total += log_p[token] - np.log(np.exp(log_p).sum())
        said = (*said, token)
    return total


def test_one_round_of_verification_has_the_wanted_distribution():
    """Over every guess, weighed by how likely the draft is to make it."""
    rng = np.random.default_rng(0)
    wanted, drawn = (rng.dirichlet(np.ones(4), size=n) for n in (2, 1))
    keys = jax.random.split(jax.random.key(0), 60_000)
    check = jax.jit(
        jax.vmap(lambda k, g: verify(k, *map(jnp.asarray, (wanted, g[None], drawn))), (0, None))
    )
    total = np.zeros(4)
    for guess in range(4):
        right, token = map(np.asarray, check(keys, jnp.int32(guess)))
        accepted = min(1, wanted[0, guess] / drawn[0, guess])
        np.testing.assert_allclose(right.mean(), accepted, atol=0.01)
        first = np.where(right == 1, guess, token)
        total += drawn[0, guess] * np.bincount(first, minlength=4) / len(keys)
        if accepted > 0.1:
            after = np.bincount(token[right == 1], minlength=4) / (right == 1).sum()
            np.testing.assert_allclose(after, wanted[1], atol=0.02)
    np.testing.assert_allclose(total, wanted[0], atol=0.01)


@pytest.mark.parametrize("scan", [False, True], ids=["looped", "scanned"])
@pytest.mark.parametrize("kind", ["model", "lookup"])
def test_a_translator_with_a_draft_says_what_it_says_alone(kind, scan):
    pair, small = translator(scan=scan, decoder_layers=1), translator(seed=5, decoder_layers=1)
    prefix = np.array([[1, 4], [1, 5], [1, 6]])
    options = dict(max_new_tokens=LENGTH, limits=np.array([LENGTH, 3, LENGTH]), prefix=prefix)

    @partial(jax.jit, static_argnames="drafted")
    def call(params, small_params, drafted):
        model, other = bound((pair[0], params)), bound((small[0], small_params))
        if not drafted:
            return generate(model, SOURCE, SEGMENTS, **options)
        draft = PromptLookup(jnp.asarray(SOURCE), 3)
        if kind == "model":
            read = dict(source=jnp.asarray(SOURCE), source_segment_ids=jnp.asarray(SEGMENTS))
            draft = ModelDraft(other.decode_step, lambda n: other.prefill(3, 1, n, **read), 3)
        return generate(model, SOURCE, SEGMENTS, draft=draft, **options)

    found, alone = (call(pair[1], small[1], drafted) for drafted in (True, False))
    np.testing.assert_array_equal(found.tokens, alone.tokens)
    np.testing.assert_allclose(found.scores, alone.scores, rtol=1e-3)


def test_a_language_model_with_a_draft_says_what_it_says_alone():
    pair, prefix = language_model(), np.array([[1, 4, 5, 4, 5], [1, 7, 8, 9, 3]])
    options = dict(batch=2, max_new_tokens=LENGTH, prefix=prefix)

    @partial(jax.jit, static_argnames="drafted")
    def call(params, drafted):
        draft = dict(draft=PromptLookup(jnp.asarray(prefix), 2)) if drafted else {}
        return generate(bound((pair[0], params)), **options, **draft)

    found, alone = (call(pair[1], drafted) for drafted in (True, False))
    np.testing.assert_array_equal(found.tokens, alone.tokens)
    np.testing.assert_allclose(found.scores, alone.scores, rtol=1e-3)


@pytest.mark.parametrize("key", [None, jax.random.key(0)], ids=["greedy", "drawn"])
def test_a_draft_of_another_vocabulary_is_refused(key):
    said = "the draft has 7 tokens, the model 6: a draft needs the vocabulary of the model"
    with pytest.raises(ValueError, match=said):
        run(TARGET, Markov(0, vocab=7, length=6), key=key)


def test_a_draft_goes_with_a_key_and_with_no_other_search():
    model, key = bound(translator(decoder_layers=1)), jax.random.key(0)
    options = dict(draft=PromptLookup(jnp.asarray(SOURCE), 3), max_new_tokens=LENGTH)
    found = jax.jit(lambda: generate(model, SOURCE, SEGMENTS, key=key, **options))()
    again = jax.jit(
        lambda: speculative(
            model.decode_step,
            model.prefill(
                3,
                1,
                LENGTH + 4,
                source=jnp.asarray(SOURCE),
                source_segment_ids=jnp.asarray(SEGMENTS),
            ),
            key=key,
            batch=3,
            **options,
        )
    )()
    np.testing.assert_array_equal(found.tokens, again.tokens)
    with pytest.raises(ValueError, match="num_beams and draft; expected one of them"):
        generate(model, SOURCE, num_beams=2, **options)
    with pytest.raises(ValueError, match="num_beams and draft and key; expected one of them"):
        generate(model, SOURCE, num_beams=2, key=key, **options)


def test_a_prompt_that_is_copied_is_guessed_right():
    """A model that goes 3 4 5 ... 9 and round again, and a prompt that does too."""
    model = Markov(0, vocab=10, length=20)
    model.log_p[:] = -30.0
    for token in range(10):
        model.log_p[:, token, 3 if token in (0, 1, 2, 9) else token + 1] = 0.0
    prompt, calls = np.array([[3, 4, 5, 6, 7, 8, 9, 3, 4, 5, 6, 7, 8, 9]] * 2), []

    def call(states):
        draft = PromptLookup(jnp.asarray(prompt), lookahead=4)
        return speculative(counted(model, calls), states, draft=draft, batch=2, max_new_tokens=20)

    found = jax.device_get(jax.jit(call)(model.states(2, 1)))
    jax.effects_barrier()
    assert found.tokens[1, 0].tolist() == ([3, 4, 5, 6, 7, 8, 9] * 3)[:20]
    assert len(calls) <= 2 * 6
