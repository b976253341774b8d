"""Positions and position biases against closed forms."""

import cmath
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import crossattn as xa
from crossattn.nn.positions import LearnedPositions
from crossattn.ops.positions import fourier, fourier_dim
from crossattn.testing.case import array


@pytest.mark.parametrize(("dim", "longest"), [(10, 1e4), (5, 1e4), (4, 100.0)])
def test_sinusoids_are_those_of_the_paper_sines_first(dim, longest):
    """An odd number of features has one more sine."""
    positions = np.array([[0, 1, 7], [100, 511, 2]])
    found = xa.positions.sinusoidal(positions, dim, longest)
    assert found.shape == (2, 3, dim)
    for b, t in np.ndindex(2, 3):
        angles = [positions[b, t] / longest ** (2 * i / dim) for i in range((dim + 1) // 2)]
        expected = [*map(math.sin, angles), *map(math.cos, angles[: dim // 2])]
        np.testing.assert_allclose(found[b, t], expected, atol=1e-4)


def test_a_shift_of_sinusoids_is_one_rotation():
    dim, shift = 8, 5
    here = np.float64(xa.positions.sinusoidal(np.arange(20), dim))
    there = np.float64(xa.positions.sinusoidal(np.arange(20) + shift, dim))
    turn = np.exp(1j * shift / 10000.0 ** (np.arange(0, dim, 2) / dim))
    as_complex = [x[:, dim // 2 :] + 1j * x[:, : dim // 2] for x in (here, there)]
    np.testing.assert_allclose(as_complex[0] * turn, as_complex[1], atol=1e-5)


@pytest.mark.parametrize("base", [10000.0, 16.0])
def test_rotation_is_multiplication_by_a_complex_phase(base):
    x, positions = array("x", 2, 3, 2, 6), np.array([[0, 1, 2], [5, 40, 9]])
    found = np.asarray(xa.rotary.rotate(x, positions, base))
    for b, t, n, i in np.ndindex(2, 3, 2, 3):
        pair = complex(x[b, t, n, i], x[b, t, n, i + 3])
        turned = pair * cmath.exp(1j * positions[b, t] / base ** (2 * i / 6))
        np.testing.assert_allclose(found[b, t, n, i], turned.real, atol=2e-5)
        np.testing.assert_allclose(found[b, t, n, i + 3], turned.imag, atol=2e-5)
    with pytest.raises(ValueError, match="head size is 5; expected an even number"):
        xa.rotary.rotate(x[..., :5], positions)


def test_rotated_dot_products_depend_on_distance_only():
    q, k = array("q", 1, 1, 1, 8), array("k", 1, 1, 1, 8)

    def score(at, other):
        turned = (xa.rotary.rotate(x, np.array([[p]])) for x, p in ((q, at), (k, other)))
        return np.sum(np.prod([*map(np.float64, turned)], axis=0))

    scores = [score(3 + shift, 7 + shift) for shift in (0, 1, 20, 300)]
    np.testing.assert_allclose(scores, scores[0], atol=1e-4)
    assert abs(score(3, 8) - scores[0]) > 1e-2


def test_rotation_keeps_norms_and_position_zero():
    x, positions = array("x", 2, 5, 3, 8), np.arange(10).reshape(2, 5)
    found = np.asarray(xa.rotary.rotate(x, positions))
    norms = [np.linalg.norm(y, axis=-1) for y in (x, found)]
    np.testing.assert_allclose(*norms, rtol=1e-5)
    np.testing.assert_array_equal(found[0, 0], x[0, 0])
    assert np.abs(found - x)[1].max() > 0.1


def test_rotation_keeps_the_dtype_and_turns_in_float32():
    x = jnp.asarray(array("x", 1, 1, 1, 8), jnp.bfloat16)
    found = xa.rotary.rotate(x, np.array([[1001]]))
    assert found.dtype == jnp.bfloat16
    exact = xa.rotary.rotate(x.astype(jnp.float32), np.array([[1001]]))
    np.testing.assert_allclose(np.float32(found), exact, rtol=2.0**-8, atol=1e-5)


def bucket(distance, buckets, max_distance, bidirectional):
    """T5's bucket of k - q in whole numbers: powers are compared in place of logarithms."""
    start = 0
    if bidirectional:
        buckets //= 2
        start = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return start + distance
    steps = buckets - exact
    reached = [j for j in range(steps)
               if distance**steps * exact**j >= max_distance**j * exact**steps]  # fmt: skip
    return start + exact + max(reached)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (16, 50)])
def test_relative_buckets_are_t5s(buckets, max_distance, bidirectional):
    q, k = np.array([[0, 200, 77]]), np.arange(0, 401)[None]
    found = xa.bias.relative_buckets(q, k, buckets, max_distance, bidirectional)
    assert found.shape == (1, 3, 401)
    assert jnp.issubdtype(found.dtype, jnp.integer)
    for a, row in zip(q[0], found[0], strict=True):
        expected = [bucket(int(b - a), buckets, max_distance, bidirectional) for b in k[0]]
        np.testing.assert_array_equal(row, expected)


def test_relative_buckets_by_default_are_32_in_both_directions_up_to_128():
    q, k = np.array([150]), np.arange(301)
    found = xa.bias.relative_buckets(q, k)
    np.testing.assert_array_equal(found[0], [bucket(int(b) - 150, 32, 128, True) for b in k])
    assert set(np.asarray(found[0]).tolist()) == set(range(32)) - {16}


# Where the buckets after the exact ones begin in transformers 5.23 on torch 2.15. In the first four, one
# boundary is a whole distance (12 and 18; 42; 36 and 54; 45), and float32 rounds it up to the next.
STARTS = {
        (17, 27, False): [10, 11, 13, 14, 16, 19, 21, 24],
        (19, 196, False): [13, 17, 23, 31, 43, 58, 78, 106, 145],
        (48, 81, False): [26, 27, 28, 30, 31, 33, 35, 37, 38, 40, 42, 45, 47, 49, 52, 55, 57, 60,
        63, 67, 70, 74, 77],
        (110, 75, True): [29, 30, 31, 32, 33, 34, 35, 37, 38, 39, 41, 42, 44, 46, 47, 49, 51, 53,
        55, 57, 59, 61, 63, 65, 68, 70, 73],
        (128, 100, True): [34, 35, 36, 37, 39, 40, 42, 43, 45, 46, 48, 50, 51, 53, 55, 57, 59, 61,
        63, 66, 68, 71, 73, 76, 78, 81, 84, 87, 90, 94, 97],
        (32, 800, True): [15, 26, 45, 80, 143, 253, 450],
        (100, 128, True): [27, 29, 31, 33, 35, 37, 40, 43, 46, 49, 52, 55, 59, 63, 67, 72, 76, 82,
        87, 93, 99, 106, 113, 120],
        (32, 128, False): [19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113],
}  # fmt: skip


@pytest.mark.parametrize(("buckets", "max_distance", "bidirectional"), STARTS)
def test_relative_buckets_begin_where_transformers_rounds_them_to(
    buckets, max_distance, bidirectional
):
    starts = STARTS[buckets, max_distance, bidirectional]
    distances = np.arange(900)
    own = buckets // 2 if bidirectional else buckets
    near = np.minimum(distances, own // 2)
    expected = near + np.searchsorted(starts, distances, side="right")

    def find(q, k):
        return xa.bias.relative_buckets(q, k, buckets, max_distance, bidirectional)[..., 0]

    before, zero = distances, np.zeros(1, int)
    for call in (find, jax.jit(find)):
        np.testing.assert_array_equal(call(before, zero), expected)
        after = expected + own if bidirectional else 0 * expected
        np.testing.assert_array_equal(call(-before, zero)[1:], after[1:])


def test_a_linear_scaling_divides_positions_and_a_dynamic_one_begins_beyond_those_of_training():
    x, positions = array("x", 1, 4, 2, 6), np.array([[0, 2, 6, 8]])
    linear, dynamic = (xa.rotary.RopeScaling(kind, 2.0, 9) for kind in ("linear", "dynamic"))
    halves = xa.rotary.rotate(x, positions // 2)
    np.testing.assert_allclose(xa.rotary.rotate(x, positions, scaling=linear), halves, atol=1e-6)
    plain = xa.rotary.rotate(x, positions)
    np.testing.assert_allclose(xa.rotary.rotate(x, positions, scaling=dynamic), plain, atol=1e-6)
    further = xa.rotary.rotate(x, positions + 1, scaling=dynamic)
    assert np.abs(further - xa.rotary.rotate(x, positions + 1)).max() > 1e-3
    with pytest.raises(ValueError, match="kind 'linear' and factor 0.0; expected one of linear, "):
        xa.rotary.RopeScaling("linear", 0.0, 9)


@pytest.mark.parametrize("setting", [(1, 8, False), (3, 8, True), (32, 8, True), (32, 16, False)])
def test_too_few_buckets_or_distances_are_refused(setting):
    """transformers looks beside its table there and stops."""
    *sizes, bidirectional = setting
    with pytest.raises(ValueError, match="relative_buckets is .* and relative_distance"):
        xa.bias.relative_buckets(np.arange(3), np.arange(3), *setting)
    with pytest.raises(ValueError, match="relative_buckets is .* and relative_distance"):
        xa.nn.RelativeBias(2, *sizes, bidirectional=bidirectional, rngs=nnx.Rngs(0))


def test_a_relative_bias_looks_its_bucket_up_for_each_head():
    table, buckets = array("table", 6, 3), np.random.default_rng(0).integers(0, 6, (2, 4, 5))
    found = xa.bias.relative_bias(table, buckets)
    assert found.shape == (2, 3, 4, 5)
    for b, n, t, s in np.ndindex(2, 3, 4, 5):
        assert found[b, n, t, s] == table[buckets[b, t, s], n]


def test_a_relative_bias_teaches_its_table():
    buckets = np.array([[0, 2, 2], [1, 2, 0]])
    total = jax.grad(lambda table: jnp.sum(xa.bias.relative_bias(table, buckets)))
    gradient = total(jnp.zeros((4, 2)))
    np.testing.assert_array_equal(gradient, np.repeat([[2], [1], [3], [0]], 2, axis=1))


@pytest.mark.parametrize("heads", [1, 2, 8, 16, 3, 6, 12, 20])
def test_alibi_slopes_of_other_numbers_take_every_other_slope_of_the_double(heads):
    """Slopes of a power of two are geometric."""
    below = 2 ** int(math.log2(heads))
    first = [2.0 ** (-8 * (n + 1) / below) for n in range(below)]
    double = [2.0 ** (-8 * (n + 1) / (2 * below)) for n in range(0, 2 * below, 2)]
    expected = first + double[: heads - below]
    np.testing.assert_allclose(xa.bias.alibi_slopes(heads), expected, rtol=1e-6)


def test_alibi_falls_with_distance_at_each_heads_slope():
    q, k = np.array([[0, 4], [9, 2]]), np.array([[0, 1, 2], [3, 9, 5]])
    found = xa.bias.alibi(q, k, 4)
    assert found.shape == (2, 4, 2, 3)
    for b, n, t, s in np.ndindex(found.shape):
        expected = -(2.0 ** (-2 * (n + 1))) * abs(int(q[b, t]) - int(k[b, s]))
        np.testing.assert_allclose(found[b, n, t, s], expected, rtol=1e-6)


@pytest.mark.usefixtures("in_production")
@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint32"])
@pytest.mark.parametrize(
    "call",
    [
        lambda x: xa.bias.alibi(x, x[::-1], 4),
        lambda x: xa.bias.relative_buckets(x, x[::-1]),
        lambda x: xa.bias.relative_buckets(x, x[::-1], bidirectional=False),
        lambda x: xa.positions.sinusoidal(x, 8),
        lambda x: xa.rotary.rotate(np.ones((4, 2, 8), np.float32), x),
        LearnedPositions(130, 4, offset=2, rngs=nnx.Rngs(0)),
    ],
    ids=["alibi", "buckets", "buckets before", "sinusoids", "rotation", "learned"],
)
def test_narrow_and_unsigned_positions_mean_their_numbers(call, dtype):
    positions = np.array([0, 3, 90, 127])
    found = call(jnp.asarray(positions, dtype))
    np.testing.assert_array_equal(found, call(jnp.asarray(positions)))


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
