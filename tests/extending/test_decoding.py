"""A model written from outside decodes by every search that needs no more than its states have."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.decode import (
    Bucketed,
    Capture,
    ModelDraft,
    PromptLookup,
    generate,
    sampling,
    speculative,
)
from crossattn.decode.search.penalties import Coverage
from tests import numpy_model as oracle
from tests.closeness import close
from tests.decode.markov import EOS, plain_beam_search
from tests.decode.search.test_contrastive import K, plain
from tests.decode.translators import bound, translator

from . import recurrent_translator
from .recurrent_translator import RecurrentTranslator

V, D, LENGTH, BATCH = 16, 12, 7, 3
SOURCE = np.random.default_rng(0).integers(3, V, (BATCH, 6)).astype(np.int32)
SEGMENTS = (np.arange(6) < np.array([[6], [4], [5]])).astype(np.int32)


def build(rngs):
    return RecurrentTranslator(V, D, rngs=rngs)


def talkative(seed):
    """Parameters whose texts differ from source to source and end now and then."""
    params = oracle.random_params(build, seed=seed)
    for name in ("gates", "candidate", "logits"):
        params[name]["kernel"] *= 8.0
    params["logits"]["bias"][[0, 1]] = -100.0  # padding and the beginning are never said
    return params


PARAMS = talkative(20)


def run(**options):
    """Hypotheses of the three sources."""
    search = lambda p: generate(  # noqa: E731
        xa.functional.bind(build, p), SOURCE, SEGMENTS, max_new_tokens=LENGTH, **options
    )
    return jax.device_get(jax.jit(search)(PARAMS))


def texts(found, row, count=1):
    return [tuple(found.tokens[row, j, : found.lengths[row, j]].tolist()) for j in range(count)]


def vectors(row, tokens):
    """The cell's vectors after each of these tokens, in float64, everything computed anew."""
    table = PARAMS["embedding"]["embedding"].astype(np.float64)
    h, found = np.zeros(D), []
    for token in tokens:
        allowed = SEGMENTS[[row]] > 0
        read, _ = oracle.attention(
            PARAMS["attention"], h[None], memory=table[SOURCE[row]], allowed=allowed
        )
        x = np.concatenate([table[token], read[0]])
        gates = 1 / (1 + np.exp(-oracle._dense(PARAMS["gates"], np.concatenate([x, h]))))
        update, reset = np.split(gates, 2)
        new = np.tanh(oracle._dense(PARAMS["candidate"], np.concatenate([x, reset * h])))
        h = update * h + (1 - update) * new
        found.append(h)
    return np.stack(found)


def logits(hidden):
    return oracle._dense(PARAMS["logits"], hidden)


def log_softmax(scores):
    return scores - np.log(np.exp(scores - scores.max()).sum()) - scores.max()


def next_log_p(row, tokens):
    return log_softmax(logits(vectors(row, (1, *tokens))[-1]))


def plain_greedy(log_p, length):
    tokens = ()
    while len(tokens) < length and tokens[-1:] != (EOS,):
        tokens = (*tokens, int(log_p(tokens).argmax()))
    return tokens


def greedily(row):
    return plain_greedy(functools.partial(next_log_p, row), LENGTH)


def test_the_model_is_short():
    assert len(Path(recurrent_translator.__file__).read_text().splitlines()) <= 60


def test_it_says_greedily_what_a_plain_loop_says():
    found = run()
    said = [greedily(row) for row in range(BATCH)]
    assert [texts(found, row) for row in range(BATCH)] == [[text] for text in said]
    assert len(set(said)) > 1, "the source should matter"
    drawn = run(key=jax.random.key(0), processors=[sampling.top_k(1)])
    np.testing.assert_array_equal(drawn.tokens, found.tokens)


def test_its_beams_are_those_of_a_plain_beam_search():
    found = run(num_beams=4)
    for row in range(BATCH):
        expected = plain_beam_search(functools.partial(next_log_p, row), 4, LENGTH, 0.6)
        assert texts(found, row, 4) == [tokens for tokens, _ in expected]
        np.testing.assert_allclose(found.scores[row], [s for _, s in expected], rtol=1e-3)
    assert any(texts(found, row)[0] != greedily(row) for row in range(BATCH)), "beams matter"


def test_it_contrasts_what_a_plain_loop_contrasts():
    found = run(candidates=K, alpha=0.5)
    for row in range(BATCH):
        expected = plain(functools.partial(vectors, row), logits, 0.5, (1,))
        assert texts(found, row) == [expected[:LENGTH]]


def test_its_attention_is_captured_and_covered():
    found = run(num_beams=3, capture=Capture(), coverage=Coverage(0.2))
    assert found.weights.shape == (BATCH, 3, 1, 1, LENGTH, 6)
    close(found.weights[0, 0, 0, 0, : found.lengths[0, 0]].sum(-1), np.ones(found.lengths[0, 0]))
    assert not found.weights[1, ..., 4:].any(), "padding is not attended to"


def test_it_streams_in_buckets():
    decode = Bucketed(build, batch_sizes=(4,), source_lengths=(8,), target_lengths=(8,))
    pieces = decode.stream(PARAMS, SOURCE, SEGMENTS, max_new_tokens=LENGTH, every=3)
    streamed = np.concatenate(list(pieces), axis=1)
    np.testing.assert_array_equal(streamed, run().tokens[:, 0, : streamed.shape[1]])


def test_what_needs_more_than_its_states_have_is_refused_in_a_sentence():
    model, draft = xa.functional.bind(build, PARAMS), PromptLookup(SOURCE, 2)
    states = model.prefill(BATCH, 1, LENGTH + 2, source=jnp.asarray(SOURCE))
    said = r"^speculative decoding .* wrong, but RecurrentStates has no rewind\(\); decode with no draft\.$"
    with pytest.raises(ValueError, match=said):
        speculative(model.decode_step, states, draft=draft, batch=BATCH, max_new_tokens=LENGTH)
    with pytest.raises(
        ValueError, match=r"RecurrentTranslator.prefill\(\) takes no lookahead; decode"
    ):
        run(draft=draft)
    with pytest.raises(ValueError, match=r"RecurrentStates has no pad_left\(\); decode with pre"):
        run(prefix=[[1], [1, 4], [1, 5]])


def test_a_model_with_caches_may_not_draft_with_one_that_cannot_rewind():
    model, small = bound(translator(decoder_layers=1)), xa.functional.bind(build, PARAMS)
    read = dict(source=jnp.asarray(SOURCE), source_segment_ids=jnp.asarray(SEGMENTS))
    draft = ModelDraft(small.decode_step, lambda n: small.prefill(BATCH, 1, n, **read), 2)
    with pytest.raises(ValueError, match=r"RecurrentStates has no rewind\(\)"):
        generate(model, **read, max_new_tokens=LENGTH, draft=draft)
