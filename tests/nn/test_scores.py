"""Additive, Luong's and local attention against float64 numpy, and what they promise about masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import crossattn as xa
from crossattn.nn import AdditiveAttention, LocalAttention, LuongAttention
from tests import numpy_model as oracle

B, T, S, D, M = 2, 3, 5, 6, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(B, T, D)).astype(np.float32)
VALID = np.arange(S) < np.array([[S], [2]])

KINDS = {
    "additive": (lambda rngs: AdditiveAttention(D, memory_dim=M, hidden=7, rngs=rngs), M),
    "dot": (lambda rngs: LuongAttention(D, score="dot", rngs=rngs), D),
    "general": (lambda rngs: LuongAttention(D, memory_dim=M, rngs=rngs), M),
    "concat": (lambda rngs: LuongAttention(D, memory_dim=M, score="concat", rngs=rngs), M),
    "local-m": (
        lambda rngs: LocalAttention(D, memory_dim=M, window=1, predicted=False, rngs=rngs),
        M,
    ),
    "local-p": (lambda rngs: LocalAttention(D, memory_dim=M, window=2, rngs=rngs), M),
}


def score(kind, p, q, k):
    """One query against one key, from the papers' equations."""
    full = lambda name: p[name]["kernel"].astype(np.float64)  # noqa: E731
    if kind == "dot":
        return q @ k
    if kind in ("general", "local-m", "local-p"):
        return q @ (k @ full("key"))
    hidden = q @ full("query") + k @ full("key") + p["query"].get("bias", 0)
    return p["score"].astype(np.float64) @ np.tanh(hidden)


def expected(kind, p, x, memory, allowed):
    scores = [
        [[score(kind, p, q, k) for k in ks] for q in qs] for qs, ks in zip(x, memory, strict=True)
    ]
    near, factors = around(kind, p, x, allowed)
    scores = np.where(allowed & near, np.array(scores, np.float64), -np.inf)
    weights = oracle.softmax(scores) * factors
    return weights @ memory, weights


def around(kind, p, x, allowed):
    """The places that local attention reads, and the factors of their weights."""
    if kind == "local-m":
        return np.abs(np.arange(S) - np.arange(T)[:, None]) <= 1, 1.0
    if kind != "local-p":
        return True, 1.0
    hidden = np.tanh(x.astype(np.float64) @ p["centre"]["kernel"])
    share = 1 / (1 + np.exp(-(hidden @ p["centre_score"])))
    distance = np.arange(S) - (allowed.sum(-1) * share)[..., None]
    return np.abs(distance) <= 2, np.exp(-(distance**2) / 2)


def case(kind):
    build, size = KINDS[kind]
    memory = np.random.default_rng(1).normal(size=(B, S, size)).astype(np.float32)
    params = oracle.random_params(build)
    return xa.functional.bind(build, params), params, memory


@pytest.mark.parametrize("kind", KINDS)
def test_scores_equal_numpy(kind):
    attention, params, memory = case(kind)

    def call(x, memory, valid):
        read = attention.memory(memory, valid=valid)
        return attention(x, read, xa.masks.causal(), return_weights=True)

    out, weights = jax.jit(call)(X, memory, VALID)
    allowed = VALID[:, None] & np.tri(T, S, dtype=bool)
    for found, wanted in zip(
        (out, weights[:, 0]), expected(kind, params, X, memory, allowed), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", KINDS)
def test_what_may_not_be_read_has_no_influence_and_no_gradient(kind):
    attention, _, memory = case(kind)
    valid = VALID & np.array([[True], [False]])  # the second example may read nothing

    def loss(x, memory):
        return jnp.sum(attention(x, attention.memory(memory, valid=jnp.asarray(valid))) ** 2)

    spoilt = np.where(valid[..., None], memory, np.nan).astype(np.float32)
    out = attention(jnp.asarray(X), attention.memory(jnp.asarray(spoilt), valid=jnp.asarray(valid)))
    assert not np.any(out[1]) and np.isfinite(out).all()
    found, clean = (
        jax.grad(loss, (0, 1))(jnp.asarray(X), jnp.asarray(m)) for m in (spoilt, memory)
    )
    for a, b in zip(found, clean, strict=True):
        assert np.isfinite(a).all() and not np.any(a[1])
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_only_later_queries_may_read_does_not_spoil_earlier_ones(kind, bad):
    attention, _, memory = case(kind)
    spoilt = memory.copy()
    spoilt[:, 2] = bad
    call = jax.jit(lambda m: attention(jnp.asarray(X), m, xa.masks.causal()))
    found = call(spoilt)
    np.testing.assert_array_equal(found[:, :2], call(memory)[:, :2])
    assert np.isnan(found[:, 2]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_query_that_reads_nothing_may_hold_anything(kind):
    attention, _, memory = case(kind)
    reads = jnp.asarray(np.array([True, False, True])[None, None, :, None])
    spoilt = X.copy()
    spoilt[:, 1] = np.nan

    @jax.jit
    def call(x):
        return jax.grad(lambda m: jnp.sum(attention(x, m, reads) ** 2))(jnp.asarray(memory))

    np.testing.assert_array_equal(call(spoilt), call(X))


@pytest.mark.parametrize("kind", KINDS)
def test_more_queries_share_a_memory_and_queries_of_no_example_read_all(kind):
    attention, params, memory = case(kind)
    several = RNG.normal(size=(B, 2, T, D)).astype(np.float32)
    call = jax.jit(lambda x, m: attention(x, attention.memory(m, valid=jnp.asarray(VALID))))
    found = call(several, memory)
    for j in range(2):
        wanted, _ = expected(kind, params, several[:, j], memory, VALID[:, None])
        np.testing.assert_allclose(found[:, j], wanted, rtol=1e-5, atol=1e-5)
    same = np.broadcast_to(X[0], X.shape)
    wanted, _ = expected(kind, params, same, memory, VALID[:, None])
    np.testing.assert_allclose(call(X[0], memory), wanted, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused(in_production):
    rngs = nnx.Rngs(0)
    with pytest.raises(ValueError, match="expected 'dot', 'general' or 'concat'"):
        LuongAttention(D, score="cosine", rngs=rngs)
    with pytest.raises(ValueError, match="take 'general'"):
        LuongAttention(D, memory_dim=M, score="dot", rngs=rngs)
    attention, _, memory = case("general")
    with pytest.raises(ValueError, match="the memory \\(2,\\)"):
        attention(jnp.asarray(X[:1]), jnp.asarray(memory))
    for mask in (xa.masks.key_padding(VALID[:, 1:]), np.ones((T, S + 1), bool)):
        with pytest.raises(ValueError, match=f"mask: .* expected S = {S}, the number of keys"):
            attention(jnp.asarray(X), jnp.asarray(memory), mask)
    for mask in (np.ones((3, 1, T, S), bool), np.ones((B, 2, T, S), bool)):
        with pytest.raises(ValueError, match="mask: Explicit of .* expected one that broadcasts"):
            attention(jnp.asarray(X), jnp.asarray(memory), mask)
