"""Simultaneous decoding: against a loop over greedy steps, and what is written stays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from crossattn.decode import (
    AlignAtt,
    GenerationConfig,
    Simultaneous,
    SoFar,
    WaitK,
    generate,
    write_along,
)
from crossattn.decode.logits import constraints
from crossattn.models import rnn_encoder_decoder
from crossattn.train.evaluate import lagging
from tests.decode.markov import BOS, EOS
from tests.decode.translators import LENGTH, SEGMENTS, SOURCE, bound, language_model, translator

MODEL = bound(translator())
SOURCE_LENGTHS = SEGMENTS.sum(1)
POLICIES = [
    AlignAtt(1, ((0, 0),)),
    AlignAtt(2, ((0, 0), (0, 1))),
    WaitK(1),
    WaitK(3),
    WaitK(1, unit=2),
]


def search_of(policy, **options):
    return Simultaneous(policy, GenerationConfig(len(SOURCE), LENGTH), **options)


@jax.jit
def whole(segments, target_in):
    """Logits and weights of every row and step, in one pass without caches."""
    source = jnp.asarray(SOURCE)
    hidden, weights = MODEL.hidden(
        source, target_in, source_segment_ids=segments, return_weights=True
    )
    return MODEL.logits(hidden), weights


def next_step(row, tokens, heard):
    """Logits [V] of the token after ``tokens``, and the weights [L N S] of its step."""
    segments = np.where(np.arange(SOURCE.shape[1]) < heard, SEGMENTS, 0)
    target_in = np.full((len(SOURCE), LENGTH), BOS)
    target_in[row, 1 : len(tokens) + 1] = tokens
    logits, weights = whole(jnp.asarray(segments), jnp.asarray(target_in))
    at = len(tokens)
    return np.asarray(logits[row, at]), np.asarray(weights[:, row, :, at])


def writes(policy, weights, written, heard):
    """What the papers say, in words of numpy."""
    if isinstance(policy, WaitK):
        return heard // policy.unit >= policy.k + written  # token t needs k + t - 1 units, t from 1
    mean = np.mean([weights[layer, head] for layer, head in policy.heads], axis=0)
    return heard - int(mean.argmax()) > policy.newest


def plainly(policy, row, step=1):
    """Tokens and the places that had arrived at each, by loops without caches."""
    tokens, places, length = [], [], int(SOURCE_LENGTHS[row])
    for heard in range(step, SOURCE.shape[1] + step, step):
        heard = min(heard, length)
        while len(tokens) < LENGTH and tokens[-1:] != [EOS]:
            logits, weights = next_step(row, tokens, heard)
            new = int(logits.argmax())
            waits = new == EOS or not writes(policy, weights, len(tokens), heard)
            if heard < length and waits:
                break
            tokens.append(new)
            places.append(heard)
    return tokens, places


@functools.partial(jax.jit, static_argnames="step")
def along(policy, step):
    """One program for all numbers of a kind of policy."""
    return write_along(search_of(policy), MODEL, SOURCE, SEGMENTS, step)


def followed(policy, step=1):
    return jax.device_get(along(policy, step))


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("policy", "step"), [*((policy, 1) for policy in POLICIES), (POLICIES[0], 2)], ids=str
)
def test_texts_and_times_are_those_of_a_loop_without_caches(policy, step):
    found = followed(policy, step)
    for row in range(len(SOURCE)):
        tokens, places = plainly(policy, row, step)
        n = len(tokens)
        assert found.lengths[row] == n
        assert found.written[row, :n].tolist() == tokens
        assert found.places[row, :n].tolist() == places
        assert not np.any(found.written[row, n:]) and not np.any(found.places[row, n:])


def test_policies_differ_and_wait():
    """Else the test above would hold of a search that never waits."""
    found = [followed(policy) for policy in POLICIES]
    assert len({each.places.tobytes() for each in found}) == len(POLICIES)
    assert all(len(set(each.places.ravel().tolist())) > 3 for each in found)


PROMPTS = [None, [[1, 5], [1], [1, 3, 4]]]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "prefix"), [(POLICIES[1], PROMPTS[1]), (POLICIES[3], None)])
def test_with_a_source_that_is_complete_the_text_is_that_of_greedy(policy, prefix):
    options = dict(prefix=prefix, limits=np.array([LENGTH, 3, LENGTH]))
    processors = [constraints.no_repeat_ngram(2)]
    search = Simultaneous(policy, GenerationConfig(3, LENGTH, **options), processors)
    inputs = dict(source=jnp.asarray(SOURCE), source_segment_ids=jnp.asarray(SEGMENTS))
    given = jnp.asarray(SOURCE_LENGTHS), jnp.ones(3, bool)
    found = jax.jit(lambda: search.hear(MODEL, SoFar.begin(search.config), *given, **inputs))()
    expected = generate(
        MODEL, SOURCE, SEGMENTS, max_new_tokens=LENGTH, processors=processors, **options
    )
    np.testing.assert_array_equal(found.written, expected.tokens[:, 0])
    np.testing.assert_array_equal(found.lengths, expected.lengths[:, 0])
    np.testing.assert_allclose(found.scores, expected.scores[:, 0], rtol=1e-5)
    real = np.arange(LENGTH) < np.asarray(found.lengths)[:, None]
    np.testing.assert_array_equal(found.places, np.where(real, SOURCE_LENGTHS[:, None], 0))


def test_what_is_written_stays_whatever_comes():
    search = search_of(WaitK(1))
    hear = jax.jit(
        lambda so_far, heard, source: search.hear(
            MODEL,
            so_far,
            heard,
            jnp.zeros(3, bool),
            source=source,
            source_segment_ids=jnp.asarray(SEGMENTS),
        )
    )
    so_far, rng = jax.device_get(SoFar.begin(search.config)), np.random.default_rng(3)
    for heard in range(2, 7):  # each time another source altogether
        source = jnp.asarray(rng.integers(3, 16, SOURCE.shape), jnp.int32)
        then = jax.device_get(hear(so_far, jnp.full(3, heard), source))
        for row, n in enumerate(so_far.lengths):
            np.testing.assert_array_equal(then.written[row, :n], so_far.written[row, :n])
            np.testing.assert_array_equal(then.places[row, :n], so_far.places[row, :n])
        assert np.all(then.lengths >= so_far.lengths) and np.all(then.lengths <= heard)
        assert EOS not in then.written and not then.done.any()  # the source is not complete
        so_far = then
    assert so_far.lengths.max() == 6 and len(set(so_far.places[so_far.lengths.argmax()])) > 3


def test_wait_k_lags_by_k():
    """Of texts as long as their sources."""
    for length in (1, 5, 9):
        for k in range(1, 12):
            delays, heard = [], 0
            while len(delays) < length:
                if (
                    heard == length
                    or WaitK(k).writes(None, jnp.array([len(delays)]), jnp.array([heard]))[0]
                ):
                    delays.append(heard)
                else:
                    heard += 1
            np.testing.assert_array_equal(delays, np.minimum(k + np.arange(length), length))
            assert lagging(delays, length, length) == pytest.approx(min(k, length))


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (lambda: AlignAtt(0, ((0, 0),)), "newest is 0; expected 1 or more places"),
        (lambda: AlignAtt(1, ()), "heads is empty"),
        (lambda: WaitK(0), "k is 0; expected 1 or more"),
        (lambda: WaitK(1, unit=0), "unit is 0; expected 1 or more"),
        (
            lambda: AlignAtt(1, ((9, 0),)),
            r"has \(9, 0\); the model has 2 layers of 2 heads, from 0",
        ),
        (lambda: AlignAtt(1, ((0, -1),)), r"has \(0, -1\); the model has 2 layers of 2 heads"),
    ],
)
def test_policies_that_cannot_be_are_refused(policy, said):
    with pytest.raises(ValueError, match=said):
        write_along(search_of(policy()), MODEL, SOURCE, SEGMENTS)


@pytest.mark.slow
def test_models_that_cannot_go_back_or_read_nothing_are_refused():
    config = GenerationConfig(1, 3)
    inputs = dict(source=jnp.asarray(SOURCE[:1]), source_segment_ids=jnp.asarray(SEGMENTS[:1]))
    given = np.ones(1, int), np.zeros(1, bool)
    recurrent = rnn_encoder_decoder.RNNEncoderDecoder(rnn_encoder_decoder.tiny(), rngs=nnx.Rngs(0))
    search = Simultaneous(WaitK(1), config)
    with pytest.raises(ValueError, match=r"RecurrentStates has no rewind\(\)"):
        search.hear(recurrent, SoFar.begin(search.config), *given, **inputs)
    search = Simultaneous(AlignAtt(1, ((0, 0),)), config)
    with pytest.raises(ValueError, match="reads no source"):
        search.hear(bound(language_model()), SoFar.begin(search.config), *given)
