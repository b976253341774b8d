"""attend, statistics, models and decoding under the settings with which careful programs run JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.decode import generate, sampling
from crossattn.models import Transformer, transformer
from tests.ops.masks import table
from tests.ops.masks.table import S, T

DRAW = np.random.default_rng(0)
QKV = tuple(jnp.asarray(DRAW.normal(size=(2, n, 4, 8)), jnp.float32) for n in (T, S, S))
MASKS = {name: jax.tree.map(jnp.asarray, mask) for name, mask in table.MASKS.items()}


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        with jax.debug_nans(True):
            yield


@functools.partial(jax.jit, static_argnums=0)
def gradients(backend, q, k, v, mask):
    def energy(q, k, v):
        return jnp.sum(jnp.sin(xa.attend(q, k, v, mask, backend=backend)))

    return jax.grad(energy, (0, 1, 2))(q, k, v)


@pytest.mark.quick(1)
@pytest.mark.parametrize("backend", ["cpu", "chunked", "reference", "jax_nn"])
def test_every_backend_runs_where_broadcasts_and_promotions_are_errors(backend):
    narrow = tuple(x.astype(jnp.bfloat16) for x in QKV)
    for mask in (MASKS["window_ahead"] & MASKS["padding"], MASKS["lengths"] | MASKS["matrix"]):
        for operands in (QKV, narrow):
            try:
                found = gradients(backend, *operands, mask)
            except NotImplementedError:
                pytest.skip(f"{backend} refuses the call on this platform, and says so")
            with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
                expected = gradients("reference", *operands, mask)
            for mine, one in zip(found, expected, strict=True):
                tolerance = 1e-4 if mine.dtype == jnp.float32 else 0.1
                np.testing.assert_allclose(
                    *(np.asarray(x, np.float32) for x in (mine, one)),
                    rtol=tolerance,
                    atol=tolerance,
                )


def test_infinities_stay_inside():
    with jax.debug_infs(True):
        for backend in ("chunked", "reference"):
            assert np.isfinite(gradients(backend, *QKV, MASKS["lengths"])[0]).all()


@pytest.mark.parametrize("name", MASKS)
def test_masks_become_matrices_and_biases(name):
    assert MASKS[name].to_bias(T, S).shape[-2:] == (T, S)


def test_statistics_parts_and_split_memories():
    q, k, v = QKV
    spans = jnp.zeros((2, T), jnp.int32), jnp.full((2, T), 4)

    def loss(q):
        found = xa.attention_stats(q, k, MASKS["window_ahead"], top_k=2, spans=spans)
        return jnp.sum(found.entropy) + jnp.sum(found.top_weights)

    assert np.isfinite(jax.grad(loss)(q)).all()
    first, second = (
        xa.attend(q, k[:, s], v[:, s], return_lse=True) for s in (slice(4), slice(4, None))
    )
    np.testing.assert_allclose(xa.merge(*first, *second)[0], xa.attend(*QKV), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["rope", "relative", "alibi"])
def test_models_train_and_decode(positions):
    block = transformer.tiny().block
    config = transformer.tiny(
        positions=positions,
        encoder_layers=1,
        decoder_layers=1,
        block=transformer.replace(block, dtype=jnp.bfloat16, dropout_rate=0.1),
    )
    build = lambda rngs: Transformer(config, rngs=rngs)  # noqa: E731
    params = xa.init(build, jax.random.key(0))
    source = jnp.asarray(DRAW.integers(3, 60, (2, 6)), jnp.int32)
    segments = (source < 50).astype(jnp.int32)

    @jax.jit
    @jax.grad
    def gradient(params):
        key = jax.random.key(1)
        return jnp.sum(
            jnp.sin(xa.apply(build, params, source, source, source_segment_ids=segments, key=key))
        )

    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient(params)))
    if positions == "rope":
        model = xa.functional.bind(build, params)
        for options in (
            {"num_beams": 2},
            {"key": jax.random.key(0), "processors": [sampling.top_p(0.9)]},
        ):
            found = generate(model, source, segments, max_new_tokens=3, **options)
            assert np.isfinite(found.scores).all()
