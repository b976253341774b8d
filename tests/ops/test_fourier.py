"""Fourier features of a grid against their formula, place by place."""

import numpy as np
import pytest

from crossattn.ops.positions import fourier, fourier_dim


@pytest.mark.parametrize(
    ("shape", "bands", "resolution"),
    [((5,), 3, None), ((3, 4), 2, None), ((3, 4), 1, (8, 6)), ((2, 3, 1), 4, (4, 9, 7))],
)
def test_features_are_those_of_the_formula_at_every_place(shape, bands, resolution):
    found = np.asarray(fourier(shape, bands, resolution))
    assert found.shape == (*shape, fourier_dim(len(shape), bands))
    for index in np.ndindex(shape):
        places = [
            -1 + 2 * i / (size - 1) if size > 1 else -1
            for i, size in zip(index, shape, strict=True)
        ]
        angles = [
            np.pi * place * (1 + (most / 2 - 1) * band / (bands - 1) if bands > 1 else 1)
            for place, most in zip(places, resolution or shape, strict=True)
            for band in range(bands)
        ]
        expected = np.concatenate([places, np.sin(angles), np.cos(angles)])
        np.testing.assert_allclose(found[index], expected, rtol=1e-5, atol=1e-6)


def test_a_picture_of_half_the_pixels_stands_in_the_same_places():
    large, small = (np.asarray(fourier((n, n), 3, (9, 9))) for n in (9, 5))
    np.testing.assert_allclose(large[::2, ::2], small, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "bands", "resolution"),
    [((), 2, None), ((3, 0), 2, None), ((3,), 0, None), ((3,), 2, (3, 3))],
)
def test_a_grid_of_nothing_is_refused(shape, bands, resolution):
    with pytest.raises(ValueError, match="expected one place or more on every axis"):
        fourier(shape, bands, resolution)
