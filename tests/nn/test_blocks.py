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
