"""MultiHeadAttention against numpy, and what its memories promise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import crossattn as xa
from crossattn.nn import MultiHeadAttention
from crossattn.nn.layers import norm
from tests import numpy_model as oracle
from tests.compiled import compiled

B, T, S, D, M = 2, 5, 7, 12, 10


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def layer(num_heads=3, **options):
    """A build of an attention layer, and random parameters for it."""

    def build(rngs):
        return MultiHeadAttention(D, num_heads, **options, rngs=rngs)

    return build, oracle.random_params(build)


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_bias": False},
        {"num_heads": 1},
        {"num_heads": 4, "num_kv_heads": 2},
        {"num_heads": 4, "num_kv_heads": 1, "head_dim": 6},
        {"num_heads": 2, "value_dim": 5},
        {"qk_norm": True},
        {"rope_base": 10000.0, "num_heads": 2},
        {"softcap": 2.0},
        {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "qk_norm": True, "rope_base": 1e4},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
def test_masked_self_attention_equals_numpy(options):
    build, params = layer(**options)
    x = normal(B, T, D)
    out, weights = jax.jit(
        lambda p, x: xa.apply(build, p, x, mask=xa.masks.causal(), return_weights=True)
    )(params, x)
    rope = (np.arange(T), np.arange(T)) if "rope_base" in options else None
    expected = oracle.attention(
        params, x, allowed=np.tri(T, dtype=bool), rope=rope, softcap=options.get("softcap")
    )
    close(out, expected[0])
    close(weights, expected[1])


@pytest.mark.parametrize("heads", [{"num_heads": 3}, {"num_heads": 4, "num_kv_heads": 2}])
def test_cross_attention_to_a_memory_of_another_width_equals_numpy(heads):
    build, params = layer(**heads, memory_dim=M)
    x, source = normal(B, T, D), normal(B, S, M, seed=1)
    valid = np.arange(S) < np.array([[S], [4]])
    bias = normal(1, 1, T, S, seed=2)

    def call(p, x, source, valid, bias):
        attention = xa.functional.bind(build, p)
        memory = attention.memory(source, valid=valid)
        return attention(x, memory, bias=bias, return_weights=True)

    out, weights = jax.jit(call)(params, x, source, valid, bias)
    expected = oracle.attention(
        params, x, source, valid[:, None, :], bias=np.broadcast_to(bias, (B, 4, T, S))
    )
    close(out, expected[0])
    close(weights, expected[1])
    assert not np.any(np.asarray(weights)[1, :, :, 4:])


def test_the_output_is_as_wide_as_is_said_and_other_values_are_normalised_too():
    """Keys of one sequence, values of another, both through the norm of the memory."""

    def build(rngs):
        own = norm("layer", M, rngs=rngs)
        return MultiHeadAttention(D, 3, memory_dim=M, out_dim=8, memory_norm=own, rngs=rngs)

    params = oracle.random_params(build)
    attention = xa.functional.bind(build, params)
    x, keys, values = normal(B, T, D), normal(B, S, M, seed=1), 3 + normal(B, S, M, seed=2)
    found = jax.jit(lambda x, k, v: attention(x, attention.memory(k, values_of=v)))(x, keys, values)
    keys, values = (oracle.norm(params["memory_norm"], y) for y in (keys, values))
    q, k, v = (
        np.einsum("btd,dnh->btnh", y, params[name]["kernel"]) + params[name]["bias"]
        for name, y in (("query", x), ("key", keys), ("value", values))
    )
    weights = oracle.softmax(np.einsum("btnh,bsnh->bnts", q, k) / 2)
    mixed = np.einsum("bnts,bsnh->btnh", weights, v)
    expected = np.einsum("btnh,nhd->btd", mixed, params["out"]["kernel"]) + params["out"]["bias"]
    assert found.shape == (B, T, 8)
    close(found, expected)


def test_the_mask_and_the_validity_of_the_memory_both_hold():
    build, params = layer()
    x = jnp.asarray(normal(B, T, D))
    valid = np.ones((B, T), bool)
    valid[:, 2] = False
    attention = xa.functional.bind(build, params)

    def weights_of(attention, x, valid):
        memory = attention.memory(x, valid=valid)
        return attention(x, memory, xa.masks.causal(), return_weights=True)[1]

    weights = compiled(weights_of, attention, x, valid)
    readable = np.tri(T, dtype=bool) & valid[:, None, :]
    assert np.array_equal(np.asarray(weights) > 0, np.broadcast_to(readable[:, None], (B, 3, T, T)))


def caches(attention):
    """The layer's own cache, and one that keeps what may be read too."""
    kept = xa.Memory.empty((B,), T + 2, *attention.kv_shape)
    return {"own": attention.cache((B,), T + 2), "kept": kept}


