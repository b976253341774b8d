"""A decoder whose blocks read two memories: captures and coverage are of the one that is named."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.decode import Capture, generate
from crossattn.decode.search.penalties import Coverage
from crossattn.nn import (
    Autoregressive,
    Block,
    BlockConfig,
    DecoderStack,
    Encoded,
    TokenInput,
    TokenOutput,
    layer_weights,
)
from tests import numpy_model as oracle
from tests.closeness import close

V, D, M, S, B, LENGTH = 16, 12, 6, 4, 2, 5
SHAPE = BlockConfig.of(D, num_heads=2, mlp_dim=2 * D)
RNG = np.random.default_rng(0)
WORDS, IMAGE = (RNG.normal(size=(B, S, M)).astype(np.float32) for _ in range(2))
VALID = np.arange(S) < np.array([[4], [2]])  # of the words; the image has as many, all valid
SUBLAYERS = {"words": "cross", "image": "look"}


class Reader(Autoregressive):
    def __init__(self, weights_of=None, *, rngs):
        self.target_input = TokenInput(V, D, positions="sinusoidal", rngs=rngs)

        def block(rngs):
            reads = functools.partial(SHAPE.cross_attention, rngs, memory_dim=M)
            return Block(
                attention=SHAPE.self_attention(rngs, causal=True),
                cross=reads(reads="words"),
                look=reads(reads="image"),
                feedforward=SHAPE.feedforward(rngs),
            )

        self.decoder = DecoderStack(
            SHAPE, 2, build=block, positions="sinusoidal", weights_of=weights_of, rngs=rngs
        )
        self.output = TokenOutput(V, D, rngs=rngs)

    def prefill(self, batch, num_beams, cache_length, *, words, valid, image, lookahead=0):
        states = self.decoder.read(words=Encoded(words, valid), image=image)
        return self.decoder.prefill(states, batch, num_beams, cache_length + lookahead)

    def whole(self, tokens, *, words, valid, image):
        """Logits [B T V] of whole texts."""
        states = self.decoder.read(words=Encoded(words, valid), image=image)
        return self.logits(self.decoder(self.target_input(tokens), states)[0])

    def weights(self, tokens, sublayer, *, words, valid, image):
        """Weights [L B N T S] of a sublayer, of whole texts."""
        states = self.decoder.read(words=Encoded(words, valid), image=image)
        embedded = self.target_input(tokens)
        _, states = self.decoder(embedded, states, capture=[f"{sublayer}.weights"])
        return layer_weights(states)


def make(weights_of=None):
    return lambda rngs: Reader(weights_of, rngs=rngs)


PARAMS = oracle.random_params(make(), seed=4)
GIVEN = dict(words=jnp.asarray(WORDS), valid=jnp.asarray(VALID), image=jnp.asarray(IMAGE))


def search(weights_of=None, **options):
    def run(params):
        model = xa.functional.bind(make(weights_of), params)
        return generate(model, inputs=GIVEN, max_new_tokens=LENGTH, bos_id=1, **options)

    return jax.device_get(jax.jit(run)(PARAMS))


@pytest.mark.parametrize("beams", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SUBLAYERS)
def test_what_is_captured_is_read_of_the_memory_that_is_named(name, beams):
    found = search(name, num_beams=beams, capture=Capture())
    model = xa.functional.bind(make(name), PARAMS)
    for row in range(B):
        n = int(found.lengths[row, 0])
        text = jnp.asarray([[1, *found.tokens[row, 0, : n - 1]]])
        own = {key: x[row : row + 1] for key, x in GIVEN.items()}
        expected = model.weights(text, SUBLAYERS[name], **own)[:, 0]
        close(found.weights[row, 0, :, :, :n], expected, ulps=1000)
    hidden = found.weights[1, 0, ..., 2:]
    assert (hidden == 0).all() == (name == "words")


@pytest.mark.parametrize("name", SUBLAYERS)
def test_the_source_of_the_states_is_that_memory_also_where_rows_go_back(name):
    expected = VALID if name == "words" else np.ones_like(VALID)

    @jax.jit
    def valid(params):
        model, tokens = xa.functional.bind(make(name), params), jnp.ones((B, 1, 3), int)
        states = model.prefill(B, 1, 6, **GIVEN)
        _, later = model.decode_step(tokens, states)
        _, back = model.decode_step(tokens, later.rewind(jnp.array([1, 2])))
        return [each.source_valid for each in (states, later, back)]

    for found in valid(PARAMS):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["words", pytest.param("image", marks=pytest.mark.slow)])
def test_a_score_has_the_cost_of_what_is_not_covered_of_that_memory(name):
    found = search(name, num_beams=2, coverage=Coverage(0.5), length_penalty=0.0, capture=Capture())
    model, costs = xa.functional.bind(make(name), PARAMS), []
    for row, valid in enumerate(VALID if name == "words" else np.ones_like(VALID)):
        n = int(found.lengths[row, 0])
        own = {key: x[row : row + 1] for key, x in GIVEN.items()}
        text = np.asarray(found.tokens[row, 0, :n])
        log_p = jax.nn.log_softmax(model.whole(jnp.asarray([[1, *text[:-1]]]), **own)[0])
        covered = found.weights[row, 0, -1, :, :n].mean(0).sum(0)
        cost = 0.5 * np.log(np.clip(covered[valid], 1e-6, 1)).sum()
        costs.append(cost)
        expected = log_p[np.arange(n), text].sum() + cost
        np.testing.assert_allclose(found.scores[row, 0], expected, rtol=1e-4)
    assert min(costs) < -0.05, "all is covered"


def test_without_a_name_what_asks_for_weights_is_refused_and_plain_searches_are_not():
    assert search().tokens.shape == (B, 1, LENGTH)
    for options in (dict(capture=Capture()), dict(num_beams=2, coverage=Coverage(0.5))):
        with pytest.raises(ValueError, match="reads the memories image, words; give DecoderStack"):
            search(**options)
