"""Encoder and decoder blocks against numpy; what pre- and post-norm mean."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import crossattn as xa
from crossattn.nn import (
    AttentionConfig,
    Block,
    BlockConfig,
    BlockState,
    DecoderBlock,
    Encoded,
    EncoderBlock,
    FeedForwardConfig,
)
from tests import numpy_model as oracle

CONFIG = BlockConfig.of(dim=8, num_heads=2, mlp_dim=12)
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
    config = CONFIG.changed(**changes)
    build = lambda rngs: EncoderBlock(config, rngs=rngs)  # noqa: E731
    params = oracle.random_params(build)
    valid = np.arange(5) < np.array([[5], [3]])
    mask = xa.masks.key_padding(jnp.asarray(valid))
    out, _ = jax.jit(lambda p, x: xa.apply(build, p, x, mask=mask))(params, X)
    expected = oracle.block(
        params, X, allowed=valid[:, None, :], first=config.norm_first, act=config.mlp.activation
    )
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_the_decoder_block_equals_numpy(changes):
    config = CONFIG.changed(**changes)
    build = lambda rngs: DecoderBlock(config, 10, rngs=rngs)  # noqa: E731
    params = oracle.random_params(build)
    assert {"attention", "cross", "feedforward"} <= set(params)

    def call(p, x, source, valid):
        block = xa.functional.bind(build, p)
        state = block.read({"source": Encoded(source, valid)})
        return block(x, state, mask=xa.masks.causal(), capture=("cross.weights",))

    out, state = jax.jit(call)(params, X, SOURCE, VALID)
    expected = oracle.block(
        params,
        X,
        memory=SOURCE,
        allowed=np.tri(5, dtype=bool),
        source_allowed=VALID[:, None, :],
        first=config.norm_first,
        act=config.mlp.activation,
    )
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
    weights = np.asarray(state.captured["cross.weights"])
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    assert not np.any(weights[1, :, :, 3:])


def decoder_block(memory_dim=None, **changes):
    config = CONFIG.changed(**changes)
    build = lambda rngs: DecoderBlock(config, memory_dim, rngs=rngs)  # noqa: E731
    params = oracle.random_params(build)
    return xa.functional.bind(build, params), params


def test_a_decoder_block_is_causal_unless_another_mask_is_named():
    block, params = decoder_block()
    assert params.keys().isdisjoint({"cross", "cross_residual"})
    call = jax.jit(lambda x, mask: block(x, BlockState(), mask=mask)[0])
    everything, causal = xa.masks.window(None, None), np.tri(5, dtype=bool)
    for mask, allowed in [
        (None, causal),
        (xa.masks.causal() | xa.masks.prefix(3), causal | (np.arange(5) < 3)),
        (xa.masks.causal() & xa.masks.window(1), causal & ~np.tri(5, k=-2, dtype=bool)),
        (~(~xa.masks.causal() | xa.masks.lengths(1)), causal & (np.arange(5) >= 1)),
        (~~xa.masks.causal() & ~xa.masks.lengths(1), causal & (np.arange(5) >= 1)),
        (everything, np.ones((5, 5), bool)),
        (everything & xa.masks.lengths(jnp.array([5, 3])), (np.arange(5) < [[5], [3]])[:, None]),
        (jnp.asarray(causal.T[None, None]), causal.T),
    ]:
        expected = oracle.block(params, X, allowed=allowed)
        np.testing.assert_allclose(call(X, mask), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "mask",
    [
        xa.masks.key_padding(np.ones((2, 5), bool)),
        xa.masks.lengths(4) | xa.masks.segments(np.ones((2, 5), int)),
        jnp.ones((2, 1, 1, 5), bool),
        xa.masks.Mask(()),
    ],
    ids=["padding", "packing", "array", "nothing"],
)
def test_a_mask_that_leaves_causality_open_is_refused(mask):
    """Combinations of such masks by "not", "and" and "or" are refused too."""
    block, _ = decoder_block()
    mask, padding = xa.masks.as_mask(mask), xa.masks.key_padding(np.ones((2, 5), bool))
    twins = [~(~mask | ~padding), ~(~mask & ~padding), mask & ~padding, ~padding | mask]
    for one in (mask, ~mask, ~~mask, *twins):
        with pytest.raises(ValueError, match=r"masks\.causal\(\) & mask, or masks\.window"):
            block(jnp.asarray(X), BlockState(), mask=one)


@pytest.mark.parametrize("rope", [None, 100.0], ids=["no rope", "rope"])
@pytest.mark.parametrize("chunks", [[1] * 5, [2, 3]], ids=["one by one", "in chunks"])
def test_a_decoder_block_step_by_step_equals_all_at_once(chunks, rope):
    block, _ = decoder_block(rope_base=rope)
    step = jax.jit(lambda x, state: block(x, state))
    whole, _ = block(jnp.asarray(X), BlockState())
    state, pieces, start = BlockState(cache=block.attention.cache((2,), 6)), [], 0
    for size in chunks:
        piece, state = step(X[:, start : start + size], state)
        pieces.append(piece)
        start += size
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("near", [None, 1], ids=["causal", "window"])
def test_a_mask_without_a_place_of_its_queries_goes_on_after_the_cache(near):
    """``causal() & mask``, as the refusal of an open mask says, also where earlier positions are cached."""
    block, _ = decoder_block()
    valid = jnp.asarray([[True, False, True, True, True, True], [True] * 6])
    mask = xa.masks.window(near) & xa.masks.key_padding(valid[:, :5])
    whole, _ = block(jnp.asarray(X), BlockState(), mask=mask)
    padded = xa.masks.window(near) & xa.masks.key_padding(valid)
    state, pieces = BlockState(cache=block.attention.cache((2,), 6)), []
    for at, size in ((0, 2), (2, 1), (3, 2)):
        piece, state = block(jnp.asarray(X[:, at : at + size]), state, mask=padded)
        pieces.append(piece)
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole, rtol=2e-5, atol=2e-5)


def test_cross_attention_and_its_source_come_together():
    block, _ = decoder_block(10)
    x = jnp.asarray(X)
    with pytest.raises(ValueError, match="reads the memory 'source', which neither its state"):
        block(x, BlockState())
    source = block.read({"source": jnp.asarray(SOURCE)})
    alone, _ = decoder_block()
    with pytest.raises(ValueError, match="a memory for cross, which no sublayer of this Decoder"):
        alone(x, source)


@pytest.mark.parametrize("rate", ["dropout_rate", "attention_dropout_rate"])
def test_dropout_follows_the_key(rate):
    config = CONFIG.changed(**{rate: 0.5})
    build = lambda rngs: EncoderBlock(config, rngs=rngs)  # noqa: E731
    params = oracle.random_params(build)
    call = jax.jit(lambda key: xa.apply(build, params, jnp.asarray(X), None, key)[0])
    np.testing.assert_allclose(call(None), oracle.block(params, X), rtol=2e-5, atol=2e-5)
    first, second = call(jax.random.key(0)), call(jax.random.key(1))
    assert not np.allclose(first, second)
    np.testing.assert_array_equal(first, call(jax.random.key(0)))


def gated_block(rngs):
    """Two memories, of two sizes, each behind a gate; then an encoder's sublayers."""
    return Block(
        first=CONFIG.cross_attention(rngs, memory_dim=10, reads="source", gated=True),
        second=CONFIG.cross_attention(rngs, memory_dim=8, reads="other", gated=True),
        attention=CONFIG.self_attention(rngs),
        feedforward=CONFIG.feedforward(rngs),
    )