@pytest.mark.parametrize("chunks", [[1] * T, [2, 3]], ids=["one by one", "in chunks"])
@pytest.mark.parametrize("kind", ["own", "kept"])
@pytest.mark.parametrize("rope", [None, 1e4], ids=["no rope", "rope"])
def test_a_cache_extended_step_by_step_gives_the_full_forward(rope, kind, chunks):
    build, params = layer(num_heads=2, num_kv_heads=1, rope_base=rope)
    x = normal(B, T, D)
    attention = xa.functional.bind(build, params)

    @jax.jit
    def step(cache, piece):
        cache = attention.extend(cache, piece)
        mask = xa.masks.causal(offset=attention.before(piece, cache))
        return attention(piece, cache, mask), cache

    cache, start, outputs = caches(attention)[kind], 0, []
    for size in chunks:
        out, cache = step(cache, x[:, start : start + size])
        outputs.append(out)
        start += size
    positions = (np.arange(T), np.arange(T)) if rope else None
    expected, _ = oracle.attention(params, x, allowed=np.tri(T, dtype=bool), rope=positions)
    close(np.concatenate(outputs, axis=1), expected)
    assert int(cache.length) == T


@pytest.mark.parametrize("kind", ["own", "kept"])
def test_positions_that_a_cache_was_given_are_those_of_its_queries(kind):
    build, params = layer(num_heads=2, rope_base=1e4)
    x, places = normal(B, T, D), np.array([[0, 3, 4, 9, 11], [7, 8, 10, 30, 31]])
    attention = xa.functional.bind(build, params)

    @jax.jit
    def read(x, places):
        cache = caches(attention)[kind]
        for cut in (slice(0, 2), slice(2, T)):
            cache = attention.extend(cache, x[:, cut], positions=places[:, cut])
        return attention(x, cache)

    found = read(x, places)
    for row in range(B):
        rope = places[row], places[row]
        close(found[row], oracle.attention(params, x[row], rope=rope)[0])


def test_rotary_queries_that_no_one_placed_are_refused():
    build, params = layer(num_heads=2, rope_base=1e4)
    x = jnp.asarray(normal(B, T, D))
    attention = xa.functional.bind(build, params)
    memory = attention.memory(x, positions=jnp.arange(T) + 3)
    bare = xa.Memory.empty((B,), T, *attention.kv_shape, bare=True)
    for read in (memory, attention.extend(bare, x, positions=jnp.arange(T) + 3)):
        with pytest.raises(ValueError, match="give them as positions="):
            attention(x, read)
    with pytest.raises(ValueError, match="x has 5 positions, but the cache .* room for 2"):
        attention(x, attention.cache((B,), 2))


def test_beams_that_share_a_memory_equal_copies_of_it():
    build, params = layer(memory_dim=M)
    x, source = jnp.asarray(normal(B, 3, T, D)), jnp.asarray(normal(B, S, M, seed=1))
    attention = xa.functional.bind(build, params)
    memory = attention.memory(source, valid=jnp.arange(S) < jnp.array([[S], [4]]))
    bias = jnp.asarray(normal(attention.kv_shape[0], T, S, seed=2))
    masks = None, xa.masks.causal() & xa.masks.lengths(S, T - 1), xa.masks.lengths(3)
    for mask in masks:
        options = dict(bias=None if mask is None else bias, return_weights=True)
        read = jax.jit(lambda x, mask=mask, options=options: attention(x, memory, mask, **options))
        out, weights = read(x)
        for beam in range(3):
            alone, alone_weights = read(x[:, beam])
            close(out[:, beam], alone)
            close(weights[:, beam], alone_weights)


