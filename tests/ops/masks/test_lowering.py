"""Masks as what fused kernels take: the same mask, said in fewer words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.ops.masks import lowering

T, S = 6, 9
m = xa.masks
VALID = np.random.default_rng(0).random((2, S)) < 0.5
SEGMENTS = np.array([[1, 1, 2, 2, 0, 3], [1, 1, 1, 1, 1, 1]])
KEY_SEGMENTS = np.array([[1, 2, 2, 3, 3, 3, 0, 0, 1], [0, 1, 1, 1, 1, 1, 1, 1, 1]])
SHORT, FEW = np.array([0, 4]), np.array([2, 6])
MASKS = {
    "nothing": m.Mask(()),
    "causal": m.causal(),
    "window_to_the_left": m.window(2),
    "two_windows": m.window(3) & m.window(1),
    "window_ahead": m.window(2, 1),
    "causal_with_offset": m.causal(offset=2),
    "lengths": m.lengths(SHORT, FEW),
    "lengths_twice": m.lengths(SHORT) & m.prefix(3) & m.lengths(8, 5),
    "lengths_and_causal": m.lengths(SHORT) & m.causal(),
    "lengths_and_window": m.lengths(SHORT) & m.window(1),
    "padding_and_causal": m.key_padding(VALID) & m.causal(),
    "segments": m.segments(SEGMENTS, KEY_SEGMENTS) & m.causal(),
    "either": m.causal() | m.prefix(SHORT),
}


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
    found = said(lowered) & lowered.rest.materialize(T, S)
    np.testing.assert_array_equal(found, np.broadcast_to(mask.materialize(T, S), found.shape))


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


@pytest.mark.parametrize("backend", ["flash_tpu", "splash", "tokamax"])
def test_a_kernel_that_is_not_there_says_so_in_a_sentence(backend):
    q = jnp.ones((1, 2, 1, 8))
    try:
        out = xa.attend(q, q, q, backend=backend)
    except NotImplementedError as refusal:
        assert "runs on TPU" in str(refusal) or "pip install" in str(refusal)
    else:
        np.testing.assert_allclose(out, q, rtol=1e-6)


@pytest.mark.parametrize("name", MASKS)
def test_what_reads_nothing_and_what_reads_poison_are_counted_right(name):
    mask, spoilt = MASKS[name], np.array([1, 8])
    q, k = np.ones((2, T, 4, 2), np.float32), np.ones((2, S, 2, 2), np.float32)
    k[1, spoilt, 0] = np.nan
    prepared = lowering.prepare(
        *map(jnp.asarray, (q, k, k)), None, mask, lowering.lower(mask, T, S)
    )
    allowed = np.broadcast_to(mask.materialize(T, S), (2, 4, T, S))
    poison = np.zeros((2, 4, 1, S), bool)
    poison[1, :2, :, spoilt] = True
    for found, expected in (
        (prepared.reads_nothing, ~allowed.any(-1)),
        (prepared.reads_poison, (allowed & poison).any(-1)),
    ):
        np.testing.assert_array_equal(np.broadcast_to(found, (2, 4, T)), expected)
