"""Masks as what fused kernels take: the same mask, said in fewer words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.ops.masks import lowering
from tests.ops.masks.table import MASKS, S, T, whole


def said(lowered):
    """The matrix of a lowered mask without its rest, by comparisons."""
    query, key = np.arange(T)[:, None], np.arange(S)[None, :]
    allowed = np.ones((2, 1, T, S), bool)
    if lowered.causal:
        allowed &= key <= query
    if lowered.left is not None:
        allowed &= key >= query - lowered.left
    for length, index in ((lowered.k_lengths, key), (lowered.q_lengths, query)):
        if length is not None:
            allowed &= index < np.reshape(length, (-1, 1, 1, 1))
    return allowed


@pytest.mark.parametrize("name", MASKS)
def test_what_is_lowered_and_the_rest_are_the_mask(name):
    mask = MASKS[name]
    lowered = lowering.lower(mask, T, S)
    np.testing.assert_array_equal(said(lowered) & whole(lowered.rest), whole(mask))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("t", "s"), [(T, S), (9, 3)])
def test_what_is_lowered_leaves_a_key_to_every_query_but_for_lengths_of_zero(name, t, s):
    lowered = lowering.lower(MASKS[name], t, s)
    query, key = np.arange(t)[:, None], np.arange(s)[None, :]
    allowed = (key <= query) | (not lowered.causal)
    if lowered.left is not None:
        allowed &= key >= query - lowered.left
    shortest = 1 if lowered.k_lengths is not None else s
    assert allowed[:, :shortest].any(-1).all()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("causal", {"is_causal": True}),
        ("window_to_the_left", {"is_causal": True, "local_window_size": (2, 0)}),
        ("lengths_and_causal", {"is_causal": True, "key_value_seq_lengths": [1, 4]}),
    ],
)
def test_jax_nn_gets_words_and_no_matrix(monkeypatch, name, words):
    seen = {}

    def kernel(q, k, v, bias, mask, **keywords):
        seen.update(keywords, matrix=mask)
        return jnp.zeros_like(q)

    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    q, k = jnp.ones((2, T, 2, 4)), jnp.ones((2, S, 2, 4))
    xa.attend(q, k, k, MASKS[name], backend="jax_nn")
    assert seen.pop("matrix") is None
    assert {**words, "scale": 0.5, "implementation": "xla"} == {
        key: x.tolist() if isinstance(x, jax.Array) else x for key, x in seen.items()
    }


@pytest.mark.parametrize("name", MASKS)
def test_what_reads_nothing_and_what_reads_poison_are_counted_right(name):
    mask, spoilt = MASKS[name], np.array([1, 8])
    q, k = np.ones((2, T, 4, 2), np.float32), np.ones((2, S, 2, 2), np.float32)
    k[1, spoilt, 0] = np.nan
    prepared = lowering.prepare(
        *map(jnp.asarray, (q, k, k)), None, mask, lowering.lower(mask, T, S)
    )
    allowed = whole(mask)
    poison = np.zeros((2, 4, 1, S), bool)
    poison[1, :2, :, spoilt] = True
    for found, expected in (
        (prepared.reads_nothing, ~allowed.any(-1)),
        (prepared.reads_poison, (allowed & poison).any(-1)),
    ):
        np.testing.assert_array_equal(np.broadcast_to(found, (2, 4, T)), expected)
