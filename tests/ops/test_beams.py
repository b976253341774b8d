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


def test_positions_stand_in_order_of_time_and_then_of_beams():
    x = array(B, J, X, H)
    folded = beams.fold(x)
    for position in range(X):
        for beam in range(J):
            np.testing.assert_array_equal(folded[:, position * J + beam], x[:, beam, position])
    np.testing.assert_array_equal(beams.unfold(folded, J), x)


def test_weights_come_back_beam_by_beam():
    folded = array(B, N, X * J, 7)
    weights = beams.unfold_weights(folded, J)
    assert weights.shape == (B, J, N, X, 7)
    np.testing.assert_array_equal(weights[:, 1, :, 2], folded[:, :, 2 * J + 1])


@pytest.mark.quick(2)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_a_beam_reads_the_past_that_the_table_names_and_nothing_else(own, biased):
    keys, values = array(B, J, X, K, H), array(B, J, X, K, HV)
    slots = lambda x: jnp.swapaxes(x, 1, 2).reshape(B, X * J, *x.shape[3:])  # noqa: E731
    cache = xa.Memory.empty((B,), (X + 1) * J, K, H, HV, bare=True)
    cache = cache.append(slots(keys), slots(values))
    table = np.broadcast_to(np.arange(J)[:, None], (B, J, X))
    if not own:
        table = RANDOM.integers(0, J, (B, J, X))
    padded = jnp.asarray(np.pad(table, ((0, 0), (0, 0), (0, 1))))
    T, first = 2, X - 2  # the newest two positions ask
    q, bias = array(B, J, T, N, H), array(N, T, X + 1) if biased else None

    @jax.jit
    def together(cache, q):
        mask, wide = beams.fold_mask(xa.masks.causal(offset=first), bias, padded, T)
        wide = None if wide is None else wide[None]
        folded = beams.fold(q.reshape(B, J, T, N * H)).reshape(B, T * J, N, H)
        out = xa.attend(folded, cache.keys, cache.values, mask & cache.mask(), bias=wide)
        return beams.unfold(out.reshape(B, T * J, N * HV), J).reshape(B, J, T, N, HV)

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