def test_a_gate_of_zero_leaves_the_block_without_its_sublayer_and_learns():
    params = jax.device_get(xa.init(gated_block, jax.random.key(0)))
    memories = {
        "source": jnp.asarray(SOURCE),
        "other": Encoded(jnp.asarray(X), jnp.asarray(VALID[:, :5])),
    }
    call = jax.jit(lambda p: xa.apply(gated_block, p, jnp.asarray(X), memories=memories)[0])
    expected = oracle.block(params, X)
    np.testing.assert_allclose(call(params), expected, rtol=2e-5, atol=2e-5)
    gradient = jax.grad(lambda p: jnp.sum(call(p) ** 2))(params)
    assert gradient["first_residual"]["gate"] != 0


def test_sublayers_read_the_memories_that_they_name():
    params = oracle.random_params(gated_block)
    valid = np.arange(5) < np.array([[5], [2]])
    memories = {
        "source": jnp.asarray(SOURCE),
        "other": Encoded(jnp.asarray(X[::-1]), jnp.asarray(valid)),
    }
    block = xa.functional.bind(gated_block, params)
    names = ("first", "+first", "first.weights", "second.weights", "attention.weights")
    out, state = jax.jit(lambda x: block(x, memories=memories, capture=names))(X)
    x, passed = X.astype(np.float64), {}
    for name, memory, allowed in (("first", SOURCE, None), ("second", X[::-1], valid[:, None])):
        norm = oracle.norm(params[f"{name}_residual"]["norm"], x)
        passed[name], weights = oracle.attention(params[name], norm, memory, allowed)
        x = x + np.tanh(params[f"{name}_residual"]["gate"]) * passed[name]
        passed[f"+{name}"], passed[f"{name}.weights"] = x, weights
    norm = oracle.norm(params["attention_residual"]["norm"], x)
    passed["attention.weights"] = oracle.attention(params["attention"], norm, norm)[1]
    np.testing.assert_allclose(out, oracle.block(params, x), rtol=1e-4, atol=1e-4)
    assert set(state.captured) == set(names)
    for name, found in state.captured.items():
        np.testing.assert_allclose(found, passed[name], rtol=1e-4, atol=1e-4)
    read = jax.jit(lambda x: block(x, block.read(memories))[0])
    np.testing.assert_allclose(read(X), out, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"capture": ("first", "fist.weights")}, "capture names 'fist.weights'; .* of first,"),
        ({"capture": ("feedforward.weights",)}, "capture names 'feedforward.weights'; expected"),
        ({"memory_masks": {"sauce": None}}, "a mask of 'sauce', a memory that no layer reads"),
    ],
)
@pytest.mark.parametrize("stacked", [False, True], ids=["block", "stack"])
def test_a_name_to_capture_or_a_mask_that_no_sublayer_has_is_refused(stacked, options, said):
    made = xa.nn.Stack(gated_block, 2, rngs=nnx.Rngs(0)) if stacked else gated_block(nnx.Rngs(0))
    memories = {"source": jnp.asarray(SOURCE), "other": jnp.asarray(X)}
    with pytest.raises(ValueError, match=said):
        made(jnp.asarray(X), memories=memories, **options)