@pytest.mark.parametrize(
    "mask", [xa.masks.causal(offset=2), xa.masks.window(1, 0, offset=3), xa.masks.lengths(4, 1)]
)
def test_beams_of_one_token_each_read_what_its_place_may(mask):
    build, params = layer(memory_dim=M)
    attention = xa.functional.bind(build, params)
    memory = attention.memory(jnp.asarray(normal(B, S, M, seed=1)))
    x = jnp.asarray(normal(B, 3, 1, D))
    read = jax.jit(lambda x: attention(x, memory, mask, return_weights=True))
    out, weights = read(x)
    for beam in range(3):
        alone, alone_weights = read(x[:, beam])
        close(out[:, beam], alone)
        close(weights[:, beam], alone_weights)


def test_dropout_acts_only_when_a_key_is_given():
    build, params = layer(dropout_rate=0.5)
    still, _ = layer(dropout_rate=0.0)
    x = normal(B, T, D)
    call = jax.jit(lambda key: xa.apply(build, params, jnp.asarray(x), dropout_key=key))
    plain, first, second = call(None), call(jax.random.key(0)), call(jax.random.key(1))
    close(plain, oracle.attention(params, x)[0])
    assert not np.allclose(plain, first)
    assert not np.allclose(first, second)
    np.testing.assert_array_equal(first, call(jax.random.key(0)))
    with_key = jax.jit(lambda k: xa.apply(still, params, jnp.asarray(x), dropout_key=k))
    close(with_key(jax.random.key(0)), plain)


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_parameters():
    def build(rngs):
        return MultiHeadAttention(D, 2, qk_norm=True, rope_base=1e4, dtype=jnp.bfloat16, rngs=rngs)

    params = oracle.random_params(build)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}
    x = jnp.asarray(normal(B, T, D))
    attention = xa.functional.bind(build, params)
    out, weights = jax.jit(lambda x: attention(x, return_weights=True))(x.astype(jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    assert weights.dtype == jnp.float32
    assert attention.cache((B,), 4).keys.dtype == jnp.bfloat16
    rope = (np.arange(T), np.arange(T))
    np.testing.assert_allclose(
        out.astype(jnp.float32), oracle.attention(params, x, rope=rope)[0], atol=0.1
    )


@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads", "message"),
    [
        (10, 3, None, "num_heads is 3; expected a divisor of dim, 10"),
        (12, 4, 3, "num_kv_heads is 3; expected a divisor of num_heads, 4"),
    ],
)
def test_heads_that_do_not_divide_are_refused_by_name(dim, heads, kv_heads, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(dim, heads, num_kv_heads=kv_heads, rngs=nnx.Rngs(0))


@pytest.mark.usefixtures("in_production")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_heads=0), "num_heads is 0; expected an integer above 0"),
        (dict(num_heads=-4), "num_heads is -4; expected an integer above 0"),
        (dict(dim=12.0), "dim is 12.0; expected an integer above 0"),
        (dict(head_dim=0), "head_dim is 0; expected an integer above 0"),
        (dict(dropout_rate=1.5), "dropout_rate is 1.5; expected 0 <= rate < 1"),
        (dict(rngs=0), r"rngs is of type int; expected flax's nnx.Rngs\(seed\)"),
        (dict(rngs=jax.random.key(0)), "rngs is of type PRNGKeyArray; expected flax's"),
    ],
)
def test_what_no_layer_can_be_made_of_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(**(dict(dim=12, num_heads=4, rngs=nnx.Rngs(0)) | changes))


