"""Dropout: the right share, independent in every direction one can look, repeatable from its key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crossattn.ops.dropout import dropout, keep_mask, kept_scale

SHAPE = (64, 32, 64)
SIZE = 64 * 32 * 64


def kept(seed, rate=0.5, shape=SHAPE):
    return np.asarray(keep_mask(jax.random.key(seed), rate, shape)).astype(np.float64)


def correlation(a, b):
    return np.corrcoef(a.ravel(), b.ravel())[0, 1]


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(4))
def test_the_share_that_is_kept_is_the_one_asked_for(rate, seed):
    spread = np.sqrt(rate * (1 - rate) / SIZE)
    assert abs(kept(seed, rate).mean() - (1 - rate)) < 5 * spread


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_elements_do_not_depend_on_their_neighbours(rate):
    flat = kept(0, rate).ravel()
    for step in (1, 2, 3, 4, 16, 64, 2048, 2049):
        assert abs(correlation(flat[:-step], flat[step:])) < 5 / np.sqrt(SIZE), step


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_no_row_column_or_plane_is_dropped_more_than_another(axis):
    others = tuple(a for a in range(3) if a != axis)
    means = kept(1, 0.5).mean(others)
    spread = np.sqrt(0.25 * SHAPE[axis] / SIZE)
    assert np.abs(means - 0.5).max() < 5 * spread
    assert 0.5 < means.std() / spread < 1.6


def test_keys_give_masks_that_have_nothing_to_do_with_each_other():
    masks = [kept(seed).ravel() for seed in range(12)]
    masks += [
        np.asarray(keep_mask(key, 0.5, (SIZE,))).astype(float)
        for key in jax.random.split(jax.random.key(0), 12)
    ]
    spectra = [np.fft.rfft(mask - 0.5) for mask in masks]
    for i, (first, spectrum) in enumerate(zip(masks, spectra, strict=True)):
        for second, other in zip(masks[:i], spectra, strict=False):
            assert abs(correlation(first, second)) < 5 / np.sqrt(SIZE)
            # Nor is one the other, shifted.
            shifted = np.fft.irfft(spectrum * np.conj(other), SIZE) * 4 / SIZE
            assert np.abs(shifted).max() < 7 / np.sqrt(SIZE)


def test_every_bit_pattern_of_a_byte_is_equally_likely():
    """Chi-squared over runs of eight neighbours: 255 degrees of freedom."""
    runs = kept(2).ravel().astype(int).reshape(-1, 8) @ (1 << np.arange(8))
    counts = np.bincount(runs, minlength=256)
    expected = len(runs) / 256
    chi = ((counts - expected) ** 2 / expected).sum()
    assert 150 < chi < 390  # beyond five standard deviations either way


def test_the_mean_stays_and_the_gradient_is_the_mask():
    x, key = jnp.ones(SHAPE), jax.random.key(3)
    out = dropout(x, 0.3, key)
    np.testing.assert_allclose(out.mean(), 1.0, atol=5 * np.sqrt(0.3 / 0.7 / SIZE))
    np.testing.assert_allclose(np.unique(out), [0, kept_scale(0.3)], rtol=1e-6)
    np.testing.assert_array_equal(jax.grad(lambda x: dropout(x, 0.3, key).sum())(x), out)


def test_the_same_key_gives_the_same_mask_compiled_or_not():
    key = jax.random.key(4)
    compiled = jax.jit(lambda key: keep_mask(key, 0.2, SHAPE))(key)
    np.testing.assert_array_equal(compiled, keep_mask(key, 0.2, SHAPE))