@pytest.mark.parametrize("first", [True, False], ids=["pre-norm", "post-norm"])
def test_a_condition_scales_and_shifts_norms_and_gates_what_is_added(first):
    """adaLN-Zero: at first a block with a condition adds nothing."""
    config = dataclasses.replace(CONFIG.changed(norm_first=first), condition_dim=3)
    build = lambda rngs: EncoderBlock(config, rngs=rngs)  # noqa: E731
    params, condition = oracle.random_params(build), RNG.normal(size=(2, 3)).astype(np.float32)
    call = jax.jit(lambda p, c: xa.apply(build, p, jnp.asarray(X), condition=c)[0])

    def of(p, name):
        return (condition.astype(np.float64) @ p[name]["kernel"] + p[name]["bias"])[:, None]

    x = X.astype(np.float64)
    for name in ("attention", "feedforward"):
        p = params[f"{name}_residual"]
        norm = lambda x, p=p: (1 + of(p, "scale")) * oracle.norm(p["norm"], x) + of(p, "shift")  # noqa: E731
        y = norm(x) if first else x
        y = (
            oracle.attention(params[name], y, y)[0]
            if name == "attention"
            else oracle.feedforward(params[name], y)
        )
        x = x + of(p, "opening") * y
        x = x if first else norm(x)
    np.testing.assert_allclose(call(params, condition), x, rtol=1e-4, atol=1e-4)
    if first:
        fresh = xa.init(build, jax.random.key(0))
        np.testing.assert_array_equal(call(fresh, condition), X)


def test_a_condition_and_its_size_come_together():
    x, condition = jnp.asarray(X), jnp.ones((2, 3))
    without = EncoderBlock(CONFIG, rngs=nnx.Rngs(0))
    conditioned = EncoderBlock(dataclasses.replace(CONFIG, condition_dim=3), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="got a condition, but this block has no condition_dim"):
        without(x, condition=condition)
    with pytest.raises(ValueError, match="got no condition, but this block has a condition_dim"):
        conditioned(x)


def test_a_cache_that_two_sublayers_would_share_is_refused():
    own = lambda: CONFIG.self_attention(nnx.Rngs(0), causal=True)  # noqa: E731
    block = Block(first=own(), second=own())
    state = BlockState(cache=block.first.cache((2,), 8))
    with pytest.raises(ValueError, match="2 sublayers of self-attention, first, second"):
        block(jnp.asarray(X[:, :1]), state)


@pytest.mark.parametrize("kind", [xa.nn.AdditiveAttention, xa.nn.LuongAttention])
def test_attention_that_only_reads_memories_is_no_self_attention(kind):
    sublayer = dataclasses.replace(
        CONFIG.self_attention(nnx.Rngs(0)), inner=kind(CONFIG.dim, rngs=nnx.Rngs(0))
    )
    with pytest.raises(ValueError, match=f"^own reads itself, but its {kind.__name__} has no ext"):
        Block(own=sublayer)


@pytest.mark.parametrize("name", ["scope", "sublayers", "read"])
def test_a_sublayer_does_not_take_the_name_of_a_part_of_its_block(name, in_production):
    with pytest.raises(ValueError, match=f"a sublayer is called '{name}'"):
        Block(**{name: CONFIG.feedforward(nnx.Rngs(0))})


def test_cross_attention_may_have_another_shape():
    config = dataclasses.replace(CONFIG, cross=AttentionConfig(4, head_dim=3, use_bias=False))
    build = lambda rngs: DecoderBlock(config, 10, rngs=rngs)  # noqa: E731
    params = oracle.random_params(build)
    assert params["attention"]["query"]["kernel"].shape == (8, 2, 4)
    assert params["cross"]["query"]["kernel"].shape == (8, 4, 3)
    assert "bias" not in params["cross"]["key"]
    out, _ = jax.jit(lambda x, s: xa.apply(build, params, x, memories={"source": s}))(X, SOURCE)
    expected = oracle.block(params, X, memory=SOURCE, allowed=np.tri(5, dtype=bool))
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


def test_flat_values_go_where_they_belong():
    flat = dict(activation="gelu", use_bias=False, attention_scale=1.0, norm="rms")
    shape, attention = (
        BlockConfig.of(8, 2, 12, **flat),
        AttentionConfig(2, use_bias=False, scale=1.0),
    )
    network = FeedForwardConfig(12, "gelu", use_bias=False)
    assert shape == BlockConfig(8, attention, network, norm="rms")
    with pytest.raises(TypeError, match="a block has no heads; expected of activation"):
        shape.changed(heads=3)
