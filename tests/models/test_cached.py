"""Step-by-step decoding through caches equals the full forward, for every position scheme."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.models import Decoder, Transformer, decoder, transformer
from tests import numpy_model as oracle

RNG = np.random.default_rng(0)
T, CACHE = 5, 7
TOKENS = RNG.integers(3, 64, (2, 3, T))  # [B J T]: each row's beams differ
SOURCE = RNG.integers(3, 64, (2, 6))
VALID = (np.arange(6) < np.array([[6], [4]])).astype(np.int32)


def steps(model, states, tokens, **options):
    """Logits of one token after the other, and the cross-attention weights if asked for."""

    def one(states, token):
        logits, states, *weights = model.decode_step(token[..., None], states, **options)
        return states, (logits[..., 0, :], weights)

    _, (logits, weights) = jax.lax.scan(one, states, jnp.moveaxis(tokens, -1, 0))
    return jnp.moveaxis(logits, 0, -2), *weights


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("positions", "scan"),
    [
        ("sinusoidal", False),
        ("learned", False),
        ("rope", False),
        ("rope", True),
        ("relative", False),
        ("relative", True),
        ("alibi", False),
        ("none", False),
    ],
)
def test_cached_steps_of_a_language_model_equal_its_full_forward(positions, scan):
    config = decoder.tiny(positions=positions, scan=scan)
    build = lambda rngs: Decoder(config, rngs=rngs)  # noqa: E731
    params = oracle.random_params(build)

    def both(params):
        model = xa.functional.bind(build, params)
        [stepped] = steps(model, model.prefill(2, 3, CACHE), jnp.asarray(TOKENS))
        return stepped, model(jnp.asarray(TOKENS.reshape(6, T)))

    stepped, full = jax.jit(both)(params)
    np.testing.assert_allclose(stepped.reshape(full.shape), full, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scan", "changes"),
    [
        (False, {}),
        (True, {"norm_first": False, "num_kv_heads": 1}),
        (False, {"norm": "rms", "qk_norm": True, "rope_base": 100.0}),
    ],
    ids=["looped", "scanned, post-norm, grouped", "rms, qk-norm, rope"],
)
def test_cached_steps_of_a_translator_equal_its_full_forward(scan, changes):
    positions = "rope" if "rope_base" in changes else "sinusoidal"
    config = transformer.tiny(scan=scan, positions=positions, encoder_layers=1)
    config = dataclasses.replace(config, block=config.block.changed(**changes))
    build = lambda rngs: Transformer(config, rngs=rngs)  # noqa: E731
    params = oracle.random_params(build)

    def both(params):
        model = xa.functional.bind(build, params)
        read = dict(source=jnp.asarray(SOURCE), source_segment_ids=jnp.asarray(VALID))
        states = model.prefill(2, 3, CACHE, **read)
        stepped = steps(model, states, jnp.asarray(TOKENS), return_weights=True)
        full = model(
            jnp.repeat(SOURCE, 3, axis=0),
            jnp.asarray(TOKENS.reshape(6, T)),
            source_segment_ids=jnp.repeat(VALID, 3, axis=0),
            target_segment_ids=jnp.ones((6, T), jnp.int32),
            return_weights=True,
        )
        return stepped, full

    (stepped, step_weights), (full, weights) = jax.jit(both)(params)
    np.testing.assert_allclose(stepped.reshape(full.shape), full, rtol=1e-3, atol=1e-3)
    step_weights = np.moveaxis(step_weights[..., 0, :], 0, -2)  # [T L B J N S] -> [L B J N T S]
    np.testing.assert_allclose(step_weights.reshape(weights.shape), weights, rtol=1e-3, atol=1e-5)
