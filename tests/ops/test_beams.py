"""Beams that share a cache read what they would read if each had its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.ops import beams
from tests.closeness import close

B, J, X, K, H, HV, N = 2, 3, 5, 2, 4, 6, 4
RANDOM = np.random.default_rng(0)


def array(*shape):
    return jnp.asarray(RANDOM.normal(size=shape), jnp.float32)


def grown(pieces):
    """A cache that got ``pieces`` positions at a time, and the keys and values of each beam [B J X ..]."""
    keys, values = array(B, J, X, K, H), array(B, J, X, K, HV)
    cache, start = xa.Memory.empty((B,), (X + 1) * J, K, H, HV), 0
    for piece in pieces:
        part = slice(start, start + piece)
        cache, start = beams.grow(cache, keys[:, :, part], values[:, :, part]), start + piece
    return cache, keys, values


@pytest.mark.parametrize("pieces", [(1, 1, 1, 1, 1), (2, 3), (5,)])
def test_slots_stand_in_order_of_time_and_then_of_beams(pieces):
    cache, keys, _ = grown(pieces)
    assert cache.positions is not None and cache.valid is not None
    in_order = jnp.moveaxis(keys, 1, 2).reshape(B, X * J, K, H)
    np.testing.assert_array_equal(cache.keys[:, : X * J], in_order)
    np.testing.assert_array_equal(cache.positions[0, : X * J], np.repeat(np.arange(X), J))
    np.testing.assert_array_equal(cache.length, X * J)
    assert cache.valid.sum() == B * X * J


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_a_beam_reads_the_past_that_the_table_names_and_nothing_else(own, biased):
    cache, keys, values = grown((2, 3))
    table = np.broadcast_to(np.arange(J)[:, None], (B, J, X))
    if not own:
        table = RANDOM.integers(0, J, (B, J, X))
        padded = np.pad(table, ((0, 0), (0, 0), (0, 1)))
        cache = xa.Memory(**{**vars(cache), "ancestors": jnp.asarray(padded)})
    T, first = 2, X - 2  # the newest two positions ask
    q, bias = array(B, J, T, N, H), array(N, T, X + 1) if biased else None

    @jax.jit
    def together(cache, q):
        mask, wide = beams.across(cache, xa.masks.causal(offset=first), bias, J, T)
        wide = None if wide is None else wide[None]
        folded = q.reshape(B, J * T, N, H)
        out = xa.attend(folded, cache.keys, cache.values, mask & cache.mask(), bias=wide)
        return out.reshape(B, J, T, N, HV)

    found = together(cache, q)
    for b in range(B):
        for j in range(J):
            past = table[b, j], np.arange(X)
            expected = xa.attend(
                q[b, j],
                keys[b][past],
                values[b][past],
                xa.masks.causal(offset=first),
                bias=None if bias is None else bias[..., :X],
                backend="reference",
            )
            close(found[b, j], expected)
