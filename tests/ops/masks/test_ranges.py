"""Ranges say exactly what the mask says, and only what cannot be said in less is left as a matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import crossattn as xa
from crossattn.ops.masks.ranges import ranges
from tests.ops.masks.table import MASKS, TERMS, S, T, whole

B, m = 2, xa.masks


def matrix(mask):
    """Returns the matrix of a mask's ranges, by comparisons of numbers one by one."""
    found = ranges(mask, T, S)
    allowed = np.array(whole(found.rest))
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
    np.testing.assert_array_equal(matrix(mask), whole(mask))


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_what_its_ranges_say(name):
    same(MASKS[name])


@settings(max_examples=40, deadline=None)
@given(names=st.lists(st.sampled_from(sorted(MASKS)), min_size=2, max_size=4), either=st.booleans())
def test_a_combination_is_what_its_ranges_say(names, either):
    first, second, *others = (MASKS[name] for name in names)
    mask = first | second if either else first & second
    for other in others:
        mask = mask & other
    same(mask)


@pytest.mark.parametrize("name", TERMS)
def test_no_term_but_a_matrix_needs_a_matrix(name):
    found = ranges(TERMS[name], T, S)
    assert not found.rest.terms
    assert all(x.size <= B * max(T, S) for x in jax.tree.leaves(found))


def test_a_prefix_that_sees_itself_is_one_interval():
    mask = m.causal() | m.prefix(jnp.array([2, 4]))
    found = jax.jit(lambda mask: ranges(mask, T, S))(mask)
    assert not found.rest.terms and not found.limits
    np.testing.assert_array_equal(found.last, [[2, 2, 3, 4, 5, 6], [4, 4, 4, 4, 5, 6]])
