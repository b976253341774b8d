"""A painter learns the flow from noise to pictures of words; a Gaussian's is known in closed form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import crossattn as xa
from tests import numpy_model as oracle
from tests.closeness import close

from .painter import Painter

SIDE, SPREAD = 4, 0.3
MEANS = np.zeros((4, SIDE, SIDE, 1), np.float32)  # of words 1 to 4, one bright side each
MEANS[0, :2] = MEANS[1, 2:] = MEANS[2, :, :2] = MEANS[3, :, 2:] = 2.0
WORDS = np.array([[1], [2], [3], [4]], np.int32)


def build(rngs):
    return Painter(5, 32, (SIDE, SIDE), layers=1, rngs=rngs)


def known(x, time, words):
    """The velocity of pictures N(mean, SPREAD^2) of words [B 1], in float64: E[noise - picture | x_t = x].

    x_t is N((1 - t) mean, (1 - t)^2 SPREAD^2 + t^2); covariance with noise - picture is t - (1 - t) SPREAD^2.
    """
    mean, t = MEANS[np.asarray(words)[:, 0] - 1].astype(np.float64), np.asarray(time)
    t = t.astype(np.float64)[:, None, None, None]
    slope = (t - (1 - t) * SPREAD**2) / ((1 - t) ** 2 * SPREAD**2 + t**2)
    return slope * (np.asarray(x, np.float64) - (1 - t) * mean) - mean


@functools.cache
def trained(steps=1000):
    optimiser = optax.adam(optax.cosine_decay_schedule(1e-2, steps))

    @jax.jit
    def run(key):
        params = xa.init(build, key)

        def step(carry, key):
            words_key, picture_key, loss_key = jax.random.split(key, 3)
            words = jax.random.randint(words_key, (64, 1), 1, 5)
            noise = SPREAD * jax.random.normal(picture_key, (64, SIDE, SIDE, 1))
            pictures = jnp.asarray(MEANS)[words[:, 0] - 1] + noise
            loss = lambda p: xa.functional.bind(build, p).loss(pictures, words, loss_key)  # noqa: E731
            updates, state = optimiser.update(jax.grad(loss)(carry[0]), carry[1])
            return (optax.apply_updates(carry[0], updates), state), None

        return jax.lax.scan(step, (params, optimiser.init(params)), jax.random.split(key, steps))[0]

    return run(jax.random.key(0))[0]


@functools.partial(jax.jit, static_argnames="steps")
def sampled(params, words, key, steps=20):
    return xa.functional.bind(build, params).sample(words, key, steps)


def test_following_the_known_velocity_gives_the_pictures_of_a_word():
    """In float64: noise becomes N(mean, SPREAD^2) of its word, point for point."""
    noise = np.random.default_rng(0).normal(size=(4, SIDE, SIDE, 1))
    x, steps = noise, 4000
    for i in range(steps):
        x = x - known(x, np.full(4, 1 - i / steps), WORDS) / steps
    np.testing.assert_allclose(x, MEANS + SPREAD * noise, atol=5e-3)


def test_the_condition_gates_it_open_and_a_new_painter_ignores_time_and_words():
    """adaLN-Zero: each block is the identity at first, so that the velocity is one of patches alone."""
    params = xa.init(build, jax.random.key(0))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, SIDE, SIDE, 1)), jnp.float32)
    call = jax.jit(lambda p, *given: xa.apply(build, p, *given))
    early = call(params, x, jnp.zeros(4), jnp.asarray(WORDS))
    np.testing.assert_array_equal(early, call(params, x, jnp.ones(4), jnp.asarray(WORDS[::-1])))
    other = oracle.random_params(build, seed=0)
    early = call(other, x, jnp.zeros(4), jnp.asarray(WORDS))
    for given in ((jnp.full(4, 0.2), WORDS), (jnp.zeros(4), WORDS[::-1])):
        assert np.abs(call(other, x, *map(jnp.asarray, given)) - early).max() > 1e-2
    padded = jnp.asarray(np.pad(WORDS, ((0, 0), (0, 3))))
    close(call(other, x, jnp.zeros(4), padded), early, ulps=1000)


@pytest.mark.slow
def test_what_it_learns_is_the_known_velocity():
    rng, words = np.random.default_rng(2), np.repeat(WORDS, 50, axis=0)
    time = rng.uniform(0.1, 1, 200).astype(np.float32)
    t = time[:, None, None, None]
    pictures = MEANS[words[:, 0] - 1] + SPREAD * rng.normal(size=(200, SIDE, SIDE, 1))
    x = (t * rng.normal(size=pictures.shape) + (1 - t) * pictures).astype(np.float32)
    call = jax.jit(lambda p, *given: xa.apply(build, p, *given))
    expected = known(x, time, words)

    def error(words):
        found = call(trained(), jnp.asarray(x), jnp.asarray(time), jnp.asarray(words))
        return np.square(found - expected).mean() / np.square(expected).mean()

    own, shuffled = error(words), error(words % 4 + 1)
    assert own < 0.02 and shuffled > 0.5


@pytest.mark.slow
def test_a_sample_is_the_keys_and_its_words():
    words = jnp.asarray(np.repeat(WORDS, 64, axis=0))
    found = np.asarray(sampled(trained(), words, jax.random.key(1)))
    np.testing.assert_array_equal(found, sampled(trained(), words, jax.random.key(1)))
    other = np.asarray(sampled(trained(), words, jax.random.key(2)))
    assert np.abs(found - other).max() > 0.5
    groups = found.reshape(4, 64, SIDE, SIDE, 1)
    assert np.abs(groups.mean(1) - MEANS).max() < 0.2
    assert groups.std(1).mean() == pytest.approx(SPREAD, rel=0.2)
    # The nearest mean is that of the word, but for a picture in a hundred.
    far = np.square(found[:, None] - MEANS).sum((2, 3, 4))
    assert np.mean(far.argmin(1) == np.asarray(words)[:, 0] - 1) > 0.98
