"""Ranges say exactly what the mask says, and only what cannot be said in less is left as a matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import crossattn as xa
from crossattn.ops.masks.ranges import ranges

B, T, S = 2, 5, 7
RANDOM = np.random.default_rng(0)
m = xa.masks

TERMS = {
    "causal": m.causal(),
    "causal_from_an_offset": m.causal(offset=2),
    "causal_from_an_offset_each": m.causal(offset=np.array([-2, 3])),
    "causal_at_positions": m.causal(q_positions=np.array([4, 0, 9, 2, 1])),
    "causal_among_positions": m.causal(
        q_positions=RANDOM.integers(0, 9, (B, T)), k_positions=RANDOM.integers(0, 9, (B, S))
    ),
    "window": m.window(2, 1),
    "window_among_positions": m.window(1, 1, k_positions=RANDOM.permutation(S)),
    "everything": m.window(None, None),
    "prefix": m.prefix(np.array([0, 4])),
    "lengths": m.lengths(np.array([3, 9]), np.array([5, 2])),
    "padding": m.key_padding(RANDOM.random((B, S)) < 0.5),
    "segments": m.segments(RANDOM.integers(0, 3, (B, T)), RANDOM.integers(0, 3, (B, S))),
    "explicit": m.explicit(RANDOM.random((B, 3, T, S)) < 0.5),
}
LINEAR = [name for name in TERMS if name != "explicit"]


def matrix(mask):
    """What the ranges allow, by comparisons of numbers one by one."""
    found = ranges(mask, T, S)
    allowed = np.array(found.rest.materialize(T, S)) & np.ones((B, 1, T, S), bool)
    first, last = (
        np.broadcast_to(default if x is None else np.asarray(x), (B, T))
        for x, default in ((found.first, 0), (found.last, S))
    )
    for b, t, s in np.ndindex(B, T, S):
        may = first[b, t] <= s < last[b, t]
        for limits in found.limits:
            number = np.broadcast_to(limits.numbers, (B, S))[b, s]
            low, high = (np.broadcast_to(x, (B, T))[b, t] for x in (limits.low, limits.high))
            may &= low <= number <= high
        allowed[b, :, t, s] &= may
    return allowed


def same(mask):
    expected = np.broadcast_to(mask.materialize(T, S), np.shape(matrix(mask)))
    np.testing.assert_array_equal(matrix(mask), expected)


@pytest.mark.parametrize("name", TERMS)
def test_a_term_is_what_its_ranges_say(name):
    same(TERMS[name])


@settings(max_examples=40, deadline=None)
@given(names=st.lists(st.sampled_from(sorted(TERMS)), min_size=2, max_size=4), either=st.booleans())
def test_a_combination_is_what_its_ranges_say(names, either):
    first, second, *others = (TERMS[name] for name in names)
    mask = first | second if either else first & second
    for other in others:
        mask = mask & other
    same(mask)


@pytest.mark.parametrize("name", LINEAR)
def test_no_term_but_a_matrix_needs_a_matrix(name):
    found = ranges(TERMS[name], T, S)
    assert not found.rest.terms
    assert all(x.size <= B * max(T, S) for x in jax.tree.leaves(found))


def test_a_prefix_that_sees_itself_is_one_interval():
    mask = m.causal() | m.prefix(jnp.array([2, 4]))
    found = ranges(mask, T, S)
    assert not found.rest.terms and not found.limits
    np.testing.assert_array_equal(found.last, [[2, 2, 3, 4, 5], [4, 4, 4, 4, 5]])


def test_ranges_are_made_under_jit():
    found = jax.jit(lambda n: ranges(m.causal() & m.lengths(n), T, S))(jnp.array([3, 6]))
    np.testing.assert_array_equal(found.last, [[1, 2, 3, 3, 3], [1, 2, 3, 4, 5]])