@pytest.mark.usefixtures("in_production")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, x, y: m([[1.0] * D], y), r"x is a list; .* \[\*B T \d+\]"),
        (lambda m, x, y: m(x[0, 0], y), r"x has shape \(\d+,\); .* \[\*B T \d+\]"),
        (lambda m, x, y: m(x, [[1.0] * M]), "memory: x is a list; expected an array of vectors"),
        (lambda m, x, y: m(x), f"memory is None, .* memory_dim = {M}, and x {D}; give memory="),
        (lambda m, x, y: m(y, y), f"x has shape .* expected vectors of size dim = {D}"),
        (lambda m, x, y: m(x, x), f"memory: x has shape .* size memory_dim = {M}"),
        (lambda m, x, y: m.memory(y, values_of=x), f"values_of has shape .* memory_dim = {M}"),
        (lambda m, x, y: m(x, y, y), r"mask is an array of float32; .*memory\(k, values_of=v\)"),
        (lambda m, x, y: m(x, y, np.ones((T, S), int)), r"of int64; .* mask\.astype\(bool\)"),
        (
            lambda m, x, y: m(x[:, None], y, xa.masks.key_padding(np.ones((3, S), bool))),
            "KeyPadding of .3, ",
        ),
        (lambda m, x, y: m(np.stack([x, x], 1), y, np.ones((T, S + 1), bool)), "has length 8"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_name_of_layer_and_argument(call, message):
    build, params = layer(memory_dim=M)
    with pytest.raises(ValueError, match=message):
        call(xa.functional.bind(build, params), normal(B, T, D), normal(B, S, M, seed=1))


def test_a_causal_flag_is_told_of_the_mask():
    build, params = layer()
    with pytest.raises(TypeError, match=r"'is_causal'; .*crossattn\.masks\.causal\(\)"):
        xa.apply(build, params, jnp.asarray(normal(B, T, D)), is_causal=True)


@pytest.mark.usefixtures("in_production")
def test_a_mask_of_three_axes_is_refused():
    build, params = layer(num_heads=2)
    x, mask = normal(2, T, D), np.random.default_rng(3).random((2, T, T)) < 0.7
    for given in (mask, jnp.asarray(mask)):
        with pytest.raises(ValueError, match=r"\[B T S\] or \[N T S\]; write mask\[:, None\]"):
            xa.apply(build, params, x, mask=given)
    by_example, expected = mask[:, None], oracle.attention(params, x, allowed=mask)
    read = jax.jit(lambda x, mask: xa.apply(build, params, x, mask=mask))
    close(read(x, by_example), expected[0])
    # One example has no batch axis, so that three are all.
    close(read(x[0], mask), read(x[:1], mask[None])[0])
    shared = oracle.attention(params, x, allowed=mask[0])
    close(read(x, mask[0]), shared[0])


@pytest.mark.parametrize("options", [{}, {"rope_base": 1e4}, {"qk_norm": True}])
def test_latents_without_batch_axes_read_each_memory(options):
    build, params = layer(num_heads=2, **options)
    latents, source = jnp.asarray(normal(B, D)), jnp.asarray(normal(B, S, D, seed=1))  # T = B
    valid = jnp.arange(S) < jnp.array([[S], [4]])

    @functools.partial(jax.jit, static_argnames="mask")
    def call(latents, mask=None, positions=None):
        attention = xa.functional.bind(build, params)
        memory = attention.memory(source, valid=valid)
        return attention(latents, memory, mask, positions=positions, return_weights=True)

    repeated = jnp.broadcast_to(latents, (B, B, D))
    for mask in (None, xa.masks.causal()):
        for found, expected in zip(call(latents, mask), call(repeated, mask), strict=True):
            assert found.shape == expected.shape
            close(found, expected)
    places = jnp.array([5, 2])
    close(call(latents, positions=places)[0], call(repeated, positions=places)[0])


def test_examples_that_the_memory_does_not_have_are_refused():
    build, params = layer(num_heads=2)
    source = jnp.asarray(normal(2, 3, S, D))
    for lead in [(2,), (3,), (3, 2), (1, 2, 3)]:
        with pytest.raises(ValueError, match=r"x has batch axes .* the memory \(2, 3\)"):
            xa.apply(build, params, jnp.asarray(normal(*lead, T, D)), source)
