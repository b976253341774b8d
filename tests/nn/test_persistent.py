"""Persistent vectors of attention against numpy: every query reads them, whatever masks hide from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import crossattn as xa
from crossattn.nn import BlockConfig, FeedForward, MultiHeadAttention
from tests import numpy_model as oracle
from tests.closeness import close

B, T, D, P = 2, 5, 12, 3
X = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)


def layer(num_heads=2, num_persistent=P, **options):
    """A build of an attention layer with persistent vectors, and random parameters for it."""

    def build(rngs):
        own = dict(num_persistent=num_persistent, **options)
        return MultiHeadAttention(D, num_heads, **own, rngs=rngs)

    return build, oracle.random_params(build)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_heads": 4, "num_kv_heads": 2, "value_dim": 5}, {"softcap": 2.0}, {"rope_base": 1e4}],
    ids=lambda options: "+".join(options) or "plain",
)
def test_every_query_reads_them_in_one_softmax_with_what_it_may_read(options):
    build, params = layer(**options)
    assert params["persistent"]["keys"].shape[0] == P
    padding = np.arange(T) >= np.array([[0], [2]])  # row 1 begins with tokens that read nothing
    allowed = np.tri(T, dtype=bool) & padding[:, None]
    bias = np.random.default_rng(1).normal(size=(1, options.get("num_heads", 2), T, T))

    def call(p, x):
        mask = xa.masks.causal() & xa.masks.key_padding(jnp.asarray(padding))
        options = dict(mask=mask, bias=jnp.asarray(bias, jnp.float32))
        both = xa.apply(build, p, x, **options, return_weights=True)
        return *both, xa.apply(build, p, x, **options)

    out, weights, alone = jax.jit(call)(params, X)
    rope = (np.arange(T), np.arange(T)) if "rope_base" in options else None
    softcap = options.get("softcap")
    expected = oracle.attention(params, X, allowed=allowed, bias=bias, rope=rope, softcap=softcap)
    assert weights.shape[-1] == T + P
    close((out, weights), expected)
    close(alone, expected[0])
    close(weights[1, :, :2, T:].sum(-1), np.ones((weights.shape[1], 2)))


def test_gradients_of_the_vectors_are_those_of_keys_and_values_beside_the_text():
    build, params = layer()

    def beside(p):
        q, k, v = (
            jnp.einsum("btd,dnh->btnh", X, p[name]["kernel"]) + p[name]["bias"]
            for name in ("query", "key", "value")
        )
        own = [p["persistent"]["keys"] * 6**0.5, p["persistent"]["values"] * P**0.5]
        k, v = (
            jnp.concatenate([x, jnp.broadcast_to(o, (B, *o.shape))], 1)
            for x, o in zip((k, v), own, strict=True)
        )
        logits = jnp.einsum("btnh,bsnh->bnts", q, k) / 6**0.5
        allowed = np.concatenate([np.tri(T, dtype=bool), np.ones((T, P), bool)], 1)
        weights = jax.nn.softmax(jnp.where(allowed, logits, -jnp.inf))
        out = jnp.einsum("bnts,bsnh->btnh", weights, v)
        return jnp.einsum("btnh,nhd->btd", out, p["out"]["kernel"]) + p["out"]["bias"]

    ours = lambda p: xa.apply(build, p, jnp.asarray(X), mask=xa.masks.causal())  # noqa: E731
    found, expected = (
        jax.jit(jax.grad(lambda p, f=f: jnp.sin(f(p)).sum()))(params) for f in (ours, beside)
    )
    size = max(np.abs(x).max() for x in jax.tree.leaves(expected))
    close(found, expected, size=size)


@pytest.mark.parametrize("hidden", [0, 2], ids=["all readable", "padding"])
def test_they_are_a_part_of_the_memory_and_without_them_attention_is_ordinary(hidden):
    build, params = layer()
    bound = xa.functional.bind(build, params)
    q, k, v = (
        jnp.einsum("btd,dnh->btnh", X, params[name]["kernel"]) + params[name]["bias"]
        for name in ("query", "key", "value")
    )
    out = lambda read: (  # noqa: E731
        jnp.einsum("btnh,nhd->btd", read, params["out"]["kernel"]) + params["out"]["bias"]
    )
    valid = jnp.broadcast_to(jnp.arange(T) >= hidden, (B, T))
    text, mask = xa.Memory(k, v, valid), xa.masks.key_padding(valid)
    both = xa.Memory.concat(text, bound.persistent.memory((B,)))
    assert both.size == T + P
    read = out(xa.attend(q, both.keys, both.values, xa.masks.key_padding(both.readable)))
    close(bound(jnp.asarray(X), mask=mask), read, size=np.abs(read).max())

    none, _ = layer(num_persistent=0)
    without = {name: value for name, value in params.items() if name != "persistent"}
    ordinary = out(xa.attend(q, k, v, mask))
    close(xa.apply(none, without, jnp.asarray(X), mask=mask), ordinary, size=np.abs(read).max())
    assert not np.allclose(read, ordinary, atol=1e-2)


@pytest.mark.slow
def test_dropout_drops_weights_of_both():
    build, params = layer(dropout_rate=0.3)
    call = lambda key: xa.apply(build, params, jnp.asarray(X), dropout_key=key)  # noqa: E731
    drawn = jax.jit(jax.vmap(call))(jax.random.split(jax.random.key(0), 4000))
    plain = jax.jit(lambda: call(None))()
    spread = np.std(drawn, axis=0) / 4000**0.5
    assert np.all(np.abs(drawn.mean(0) - plain) < 5 * spread)
    only = params | {"value": jax.tree.map(np.zeros_like, params["value"])}  # vectors give all
    first, second = (
        xa.apply(build, only, jnp.asarray(X), dropout_key=jax.random.key(i)) for i in range(2)
    )
    assert not np.allclose(first, second)


def test_their_variance_is_that_of_projected_keys_and_values_at_first():
    attention = MultiHeadAttention(64, 2, num_persistent=200, rngs=nnx.Rngs(0))
    own = attention.persistent.memory((3,))
    assert own.keys.shape == own.values.shape == (3, 200, 2, 32)
    np.testing.assert_allclose([own.keys.std(), own.values.std()], 1, rtol=0.05)


def test_self_attention_alone_has_them_and_a_shape_without_a_network_makes_none():
    shape = BlockConfig.of(D, 2, None, num_persistent=P)
    assert shape.self_attention(nnx.Rngs(0)).inner.persistent is not None
    assert shape.cross_attention(nnx.Rngs(0), memory_dim=D).inner.persistent is None
    build = lambda rngs: xa.nn.EncoderBlock(shape, rngs=rngs)  # noqa: E731
    params = oracle.random_params(build)
    assert set(params) == {"attention", "attention_residual"}
    out, _ = jax.jit(lambda p: xa.apply(build, p, jnp.asarray(X)))(params)
    close(out, oracle.block(params, X))
    # Statistics would be of a softmax without them.
    capturable = xa.functional.bind(build, params).capturable
    assert "attention.weights" in capturable and "attention.stats" not in capturable
    with pytest.raises(ValueError, match="^mlp_dim is None, but this block has a feed-forward"):
        shape.feedforward(nnx.Rngs(0))


@pytest.mark.quick(1)
@pytest.mark.parametrize("softmax", [False, True], ids=["feed-forward", "persistent"])
def test_feedforward_is_a_read_of_its_kernels_without_softmax(softmax):
    """Geva et al. 2021: memory i adds its value times act(x k_i + b_i), whatever the others hold.

    In the softmax of persistent vectors (Sukhbaatar et al. 2019) memories share what they give.
    """
    hidden = 7
    x = np.asarray(X, np.float64)
    ours = lambda rngs: FeedForward(D, hidden, "relu", rngs=rngs)  # noqa: E731
    params = oracle.random_params(ours)
    keys, values = np.float64(params["up"]["kernel"].T), np.float64(params["down"]["kernel"])
    scores = np.einsum("btd,fd->btf", x, keys) + params["up"]["bias"]
    if softmax:
        read = lambda few: xa.attend(  # noqa: E731
            jnp.asarray(x[:, :, None], jnp.float32),
            jnp.broadcast_to(jnp.asarray(keys[few, None], jnp.float32), (B, len(few), 1, D)),
            jnp.broadcast_to(jnp.asarray(values[few, None], jnp.float32), (B, len(few), 1, D)),
            bias=jnp.broadcast_to(
                jnp.asarray(params["up"]["bias"])[np.asarray(few)], (1, 1, T, len(few))
            ),
            scale=1.0,
        )[:, :, 0]
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
    else:

        def read(few):
            held = np.isin(np.arange(hidden), few)
            down = dict(
                kernel=params["down"]["kernel"] * held[:, None], bias=np.zeros(D, np.float32)
            )
            return xa.apply(ours, params | dict(down=down), jnp.asarray(X))

        weights = np.maximum(scores, 0)
    whole = read(list(range(hidden)))
    close(whole, np.einsum("btf,fd->btd", weights, values), size=np.abs(whole).max())
    terms = weights[..., None] * values
    for memory in range(hidden):
        lost = np.asarray(whole) - np.asarray(read([i for i in range(hidden) if i != memory]))
        alike = np.allclose(lost, terms[:, :, memory], atol=1e-4 * np.abs(whole).max())
        assert alike is not softmax
