"""Output heads against numpy."""

import jax.numpy as jnp
import numpy as np

import crossattn as xa
from crossattn.nn import ClassOutput, VectorOutput
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
