"""FeedForward, norms, embeddings and position modules against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import crossattn as xa
from crossattn.nn import (
    Embedding,
    FeedForward,
    LearnedPositions,
    PositionBias,
    RelativeBias,
    TokenInput,
    linear,
    norm,
)
from tests import numpy_model as oracle
from tests.closeness import close
from tests.compiled import compiled

X = np.random.default_rng(0).normal(size=(2, 3, 6)).astype(np.float32)
TOKENS = np.array([[3, 1, 4], [1, 5, 9]])


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("activation", [*oracle.ACTIVATIONS, *oracle.GATES])
def test_feedforward_equals_numpy_and_drops_features_by_a_key(activation, use_bias):
    options = dict(use_bias=use_bias, dropout_rate=0.5)
    build = lambda rngs: FeedForward(6, 8, activation, **options, rngs=rngs)  # noqa: E731
    params = oracle.random_params(build)
    assert ("gate" in params) == (activation in oracle.GATES)
    assert all(("bias" in p) == use_bias for p in params.values())
    expected = oracle.feedforward(params, X, activation)
    run = jax.jit(lambda params, *given: xa.apply(build, params, *given))
    np.testing.assert_allclose(run(params, X), expected, atol=1e-5)
    dropped = run(params, X, jax.random.key(0))
    assert not np.allclose(dropped, expected)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda r: FeedForward(6, 8, "tanh", rngs=r), "activation is 'tanh'; .* relu, .*swiglu"),
        (lambda r: norm("batch", 6, rngs=r), "norm is 'batch'; expected 'layer' or 'rms'"),
        (lambda r: TokenInput(11, 6, positions="rotary", max_length=8, rngs=r),
         "positions is 'rotary'; expected one of sinusoidal"),
    ],
)  # fmt: skip
def test_an_unknown_name_is_refused_with_the_known_ones(make, said, in_production):
    with pytest.raises(ValueError, match=said):
        make(nnx.Rngs(0))


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms_equal_numpy(kind):
    build = lambda rngs: norm(kind, 6, rngs=rngs)  # noqa: E731
    params = oracle.random_params(build)
    expected = oracle.norm(params, X.astype(np.float64))
    np.testing.assert_allclose(xa.apply(build, params, jnp.asarray(X)), expected, atol=1e-5)


def test_initial_scale_keeps_variance_whatever_the_grouping_of_axes():
    shape, axes = (4, 16), ("heads", "head_dim")
    out = linear(shape, 64, in_axes=axes, out_axes=("embed",), rngs=nnx.Rngs(0))
    into = linear(64, shape, in_axes=("embed",), out_axes=axes, rngs=nnx.Rngs(1))
    for kernel in (out.kernel[...], into.kernel[...]):
        assert np.std(kernel) == pytest.approx((2 / (64 + 64)) ** 0.5, rel=0.05)


def test_embeddings_have_unit_variance_and_are_also_the_output_layer():
    embedding = Embedding(500, 64, rngs=nnx.Rngs(0))
    tokens = jnp.arange(500)[None]
    vectors = embedding(tokens)
    assert np.std(vectors) == pytest.approx(1, rel=0.02)
    table = np.asarray(embedding.table[...], np.float64)
    np.testing.assert_allclose(vectors[0], table * 8, rtol=1e-5)
    np.testing.assert_allclose(
        embedding.logits(vectors)[0], table * 8 @ table.T, atol=1e-4, rtol=1e-4
    )


def test_logits_are_float32_also_when_computing_in_bfloat16():
    embedding = Embedding(11, 8, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    vectors = embedding(jnp.asarray(TOKENS))
    assert vectors.dtype == jnp.bfloat16
    assert embedding.table[...].dtype == jnp.float32
    assert embedding.logits(vectors).dtype == jnp.float32


@pytest.mark.parametrize("scheme", ["sinusoidal", "learned", "rope", "relative", "alibi", "none"])
def test_token_input_adds_positions_only_where_the_scheme_does(scheme):
    def build(rngs):
        return TokenInput(11, 6, positions=scheme, max_length=8, rngs=rngs)

    params = oracle.random_params(build)
    assert ("learned" in params) == (scheme == "learned")
    actual = compiled(lambda params, x: xa.apply(build, params, x), params, TOKENS)
    np.testing.assert_allclose(actual, oracle.embed(params, TOKENS, scheme), atol=1e-5)


@pytest.mark.parametrize("scheme", ["sinusoidal", "learned"])
def test_given_positions_move_the_position_vectors(scheme):
    def build(rngs):
        return TokenInput(11, 6, positions=scheme, max_length=8, rngs=rngs)

    params = oracle.random_params(build)
    tokens = jnp.asarray(TOKENS)
    long = xa.apply(build, params, jnp.pad(tokens, [(0, 0), (4, 0)]))
    shifted = xa.apply(build, params, tokens, 4 + jnp.arange(3))
    close(shifted, long[:, 4:])


def test_a_learned_position_past_the_table_is_nan_not_silently_another():
    vectors = LearnedPositions(4, 6, rngs=nnx.Rngs(0))(jnp.arange(6))
    assert np.isfinite(vectors[:4]).all()
    assert np.isnan(vectors[4:]).all()


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_bias_depends_on_the_distance_only(bidirectional):
    module = RelativeBias(3, bidirectional=bidirectional, rngs=nnx.Rngs(0))
    bias = np.asarray(module(jnp.arange(6), jnp.arange(6)))
    assert bias.shape == (3, 6, 6)
    for distance in range(-5, 6):
        diagonal = np.diagonal(bias, distance, axis1=1, axis2=2)
        assert np.all(diagonal == diagonal[:, :1])
    moved = module(jnp.arange(6) + 100, jnp.arange(6) + 100)
    np.testing.assert_array_equal(moved, bias)
    after, before = bias[:, 0, 1], bias[:, 1, 0]
    assert np.all(after != before)
    assert np.all(bias[:, 0, 1:] == bias[:, 0, :1]) != bidirectional


def test_alibi_falls_linearly_and_other_schemes_have_no_bias():
    module = PositionBias("alibi", 2, bidirectional=True, rngs=nnx.Rngs(0))
    bias = module(jnp.arange(3), jnp.arange(4))
    distance = np.abs(np.arange(3)[:, None] - np.arange(4))
    np.testing.assert_allclose(bias, -np.array([2**-4, 2**-8])[:, None, None] * distance)
    for scheme in ("sinusoidal", "learned", "rope", "none"):
        none = PositionBias(scheme, 2, bidirectional=True, rngs=nnx.Rngs(0))
        assert none(jnp.arange(3), jnp.arange(4)) is None
