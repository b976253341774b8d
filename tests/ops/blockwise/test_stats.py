"""Statistics of attention weights: float64 numpy's numbers, the dense computation's gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn import testing
from crossattn.testing.case import array
from tests.closeness import close

B, T, S, N, K, H, TOP = 2, 9, 11, 4, 2, 8, 3
RANDOM = np.random.default_rng(1)
Q, KEYS = (RANDOM.normal(size=(B, length, heads, H)).astype(np.float32)
           for length, heads in ((T, N), (S, K)))  # fmt: skip
BIAS = RANDOM.normal(size=(1, N, T, S)).astype(np.float32)
FIRST = RANDOM.integers(0, S, (B, T))
SPANS = (FIRST, FIRST + RANDOM.integers(0, 4, (B, T)))
FROM, TO = (x[:, None, :, None] for x in SPANS)
IN_SPAN = (FROM <= np.arange(S)) & (np.arange(S) < TO)
POSITIONS = RANDOM.integers(0, 100, (B, S))
MASKS = {
    "nothing_masked": None,
    "causal": xa.masks.causal(),
    "rows_that_read_nothing": xa.masks.causal(offset=-2) & xa.masks.lengths(np.array([5, 11])),
    "matrix_of_a_head": xa.masks.explicit(RANDOM.normal(size=(B, N, T, S)) > 0),
}
OPTIONS = {"top_k": TOP, "spans": SPANS, "k_positions": POSITIONS}
SMOOTH = ("lse", "entropy", "maximum", "expected", "mass", "top_weights", "span_mass")


def allowed(mask):
    everything = np.ones((B, N, T, S), bool)
    return everything if mask is None else everything & np.asarray(mask.materialize(T, S))


def in_numpy(q, k, mask, bias):
    """All statistics from the float64 weights of the oracle."""
    may = allowed(mask)
    _, weights, lse = testing.oracle.attention(q, k, k, allowed=may, bias=bias)
    order = np.argsort(-np.where(may, weights, -1), -1, kind="stable")[..., :TOP]
    top = np.take_along_axis(weights, order, -1)
    reads = may.any(-1)
    logs = np.log(np.where(weights > 0, weights, 1))
    return xa.ops.blockwise.stats.AttentionStats(
        lse=lse,
        entropy=-np.sum(weights * logs, -1),
        maximum=weights.max(-1),
        argmax=np.where(reads, weights.argmax(-1), -1),
        expected=np.sum(weights * POSITIONS[:, None, None], -1),
        mass=weights.sum(-2),
        top_weights=top,
        top_indices=np.where(np.take_along_axis(may, order, -1), order, -1),
        span_mass=np.sum(weights * IN_SPAN, -1),
    )


def dense(q, k, allowed, bias, softcap):
    """The smooth statistics by plain operations on the whole matrix, which JAX differentiates."""
    logits = jnp.einsum("bthi,bshi->bhts", q, jnp.repeat(k, N // K, axis=2)) / np.sqrt(H)
    logits = jnp.where(allowed, softcap * jnp.tanh(logits / softcap) + bias, -jnp.inf)
    lse = jax.nn.logsumexp(jnp.where(allowed.any(-1, keepdims=True), logits, 0), axis=-1)
    w = jnp.where(allowed, jnp.exp(jnp.where(allowed, logits, 0) - lse[..., None]), 0)
    top = jax.lax.top_k(w, TOP)[0]
    return {
        "lse": jnp.where(allowed.any(-1), lse, 0),
        "entropy": -jnp.sum(w * jnp.log(jnp.where(w > 0, w, 1)), -1),
        "maximum": top[..., 0],
        "expected": jnp.sum(w * POSITIONS[:, None, None], -1),
        "mass": w.sum(-2),
        "top_weights": top,
        "span_mass": jnp.sum(w * IN_SPAN, -1),
    }


@pytest.mark.parametrize("name", MASKS)
def test_statistics_are_those_of_the_weights(small_blocks, name):
    run = jax.jit(lambda q, k: xa.attention_stats(q, k, MASKS[name], bias=BIAS, **OPTIONS))
    found = run(Q, KEYS)
    expected = in_numpy(Q, KEYS, MASKS[name], BIAS)
    for field, value in found._asdict().items():
        wanted = getattr(expected, field)
        assert value.shape == wanted.shape, field
        assert value.dtype == (jnp.int32 if field in ("argmax", "top_indices") else jnp.float32)
        close(value, wanted, err_msg=field)


@pytest.mark.quick(1)
@pytest.mark.parametrize("field", ["all", "entropy", "mass"])
def test_gradients_are_those_of_the_dense_computation(small_blocks, field):
    mask = MASKS["rows_that_read_nothing"]
    names = SMOOTH if field == "all" else (field,)
    arrays = Q, KEYS, BIAS, np.float32(2.0)

    def loss(found):
        """Linear, so that rounding of the statistics is no part of what is compared."""
        parts = [jnp.where(jnp.isfinite(found[name]), found[name], 0) for name in names]
        return sum(
            jnp.sum(part * array(name, *part.shape))
            for name, part in zip(names, parts, strict=True)
        )

    def ours(q, k, bias, softcap):
        found = xa.attention_stats(q, k, mask, bias=bias, softcap=softcap, **OPTIONS)
        return loss(found._asdict())

    may = allowed(mask)

    def whole(q, k, bias, softcap):
        return loss(dense(q, k, may, bias, softcap))

    differentiate = functools.partial(jax.grad, argnums=(0, 1, 2, 3))
    found = jax.jit(differentiate(ours))(*arrays)
    with jax.enable_x64(True):
        expected = jax.jit(differentiate(whole))(*(jnp.float64(x) for x in arrays))
    for name, a, b in zip(("q", "k", "bias", "softcap"), found, expected, strict=True):
        assert b.dtype == jnp.float64
        close(a, b, err_msg=name)


def test_entropy_of_large_logits_keeps_its_small_part():
    q = np.full((1, 1, 1, 1), 1e4, np.float32)
    k = np.array([1, 1, 0.9999], np.float32).reshape(1, 3, 1, 1)
    logits = np.float64(q[0, 0, 0, 0] * k[0, :, 0, 0])
    weights = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    found = xa.attention_stats(q, k, scale=1.0)
    np.testing.assert_allclose(found.entropy.item(), -np.sum(weights * np.log(weights)), rtol=1e-4)


def test_of_equal_weights_the_first_key_is_named(small_blocks):
    found = xa.attention_stats(jnp.zeros((1, 2, 1, 4)), jnp.zeros((1, S, 1, 4)), top_k=2)
    np.testing.assert_array_equal(found.argmax, 0)
    np.testing.assert_array_equal(found.top_indices[..., :], np.broadcast_to([0, 1], (1, 1, 2, 2)))
    close(found.entropy, np.full((1, 1, 2), np.log(S)))
    assert found.span_mass is None


def test_poison_that_nobody_may_read_reaches_nothing(small_blocks):
    k = KEYS.copy()
    k[:, 7:] = np.nan
    mask = xa.masks.prefix(7)
    stats = jax.jit(lambda k: xa.attention_stats(Q, k, mask, **OPTIONS))
    found, expected = stats(k), stats(KEYS)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    gradients = jax.jit(jax.grad(lambda k: xa.attention_stats(Q, k, mask).entropy.sum()))(k)
    assert np.isfinite(gradients[:, :7]).all()
    assert not np.asarray(gradients[:, 7:]).any()


def test_poison_that_is_read_is_not_hidden(small_blocks):
    k = KEYS.copy()
    k[:, 4] = np.inf
    found = xa.attention_stats(Q, k, xa.masks.causal())
    spoilt = np.broadcast_to(np.arange(T) >= 4, (B, N, T))
    for field in ("lse", "entropy", "maximum", "expected"):
        np.testing.assert_array_equal(np.isnan(getattr(found, field)), spoilt, err_msg=field)


def test_composes_with_vmap():
    mask = xa.masks.lengths(np.array([4, 11]))
    mapped = jax.vmap(lambda q, k, mask: xa.attention_stats(q, k, mask))(Q, KEYS, mask)
    for a, b in zip(mapped[:6], xa.attention_stats(Q, KEYS, mask)[:6], strict=True):
        close(a, b)


@pytest.mark.parametrize(("queries", "keys"), [(T, 0), (0, S)])
def test_of_no_queries_or_no_keys_there_is_nothing(queries, keys):
    spans = tuple(x[:, :queries] for x in SPANS)
    found = xa.attention_stats(Q[:, :queries], KEYS[:, :keys], spans=spans)
    assert found.entropy.shape == found.span_mass.shape == (B, N, queries)
    assert found.mass.shape == (B, N, keys) and not np.asarray(found.mass).any()
    assert (found.argmax == -1).all() and not np.asarray(found.span_mass).any()


@pytest.mark.usefixtures("in_production")
@pytest.mark.parametrize(
    ("derive", "said"),
    [
        (lambda f: jax.grad(lambda q: jnp.sum(jax.grad(f)(q)))(Q), "first derivatives only"),
        (lambda f: jax.jvp(f, (Q,), (Q,)), "no forward-mode derivatives"),
    ],
)
def test_other_derivatives_are_refused_with_a_way_out(derive, said):
    def entropy(q):
        return xa.attention_stats(q, KEYS).entropy.sum()

    with pytest.raises(NotImplementedError, match=f"{said}.* return_weights"):
        derive(entropy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": S + 1}, "top_k is 12; expected 0 to the number of keys, 11"),
        ({"spans": (FIRST,)}, r"spans is a tuple of 1; expected a tuple \(first, last\)"),
        ({"spans": (FIRST, FIRST / 2)}, "spans: last has dtype .*; expected integers"),
        ({"spans": (FIRST, FIRST[:, :2])}, r"spans: last has shape \(2, 2\); expected .*\(2, 9\)"),
        ({"k_positions": np.arange(3)}, r"k_positions has shape \(3,\); expected .*\(2, 11\)"),
    ],
)
def test_what_does_not_fit_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        xa.attention_stats(Q, KEYS, **options)
