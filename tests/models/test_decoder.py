"""The decoder-only model: equal to numpy, exactly causal, packed like alone."""

import functools

import jax
import numpy as np
import pytest

import crossattn as xa
from crossattn.models import Decoder
from crossattn.models.decoder import tiny
from tests import numpy_model as oracle

TOKENS = np.random.default_rng(0).integers(3, 64, (2, 7))


@functools.cache
def build(config):
    """One build for a config, whose abstract module is made once."""
    return lambda rngs: Decoder(config, rngs=rngs)


def forward(config):
    params = oracle.random_params(build(config))
    return jax.jit(lambda *a, **k: xa.apply(build(config), params, *a, **k)), params


@pytest.mark.parametrize(
    "config",
    [
        tiny(),
        tiny(layers=1, positions="rope", tie_output=False),
        tiny(layers=1, block=tiny().block.changed(norm_first=False)),
    ],
    ids=["learned, tied", "rope, untied", "post-norm"],
)
def test_the_whole_model_equals_numpy(config):
    run, params = forward(config)
    expected = oracle.decoder(
        params, TOKENS, positions=config.positions, first=config.block.norm_first, act="gelu"
    )
    np.testing.assert_allclose(run(TOKENS), expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


def test_a_changed_token_moves_no_output_before_it():
    run, _ = forward(tiny())
    before = np.asarray(run(TOKENS))
    for j in range(TOKENS.shape[1]):
        changed = TOKENS.copy()
        changed[:, j] = (changed[:, j] + 1) % 64
        after = np.asarray(run(changed))
        np.testing.assert_array_equal(after[:, :j], before[:, :j])
        assert np.all(np.any(after[:, j:] != before[:, j:], axis=-1))


@pytest.mark.parametrize("positions", ["learned", "relative"])
def test_packed_texts_equal_the_same_texts_alone(positions):
    run, _ = forward(tiny(layers=1, positions=positions))
    numbers = np.array([[1, 1, 1, 2, 2, 2, 0]])
    places = np.array([[0, 1, 2, 0, 1, 2, 0]])
    packed = run(TOKENS[:1], segment_ids=numbers, positions=places)
    for start in (0, 3):
        alone = run(TOKENS[:1, start : start + 3])
        np.testing.assert_allclose(packed[:, start : start + 3], alone, rtol=1e-4, atol=1e-4)


def test_the_parameter_count_is_the_closed_form():
    D, F, V, L, P = 32, 64, 64, 2, 64
    layer = 4 * (D * D + D) + 2 * D * F + F + D + 2 * 2 * D
    shapes = jax.eval_shape(lambda: xa.init(build(tiny()), jax.random.key(0)))
    assert xa.functional.count(shapes) == V * D + P * D + L * layer + 2 * D
    axes = xa.functional.logical_axes(build(tiny()))
    assert jax.tree.map(lambda s: len(s.shape), shapes) == jax.tree.map(
        len, axes, is_leaf=lambda x: isinstance(x, tuple)
    )
