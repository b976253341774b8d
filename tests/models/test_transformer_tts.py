"""TransformerTTS: equal to float64 numpy; frame by frame as whole; the prenet's dropout has a key."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import crossattn as xa
from crossattn.decode import Capture, UntilStop, generate_frames
from crossattn.models import speecht5, transformer_tts
from tests import numpy_model as oracle
from tests.closeness import close

CONFIG = transformer_tts.tiny()
G = CONFIG.group * CONFIG.mels
SOURCE = jnp.array([[3, 7, 4, 9, 1], [5, 3, 1, 0, 0]], jnp.int32)
LETTERS = (SOURCE > 0).astype(jnp.int32)
RNG = np.random.default_rng(0)
GROUPS = jnp.asarray(RNG.normal(size=(2, 6, G)), jnp.float32)
STEPS = jnp.array([[1] * 6, [1] * 4 + [0] * 2], jnp.int32)


def build(rngs, **changes):
    return transformer_tts.TransformerTTS(transformer_tts.tiny(**changes), rngs=rngs)


PARAMS = oracle.random_params(build, seed=1)


def bound(params=PARAMS):
    return xa.functional.bind(build, params)


def convolved(p, x, valid, activation, open_end):
    """Convolutions of width 5 over what is valid, in float64."""
    count = len(p["layers"])
    for number in range(count):
        layer = p["layers"][str(number)]
        kernel, padded = (
            np.float64(layer["kernel"]),
            np.pad(x * valid[..., None], [(0, 0), (2, 2), (0, 0)]),
        )
        x = layer["bias"] + sum(padded[:, i : i + x.shape[1]] @ kernel[i] for i in range(5))
        if not (open_end and number == count - 1):
            x = activation(oracle.norm(p["norms"][str(number)], x))
    return x


def plainly(source, letters, groups, steps):
    """Refined groups, logits of the stop and the mean cross-attention, in float64."""
    source, letters, groups, steps = map(np.asarray, (source, letters, groups, steps))
    p, dense, relu = PARAMS, oracle._dense, lambda x: np.maximum(x, 0.0)
    x = np.float64(p["letters"]["table"])[source] * np.sqrt(CONFIG.block.dim)
    x = convolved(p["letter_convolutions"], x, letters, relu, False)
    x = x + p["letter_position_scale"] * oracle.sinusoids(np.arange(x.shape[1]), CONFIG.block.dim)
    allowed = (letters[:, :, None] == letters[:, None]) & (letters[:, None] > 0)
    for layer in p["encoder"]["layers"].values():
        x = oracle.block(layer, x, allowed=allowed)
    memory = oracle.norm(p["encoder_norm"], x)
    y, net = groups[..., -CONFIG.mels :], p["prenet"]
    y = dense(net["out"], relu(dense(net["second"], relu(dense(net["first"], y)))))
    y = y + p["frame_position_scale"] * oracle.sinusoids(np.arange(y.shape[1]), CONFIG.block.dim)
    T = y.shape[1]
    causal = np.tri(T, dtype=bool) & (steps[:, :, None] == steps[:, None]) & (steps[:, None] > 0)
    for layer in p["decoder"]["stack"]["layers"].values():
        y = oracle.block(
            layer, y, memory=memory, allowed=causal, source_allowed=letters[:, None] > 0
        )
    y = oracle.norm(p["decoder"]["norm"], y)
    made, stop = dense(p["output"]["linear"], y), dense(p["output"]["stop"], y)[..., 0]
    frames = made.reshape(len(made), -1, CONFIG.mels)
    valid = np.repeat(steps, CONFIG.group, axis=1)
    added = convolved(p["postnet"], frames, valid, np.tanh, True)
    return (frames + added).reshape(made.shape), stop


def test_it_equals_numpy():
    @jax.jit
    def run(params):
        given = dict(source_segment_ids=LETTERS, target_segment_ids=STEPS)
        return xa.apply(build, params, SOURCE, GROUPS, **given)

    there = STEPS > 0
    found, expected = run(PARAMS), plainly(SOURCE, LETTERS, GROUPS, STEPS)
    close([x[there] for x in found], [x[there] for x in expected], ulps=3000)


@functools.partial(jax.jit, static_argnames="search")
def generated(params, search, source, letters, key=None):
    return generate_frames(bound(params), source, letters, search=search, key=key)


@pytest.mark.slow
def test_groups_generated_one_by_one_are_those_of_the_whole():
    search = UntilStop(6, threshold=1 - 1e-6, capture=Capture())
    found = generated(PARAMS, search, SOURCE, LETTERS)
    assert found.groups.shape == (2, 6, G) and not found.stopped.any()

    @jax.jit
    def unrefined(params):
        model = bound(params)
        states = model.prefill(2, 1, 6, source=SOURCE, source_segment_ids=LETTERS)
        return search(model.decode_step, states, model.first(2)).groups

    heard = jnp.pad(unrefined(PARAMS)[:, :-1], [(0, 0), (1, 0), (0, 0)])
    expected, _ = plainly(SOURCE, LETTERS, heard, np.ones((2, 6), int))
    close(found.groups, expected, ulps=20000)
    weights = jax.jit(
        lambda p: bound(p).hidden(SOURCE, heard, source_segment_ids=LETTERS, return_weights=True)[1]
    )(PARAMS)
    close(np.moveaxis(found.weights, (2, 3), (0, 2)), weights, ulps=20000)


def test_a_row_ends_at_its_stop_and_the_others_go_on():
    """The stop is the sum of what a step reads; the rows stop at their own steps."""
    ends = jnp.array([2, 5, 9])

    def step(group, states):
        number, seen = states
        return (group + 1.0, jnp.where(number >= ends, 5.0, -5.0)[:, None, None]), (
            number + 1,
            seen,
        )

    found = UntilStop(7)(step, (jnp.int32(0), ends), jnp.zeros((3, 1, 1, 2)))
    np.testing.assert_array_equal(found.lengths, [3, 6, 7])
    np.testing.assert_array_equal(found.stopped, [True, True, False])
    for row, length in enumerate([3, 6, 7]):
        count = np.where(np.arange(7) < length, np.arange(1, 8), 0)
        np.testing.assert_array_equal(found.groups[row], np.stack([count, count], -1))
    later = UntilStop(7, min_steps=5)(step, (jnp.int32(0), ends), jnp.zeros((3, 1, 1, 2)))
    np.testing.assert_array_equal(later.lengths, [5, 6, 7])
    np.testing.assert_array_equal(found.segment_ids.sum(-1), found.lengths)


@pytest.mark.slow
def test_a_key_drops_features_of_the_prenet_alike_whatever_the_batch():
    search, keys = UntilStop(5, threshold=0.999), jax.random.split(jax.random.key(3), 2)
    plain = generated(PARAMS, search, SOURCE, LETTERS).groups
    both = generated(PARAMS, search, SOURCE, LETTERS, keys).groups
    assert np.abs(both - plain).max() > 0.01
    alone = generated(PARAMS, search, SOURCE[1:], LETTERS[1:], keys[1:]).groups
    close(alone[0], both[1], ulps=20000)
    other = generated(PARAMS, search, SOURCE, LETTERS, keys[::-1]).groups
    assert np.abs(both - other).max() > 0.01


@pytest.mark.parametrize(
    "given, message",
    [(dict(max_steps=0), "max_steps is 0"), (dict(max_steps=2, threshold=1.0), "threshold is 1")],
)
def test_a_search_refuses_what_it_cannot_do(given, message):
    with pytest.raises(ValueError, match=message):
        UntilStop(**given)


@pytest.mark.slow
def test_the_relative_part_of_logits_is_a_sum_in_float32():
    """Sums of numbers of bfloat16, 256 and 257, whose nearest of bfloat16 are one."""
    block = xa.nn.BlockConfig.of(32, 2, 64, norm_first=False, dtype=jnp.bfloat16)
    layer = speecht5.EncoderLayer(block, rngs=nnx.Rngs(0))
    attention, zeros = layer.attention, jnp.zeros((32, 2, 16))
    for projection in (attention.query, attention.key):  # the part of the content is 0
        projection.kernel.set_value(zeros)
    attention.query.bias.set_value(jnp.ones((2, 16)))
    eye = jnp.eye(32)
    attention.value.kernel.set_value(eye.reshape(32, 2, 16))
    attention.out.kernel.set_value(eye.reshape(2, 16, 32))
    layer.attention_norm = layer.feedforward_norm = lambda x: x
    layer.feedforward = lambda x, key: 0 * x
    relative = (
        jnp.full((2, 2, 16), 64.0).at[:, 1, 0].add(4.0)
    )  # 16 of them and 4 more, over sqrt(16)
    x = jnp.zeros((2, 32), jnp.bfloat16).at[1].set(1.0)
    read = layer(x, relative, None, None) - x
    np.testing.assert_allclose(np.float32(read), np.full((2, 32), jax.nn.sigmoid(1.0)), atol=0.005)
