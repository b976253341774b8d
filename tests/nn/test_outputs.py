"""Output heads against numpy."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import crossattn as xa
from crossattn.nn import ClassOutput, Embedding, OutputConfig, TokenOutput, VectorOutput
from tests import numpy_model as oracle

X = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)


def linear(p, x):
    return x @ p["kernel"].astype(np.float64) + p["bias"]


def test_a_head_of_classes_equals_numpy():
    build = lambda rngs: ClassOutput(8, 5, rngs=rngs)  # noqa: E731
    params = oracle.random_params(build)
    logits = xa.apply(build, params, jnp.asarray(X, jnp.bfloat16), method="logits")
    assert logits.dtype == jnp.float32
    found = xa.apply(build, params, jnp.asarray(X[:, 0]), method="logits")
    np.testing.assert_allclose(found, linear(params["linear"], X[:, 0]), rtol=1e-5, atol=1e-5)


def test_a_head_of_vectors_equals_numpy():
    build = lambda rngs: VectorOutput(8, 5, rngs=rngs)  # noqa: E731
    params = oracle.random_params(build)
    vectors, stop = xa.apply(build, params, jnp.asarray(X))
    np.testing.assert_allclose(vectors, linear(params["linear"], X), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(stop, linear(params["stop"], X)[..., 0], rtol=1e-5, atol=1e-5)


def test_logits_of_tokens_ask_for_no_more_than_a_size():
    build = lambda rngs: TokenOutput(5, 8, rngs=rngs)  # noqa: E731
    params = oracle.random_params(build)
    embedding = Embedding(5, 8, rngs=nnx.Rngs(0))
    found = xa.apply(build, params, jnp.asarray(X), embedding, method="logits")
    np.testing.assert_allclose(found, X @ params["table"].T, rtol=1e-5, atol=1e-5)
    tied = TokenOutput(5, 8, tied=True, rngs=nnx.Rngs(0))
    found = tied.logits(jnp.asarray(X), embedding)
    expected = X @ np.asarray(embedding.table[...]).T
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="block is 8, a size; a transform expects the BlockConfig"):
        TokenOutput(5, 8, OutputConfig(transform=True), rngs=nnx.Rngs(0))
