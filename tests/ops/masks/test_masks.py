"""Masks mean what plain Python loops over examples, queries and keys say."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.ops import masks

T, S = 4, 6
VALID = np.array([[1, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]], bool)
LENGTHS = np.array([2, 6])
Q_LENGTHS = np.array([4, 1])
Q_SEGMENTS = np.array([[1, 1, 2, 0], [1, 2, 3, 3]])
K_SEGMENTS = np.array([[1, 2, 2, 0, 0, 1], [1, 1, 3, 2, 0, 3]])
Q_POSITIONS = np.array([[0, 2, 4, 1], [7, 5, 0, 3]])
K_POSITIONS = np.array([[5, 4, 3, 2, 1, 0], [0, 2, 4, 6, 8, 10]])
OFFSETS = np.array([0, 2])
DENSE = np.random.default_rng(0).random((2, 3, T, S)) > 0.5


def looped(may_read):
    """Bool [2 3 T S] of a Python predicate may_read(b, q, k), the same for each of 3 heads."""
    found = np.zeros((2, 3, T, S), bool)
    for b, n, q, k in np.ndindex(found.shape):
        found[b, n, q, k] = may_read(b, q, k)
    return found


def materialized(mask, t=T, s=S):
    """The mask as Bool [2 3 T S]."""
    array = mask.materialize(t, s)
    assert array.dtype == bool
    return np.broadcast_to(array, (2, 3, t, s))


@pytest.mark.parametrize(
    "drop",
    [lambda a, b: a and b, lambda a, b: a or b, lambda a, b: not a],
    ids=["and", "or", "not"],
)
def test_words_that_would_drop_a_mask_are_refused(drop):
    with pytest.raises(ValueError, match="neither true nor false; write a & b, a | b and ~a"):
        drop(xa.masks.causal(), xa.masks.lengths(3))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: xa.masks.lengths([4, 2]), "k_lengths is a list"),
        (lambda: xa.masks.segments(((1, 1),)), "q_segment_ids is a tuple"),
        (lambda: xa.masks.causal(offset=[1, 2]), r"offset is a list; .*jnp\.asarray\(\[1, 2\]\)"),
    ],
)
@pytest.mark.usefixtures("in_production")
def test_lists_of_integers_are_refused_by_name(make, named):
    with pytest.raises(ValueError, match=named):
        make()


TERMS = {
    "causal": (masks.causal(), lambda b, q, k: k <= q),
    "causal_offset": (masks.causal(offset=2), lambda b, q, k: k <= q + 2),
    "causal_negative_offset": (masks.causal(offset=-2), lambda b, q, k: k <= q - 2),
    "causal_offset_per_example": (masks.causal(OFFSETS), lambda b, q, k: k <= q + OFFSETS[b]),
    "causal_positions": (
        masks.causal(None, Q_POSITIONS, K_POSITIONS),
        lambda b, q, k: K_POSITIONS[b, k] <= Q_POSITIONS[b, q],
    ),
    "causal_key_positions": (
        masks.causal(k_positions=K_POSITIONS),
        lambda b, q, k: K_POSITIONS[b, k] <= q,
    ),
    "causal_key_positions_with_offset": (
        masks.causal(3, k_positions=K_POSITIONS),
        lambda b, q, k: K_POSITIONS[b, k] <= q + 3,
    ),
    "causal_positions_of_no_batch": (
        masks.causal(q_positions=Q_POSITIONS[1]),
        lambda b, q, k: k <= Q_POSITIONS[1, q],
    ),
    "window": (masks.window(1, 2), lambda b, q, k: q - 1 <= k <= q + 2),
    "window_left": (masks.window(2), lambda b, q, k: q - 2 <= k <= q),
    "window_of_itself": (masks.window(0, 0), lambda b, q, k: k == q),
    "window_unlimited_left": (masks.window(None, 1), lambda b, q, k: k <= q + 1),
    "window_unlimited_right": (masks.window(1, None), lambda b, q, k: k >= q - 1),
    "window_unlimited": (masks.window(None, None), lambda b, q, k: True),
    "window_offset_per_example": (
        masks.window(1, 0, OFFSETS),
        lambda b, q, k: q + OFFSETS[b] - 1 <= k <= q + OFFSETS[b],
    ),
    "window_positions": (
        masks.window(3, 1, None, Q_POSITIONS, K_POSITIONS),
        lambda b, q, k: Q_POSITIONS[b, q] - 3 <= K_POSITIONS[b, k] <= Q_POSITIONS[b, q] + 1,
    ),
    "prefix_of_nothing": (masks.prefix(0), lambda b, q, k: False),
    "prefix_per_example": (masks.prefix(LENGTHS), lambda b, q, k: k < LENGTHS[b]),
    "lengths": (masks.lengths(LENGTHS), lambda b, q, k: k < LENGTHS[b]),
    "lengths_of_both": (
        masks.lengths(LENGTHS, Q_LENGTHS),
        lambda b, q, k: k < LENGTHS[b] and q < Q_LENGTHS[b],
    ),
    "key_padding": (masks.key_padding(VALID), lambda b, q, k: VALID[b, k]),
    "key_padding_of_no_batch": (masks.key_padding(VALID[0]), lambda b, q, k: VALID[0, k]),
    "segments": (
        masks.segments(Q_SEGMENTS, K_SEGMENTS),
        lambda b, q, k: Q_SEGMENTS[b, q] == K_SEGMENTS[b, k] > 0,
    ),
}
ALONE = {name: (mask, looped(rule)) for name, (mask, rule) in TERMS.items()}
ALONE["explicit"] = (masks.explicit(DENSE), DENSE)
ALONE["explicit_of_one_head"] = (masks.explicit(DENSE[:, :1]), DENSE[:, :1])
PAIRED = ["causal", "key_padding", "segments", "explicit", "window_offset_per_example"]


@pytest.mark.parametrize("name", ALONE)
def test_a_term_is_its_loop_and_may_be_an_argument_of_jit(name):
    mask, expected = ALONE[name]
    expected = np.broadcast_to(expected, DENSE.shape)
    np.testing.assert_array_equal(materialized(mask), expected)
    found = jax.jit(lambda mask: mask.materialize(T, S))(mask)
    np.testing.assert_array_equal(np.broadcast_to(found, DENSE.shape), expected)


@pytest.mark.parametrize(("a", "b"), [*itertools.combinations_with_replacement(PAIRED, 2)])
def test_and_and_or_are_numpys_and_nest(a, b):
    (a, in_a), (b, in_b), (c, in_c) = ALONE[a], ALONE[b], ALONE["key_padding"]
    np.testing.assert_array_equal(materialized(a & b), in_a & in_b)
    np.testing.assert_array_equal(materialized(b | a), in_a | in_b)
    np.testing.assert_array_equal(materialized(c & (a | b)), in_c & (in_a | in_b))
    np.testing.assert_array_equal(materialized((a & b) | c), (in_a & in_b) | in_c)


def test_not_is_numpys():
    for name in PAIRED:
        mask, allowed = ALONE[name]
        np.testing.assert_array_equal(materialized(~mask), ~allowed)
        np.testing.assert_array_equal(materialized(~~mask), allowed)
    (a, in_a), (b, in_b) = ALONE["causal"], ALONE["key_padding"]
    np.testing.assert_array_equal(materialized(~(a & b)), ~(in_a & in_b))
    np.testing.assert_array_equal(materialized(~a & (b | ~a)), ~in_a & (in_b | ~in_a))
    assert not materialized(~masks.Mask(())).any()


@pytest.mark.quick(2)
@pytest.mark.parametrize("backend", ["reference", "chunked", "cpu", "jax_nn", None])
def test_every_kernel_takes_a_negated_mask(backend):
    q, k = (np.random.default_rng(n).normal(size=(2, n, 3, 8)).astype(np.float32) for n in (T, S))
    mask, allowed = ~ALONE["key_padding"][0] & masks.causal(2), ~ALONE["key_padding"][1]
    expected = xa.attend(q, k, k, allowed & np.tri(T, S, 2, bool), backend="reference")
    try:
        found = xa.attend(q, k, k, mask, backend=backend)
    except NotImplementedError as refusal:  # no compiler here
        assert backend == "cpu" and "compile" in str(refusal) or "several devices" in str(refusal)
        return
    np.testing.assert_allclose(found, expected, atol=2e-6)
    assert "~(KeyPadding) & Band" in xa.explain(q, k, k, mask).call


@pytest.mark.usefixtures("in_production")
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_arrays_combine_from_either_side(array):
    mask, allowed = ALONE["causal_positions"]
    dense, flat = array(DENSE), array(DENSE[0, 0])
    for combined, expected in [
        (dense & mask, DENSE & allowed),
        (mask & dense, DENSE & allowed),
        (dense | mask, DENSE | allowed),
        (mask | dense, DENSE | allowed),
        (flat & mask, DENSE[0, 0] & allowed),
        (mask & flat, DENSE[0, 0] & allowed),
    ]:
        assert isinstance(combined, xa.Mask)
        np.testing.assert_array_equal(materialized(combined), expected)


@pytest.mark.usefixtures("in_production")
@pytest.mark.parametrize("array", [np.ones, jnp.ones], ids=["numpy", "jax"])
@pytest.mark.parametrize(
    "call",
    [
        masks.explicit,
        lambda x: masks.causal() & x,
        lambda x: x & masks.causal(),
        lambda x: masks.causal() | x,
        lambda x: x | masks.causal(),
        lambda x: xa.attend(*[np.ones((3, 4, 3, 8), np.float32)] * 3, x),
        lambda x: xa.attention_stats(*[np.ones((3, 4, 3, 8), np.float32)] * 2, x),
    ],
    ids=["explicit", "and", "rand", "or", "ror", "attend", "attention_stats"],
)
def test_an_array_of_three_axes_is_refused(array, call):
    # Three examples and three heads, so that either meaning would fit.
    with pytest.raises(ValueError, match=r"\(3, 4, 4\).*\[B T S\].*\[N T S\]") as refusal:
        call(array((3, 4, 4), bool))
    assert all(way in str(refusal.value) for way in ("mask[:, None]", "mask[None]"))


@pytest.mark.usefixtures("in_production")
@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: masks.key_padding(np.ones((2, S))), "valid has dtype float"),
        (lambda: masks.explicit(np.zeros((1, T, S), np.float32)), "allowed has dtype float"),
        (lambda: masks.segments(np.ones((2, T), np.float32)), "q_segment_ids has dtype float"),
        (lambda: masks.causal(q_positions=np.zeros((2, T))), "q_positions has dtype float"),
        (lambda: masks.prefix(2.5), "length has dtype float"),
        (lambda: masks.window(2.5), "left is 2.5; expected a whole number"),
        (lambda: masks.causal(offset=2**31), "offset goes from 2147483648"),
        (lambda: masks.lengths(2**40), "k_lengths goes from .*; expected integers that int32"),
        (lambda: masks.segments(np.full((1, T), 2**31, np.uint32)), "q_segment_ids goes from"),
        (lambda: masks.key_padding(VALID).materialize(T, S + 1), "length 6; expected S = 7"),
        (lambda: masks.segments(Q_SEGMENTS, K_SEGMENTS).materialize(5, S), "expected T = 5"),
        (
            lambda: xa.attend(
                *[np.ones((2, 2, 4, 2, 8), np.float32)] * 3,
                masks.explicit(np.ones((2, 2, 4, 4), bool)) & masks.causal(),
            ),
            r"\(2, 2, 4, 4\).*all 5 axes",
        ),
        (
            lambda: xa.attend(
                *[np.ones((2, 4, 2, 8), np.float32)] * 3,
                masks.segments(np.ones((2, 4), int), np.ones((3, 4), int)),
            ),
            r"mask: Segments of \(2, 4\) and \(3, 4\) has arrays that do not fit each other",
        ),
        (
            lambda: xa.attend(
                *[np.ones((2, 4, 2, 8), np.float32)] * 3,
                masks.causal() & masks.key_padding(np.ones((3, 4), bool)),
            ),
            r"mask: KeyPadding of \(3, 4\) is \(3, 1, 1, 4\); expected .* = \(2, 2, 4, 4\)",
        ),
    ],
)
def test_what_is_no_mask_is_refused_by_name(build, said):
    with pytest.raises(ValueError, match=said):
        build()


@pytest.mark.slow
def test_without_batch_axes_three_are_all():
    q, k = (np.random.default_rng(n).normal(size=(n, 3, 8)).astype(np.float32) for n in (T, S))
    dense = DENSE[0]
    expected = xa.attend(q[None], k[None], k[None], dense[None], backend="reference")[0]
    whole = masks.explicit(dense[None])
    for mask in (dense, whole, whole & (masks.lengths(S) | whole), ~~whole):
        for backend in ("reference", "chunked"):
            found = xa.attend(q, k, k, mask, backend=backend)
            np.testing.assert_allclose(found, expected, atol=2e-6)


def test_segments_of_one_sequence_serve_queries_and_keys():
    rule = looped(lambda b, q, k: k < T and Q_SEGMENTS[b, q] == Q_SEGMENTS[b, k] > 0)
    found = materialized(masks.segments(Q_SEGMENTS), T, T)
    np.testing.assert_array_equal(found, rule[..., :T])


def test_any_number_of_batch_axes():
    valid = np.random.default_rng(1).random((3, 1, 2, S)) > 0.5
    segments = np.random.default_rng(2).integers(0, 3, (3, 1, 2, S))
    mask = masks.key_padding(valid) & masks.segments(segments[..., :T], segments) & masks.causal()
    found = np.broadcast_to(mask.materialize(T, S), (3, 1, 2, 5, T, S))
    for a, c in np.ndindex(3, 2):
        k_segment_ids, q_segment_ids = segments[a, 0, c], segments[a, 0, c, :T, None]
        same = (q_segment_ids == k_segment_ids) & (q_segment_ids > 0)
        expected = same & np.tri(T, S, dtype=bool) & valid[a, 0, c]
        np.testing.assert_array_equal(found[a, 0, c], np.broadcast_to(expected, (5, T, S)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_additive_form_is_zero_or_minus_infinity(dtype):
    mask, allowed = ALONE["key_padding"]
    bias = mask.to_bias(T, S, dtype=dtype)
    assert bias.dtype == dtype
    bias = np.broadcast_to(np.float32(bias), DENSE.shape)
    np.testing.assert_array_equal(bias, np.where(allowed, 0, -np.inf))
    assert mask.to_bias(T, S).dtype == jnp.float32


ENDS = np.array([-(2**31) + 1, -5, 0, 7, 2**31 - 2])


@pytest.mark.parametrize(
    ("left", "right"), [(3, 2**31 - 1), (None, 2**31), (2**40, 2), (2**30 - 1, 2**29), (-3, 5)]
)
def test_limits_of_a_window_never_wrap(left, right):
    low, high = (np.inf if x is None or x >= 2**30 else x for x in (left, right))
    for q, positions in [(np.arange(5), {}), (ENDS, dict(q_positions=ENDS, k_positions=ENDS))]:
        window = masks.window(left, right, **positions)
        expected = (-low <= q - q[:, None]) & (q - q[:, None] <= high)
        np.testing.assert_array_equal(window.materialize(5, 5).reshape(5, 5), expected)
        x, values = np.ones((1, 5, 1, 4), np.float32), np.eye(5, dtype=np.float32)[None, :, None]
        found = xa.attend(x, x, values, window, backend="chunked")[0, :, 0]
        np.testing.assert_array_equal(found > 0, expected)


@pytest.mark.usefixtures("in_production")
@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "uint32", "int64"])
def test_narrow_and_unsigned_integers_mean_their_numbers(dtype):
    cast = lambda x: np.asarray(x).astype(dtype)  # noqa: E731
    for mask, name in [
        (masks.window(3, 1, None, cast(Q_POSITIONS), cast(K_POSITIONS)), "window_positions"),
        (masks.causal(offset=cast(OFFSETS)), "causal_offset_per_example"),
        (masks.segments(cast(Q_SEGMENTS), cast(K_SEGMENTS)), "segments"),
        (masks.lengths(cast(LENGTHS), cast(Q_LENGTHS)), "lengths_of_both"),
    ]:
        assert {x.dtype for x in jax.tree.leaves(mask)} == {np.dtype("int32")}
        np.testing.assert_array_equal(materialized(mask), ALONE[name][1])
