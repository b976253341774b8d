"""Encoder and decoder blocks against numpy; what pre- and post-norm mean."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.nn import BlockConfig, DecoderBlock, DecoderState, EncoderBlock
from tests import numpy_model as oracle

CONFIG = BlockConfig(dim=8, num_heads=2, mlp_dim=12)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 5, 8)).astype(np.float32)
SOURCE = RNG.normal(size=(2, 7, 10)).astype(np.float32)
VALID = np.arange(7) < np.array([[7], [3]])

CONFIGS = {
    "pre-norm": {},
    "post-norm": {"norm_first": False},
    "modern": {"norm": "rms", "activation": "swiglu", "use_bias": False, "num_kv_heads": 1},
    "qk-norm": {"qk_norm": True, "activation": "gelu"},
}


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_the_encoder_block_equals_numpy(changes):
    config = dataclasses.replace(CONFIG, **changes)
    build = lambda rngs: EncoderBlock(config, rngs=rngs)  # noqa: E731
    params = oracle.random_params(build)
    valid = np.arange(5) < np.array([[5], [3]])
    mask = xa.masks.key_padding(jnp.asarray(valid))
    out, _ = jax.jit(lambda p, x: xa.apply(build, p, x, mask=mask))(params, X)
    expected = oracle.block(
        params, X, allowed=valid[:, None, :], first=config.norm_first, act=config.activation
    )
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_the_decoder_block_equals_numpy(changes):
    config = dataclasses.replace(CONFIG, **changes)
    build = lambda rngs: DecoderBlock(config, 10, rngs=rngs)  # noqa: E731
    params = oracle.random_params(build)
    assert {"attention", "cross", "feedforward"} <= set(params)

    def call(p, x, source, valid):
        block = xa.functional.bind(build, p)
        state = DecoderState(source=block.cross.memory(source, valid=valid))
        return block(x, state, mask=xa.masks.causal(), return_weights=True)

    out, state = jax.jit(call)(params, X, SOURCE, VALID)
    expected = oracle.block(
        params,
        X,
        memory=SOURCE,
        allowed=np.tri(5, dtype=bool),
        source_allowed=VALID[:, None, :],
        first=config.norm_first,
        act=config.activation,
    )
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(state.weights.sum(-1), 1, rtol=1e-5)
    assert not np.any(np.asarray(state.weights)[1, :, :, 3:])


def test_a_decoder_block_without_a_source_has_no_cross_attention():
    build = lambda rngs: DecoderBlock(CONFIG, None, rngs=rngs)  # noqa: E731
    params = oracle.random_params(build)
    assert "cross" not in params and "cross_residual" not in params
    out, _ = jax.jit(lambda p, x: xa.apply(build, p, x, DecoderState(), mask=xa.masks.causal()))(
        params, X
    )
    expected = oracle.block(params, X, allowed=np.tri(5, dtype=bool))
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


def decoder_block(memory_dim=None, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    build = lambda rngs: DecoderBlock(config, memory_dim, rngs=rngs)  # noqa: E731
    params = oracle.random_params(build)
    return xa.functional.bind(build, params), params


def test_a_decoder_block_is_causal_unless_another_mask_is_named():
    block, params = decoder_block()
    call = jax.jit(lambda x, mask: block(x, DecoderState(), mask=mask)[0])
    everything, causal = xa.masks.window(None, None), np.tri(5, dtype=bool)
    for mask, allowed in [
        (None, causal),
        (xa.masks.causal() | xa.masks.prefix(3), causal | (np.arange(5) < 3)),
        (xa.masks.causal() & xa.masks.window(1), causal & ~np.tri(5, k=-2, dtype=bool)),
        (everything, np.ones((5, 5), bool)),
        (everything & xa.masks.lengths(jnp.array([5, 3])), (np.arange(5) < [[5], [3]])[:, None]),
        (jnp.asarray(causal.T[None, None]), causal.T),
    ]:
        expected = oracle.block(params, X, allowed=allowed)
        np.testing.assert_allclose(call(X, mask), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "mask",
    [
        xa.masks.key_padding(np.ones((2, 5), bool)),
        xa.masks.lengths(4) | xa.masks.segments(np.ones((2, 5), int)),
        jnp.ones((2, 1, 1, 5), bool),
        xa.masks.Mask(()),
    ],
    ids=["padding", "packing", "array", "nothing"],
)
def test_a_mask_that_leaves_causality_open_is_refused(mask):
    block, _ = decoder_block()
    with pytest.raises(ValueError, match=r"masks\.causal\(\) & mask, or masks\.window"):
        block(jnp.asarray(X), DecoderState(), mask=mask)


@pytest.mark.parametrize("rope", [None, 100.0], ids=["no rope", "rope"])
@pytest.mark.parametrize("chunks", [[1] * 5, [2, 3]], ids=["one by one", "in chunks"])
def test_a_decoder_block_step_by_step_equals_all_at_once(chunks, rope):
    block, _ = decoder_block(rope_base=rope)
    step = jax.jit(lambda x, state: block(x, state))
    whole, _ = block(jnp.asarray(X), DecoderState())
    state, pieces, start = DecoderState(cache=block.attention.cache((2,), 6)), [], 0
    for size in chunks:
        piece, state = step(X[:, start : start + size], state)
        pieces.append(piece)
        start += size
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole, rtol=2e-5, atol=2e-5)


def test_cross_attention_and_its_source_come_together():
    block, _ = decoder_block(10)
    x = jnp.asarray(X)
    with pytest.raises(ValueError, match="its state has no source"):
        block(x, DecoderState())
    source = DecoderState(source=block.cross.memory(jnp.asarray(SOURCE)))
    alone, _ = decoder_block()
    padding = xa.masks.key_padding(VALID)
    for state, options in [
        (source, {}),
        (DecoderState(), {"source_mask": padding}),
        (DecoderState(), {"return_weights": True}),
    ]:
        with pytest.raises(ValueError, match="has no cross-attention, but was given"):
            alone(x, state, **options)


def test_post_norm_output_is_normalised_and_pre_norm_output_is_not():
    for norm_first in (False, True):
        config = dataclasses.replace(CONFIG, norm_first=norm_first)
        build = lambda rngs, config=config: EncoderBlock(config, rngs=rngs)  # noqa: E731
        params = oracle.random_params(build)
        params["feedforward_residual"]["norm"] = {"scale": np.ones(8), "bias": np.zeros(8)}
        out, _ = jax.jit(lambda p, build=build: xa.apply(build, p, 3 * jnp.asarray(X)))(params)
        assert np.allclose(out.std(-1), 1, atol=1e-3) != norm_first


@pytest.mark.parametrize("rate", ["dropout_rate", "attention_dropout_rate"])
def test_dropout_follows_the_key(rate):
    config = dataclasses.replace(CONFIG, **{rate: 0.5})
    build = lambda rngs: EncoderBlock(config, rngs=rngs)  # noqa: E731
    params = oracle.random_params(build)
    call = jax.jit(lambda key: xa.apply(build, params, jnp.asarray(X), None, key)[0])
    np.testing.assert_allclose(call(None), oracle.block(params, X), rtol=2e-5, atol=2e-5)
    first, second = call(jax.random.key(0)), call(jax.random.key(1))
    assert not np.allclose(first, second)
    np.testing.assert_array_equal(first, call(jax.random.key(0)))
