"""A decoder of frames says through its cache what whole sequences of frames give."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from tests import numpy_model as oracle
from tests.closeness import close

from .speaker import Speaker

LETTERS, FRAME, D, LENGTH, BATCH = 12, 5, 16, 6, 2
SOURCE = np.array([[3, 7, 4, 9], [5, 3, 0, 0]], np.int32)
RNG = np.random.default_rng(0)


def build(rngs, **layout):
    return Speaker(LETTERS, FRAME, D, rngs=rngs, **layout)


PARAMS = oracle.random_params(build, seed=1)


@jax.jit
def whole(source, frames):
    return xa.apply(build, PARAMS, source, frames)


def plainly(source, frames):
    """Frames and stop logits in float64."""
    p, dense = PARAMS, oracle._dense
    letters = oracle.embed(p["source_input"], source, "sinusoidal")
    may_read = source[:, None] > 0
    memory = oracle.block(p["encoder"]["layers"]["0"], letters, allowed=may_read)
    x = oracle.feedforward(p["prenet"], dense(p["frame"], frames))
    x = x + oracle.sinusoids(np.arange(frames.shape[1]), D)
    options = dict(allowed=np.tri(frames.shape[1], dtype=bool), source_allowed=may_read)
    for layer in p["decoder"]["stack"]["layers"].values():
        x = oracle.block(layer, x, memory=memory, **options)
    x = oracle.norm(p["decoder"]["norm"], x)
    return dense(p["output"]["linear"], x), dense(p["output"]["stop"], x)[..., 0]


def test_it_equals_numpy():
    frames = RNG.normal(size=(BATCH, LENGTH, FRAME)).astype(np.float32)
    close(whole(jnp.asarray(SOURCE), jnp.asarray(frames)), plainly(SOURCE, frames), ulps=1000)


def test_frames_said_one_by_one_are_those_of_the_whole():
    @jax.jit
    def speak(params):
        model = xa.functional.bind(build, params)
        states = model.prefill(BATCH, 1, LENGTH, source=jnp.asarray(SOURCE))

        def step(carry, _):
            frame, states = carry
            (frame, stop), states = model.decode_step(frame, states)
            return (frame, states), (frame[:, 0, 0], stop[:, 0, 0])

        silence = jnp.zeros((BATCH, 1, 1, FRAME))
        _, (frames, stops) = jax.lax.scan(step, (silence, states), None, length=LENGTH)
        return jnp.moveaxis(frames, 0, 1), jnp.moveaxis(stops, 0, 1)

    frames, stops = speak(PARAMS)
    heard = np.concatenate([np.zeros((BATCH, 1, FRAME)), frames[:, :-1]], axis=1)
    close((frames, stops), plainly(SOURCE, heard), ulps=5000)
    shuffled, _ = whole(jnp.asarray(SOURCE[::-1]), jnp.asarray(heard, jnp.float32))
    assert np.any(np.abs(shuffled - frames) > 0.1), "letters matter"


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_several_sequences_of_frames_go_on_from_one_another_and_go_back(scan):
    """Frames [B J T F] with sizes of all axes unlike, and rows that differ in their position."""
    J, parents = 3, np.array([[2, 0, 0], [1, 1, 2]])
    make = functools.partial(build, scan=scan)
    params = oracle.random_params(make, seed=1)
    frames = RNG.normal(size=(BATCH, J, LENGTH, FRAME)).astype(np.float32)

    @jax.jit
    def steps(params):
        model = xa.functional.bind(make, params)
        states = model.prefill(BATCH, J, LENGTH + 2, source=jnp.asarray(SOURCE))
        _, states = model.decode_step(jnp.asarray(frames[:, :, :4]), states)
        states = states.select(jnp.asarray(parents)).rewind(jnp.array([4, 3]))
        return model.decode_step(jnp.asarray(frames[:, :, 4:]), states)[0]

    found = steps(params)
    call = jax.jit(lambda p, *given: xa.apply(make, p, *given))
    for row, length in enumerate((4, 3)):
        past = frames[row, parents[row], :length]
        text = jnp.asarray(np.concatenate([past, frames[row, :, 4:]], axis=1))
        source = jnp.asarray(np.repeat(SOURCE[row][None], J, axis=0))
        expected = call(params, source, text)
        close([x[row] for x in found], [x[:, -2:] for x in expected], ulps=2000)
