"""Speculative decoding says what its model says, whatever the draft."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crossattn.decode import (
    ModelDraft,
    PromptLookup,
    constraints,
    generate,
    greedy,
    sampling,
    speculative,
)
from tests.decode.markov import EOS, Markov, check_frequencies
from tests.decode.translators import LENGTH, SEGMENTS, SOURCE, bound, translator

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


@pytest.mark.quick(1)
@pytest.mark.parametrize("processors", [(), STEERED], ids=["free", "steered"])
@pytest.mark.parametrize("kind", ["model", "prompt"])
def test_drawn_sequences_have_the_models_distribution(kind, processors):
    """Every sequence's frequency against its exact probability under the target alone."""
    target, other, batch = Markov(1, vocab=5, length=3), Markov(2, vocab=5, length=3), 20_000
    prompt = jnp.asarray(np.random.default_rng(0).integers(1, 5, (batch, 6)))
    draft = PromptLookup(prompt, 2)
    if kind == "model":
        draft = ModelDraft(other.table_step, other.states(batch, 1), 2)
    options = dict(batch=batch, max_new_tokens=3, key=jax.random.key(5), processors=processors)
    call = jax.jit(lambda s: speculative(target.table_step, s, draft=draft, **options))
    found = jax.device_get(call(target.states(batch, 1)))
    words = [tuple(t[0][:n]) for t, n in zip(found.tokens, found.lengths[:, 0], strict=True)]
    every = [tokens for tokens, _ in target.all_hypotheses()]
    expected = [batch * np.exp(chance(target, tokens, bool(processors))) for tokens in every]
    np.testing.assert_allclose(sum(expected), batch, rtol=1e-6)
    check_frequencies([words.count(tokens) for tokens in every], expected)
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


@pytest.mark.quick(1)
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


@pytest.mark.parametrize("key", [None, jax.random.key(0)], ids=["greedy", "drawn"])
def test_a_draft_of_another_vocabulary_is_refused(key):
    said = "the draft has 7 tokens, the model 6: a draft needs the vocabulary of the model"
    with pytest.raises(ValueError, match=said):
        run(TARGET, Markov(0, vocab=7, length=6), key=key)


def test_a_draft_goes_with_a_key_and_with_no_other_search():
    model, source = bound(translator(decoder_layers=1)), jnp.asarray(SOURCE)
    key, options = jax.random.key(0), dict(draft=PromptLookup(source, 3), max_new_tokens=LENGTH)
    found = jax.jit(lambda: generate(model, source, key=key, **options))()
    states = model.prefill(3, 1, LENGTH + 4, source=source)
    drawn = jax.jit(lambda s: speculative(model.decode_step, s, key=key, batch=3, **options))
    again = drawn(states)
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
