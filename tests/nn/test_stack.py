"""Looped, scanned and rematerialised stacks are one function with two layouts of parameters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

import crossattn as xa
from crossattn.nn import BlockConfig, DecoderBlock, DecoderStack, EncoderBlock, Stack
from crossattn.nn.stack import layer_weights, stack_layers, unstack_layers
from crossattn.train.sharding import spec
from tests import numpy_model as oracle

DEPTH = 2
CONFIG = BlockConfig.of(dim=8, num_heads=2, mlp_dim=12, dropout_rate=0.3)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 5, 8)).astype(np.float32)
SOURCE = RNG.normal(size=(2, 4, 8)).astype(np.float32)


def encoder(**options):
    return lambda rngs: Stack(lambda r: EncoderBlock(CONFIG, rngs=r), DEPTH, **options, rngs=rngs)


def decoder(**options):
    return lambda rngs: Stack(
        lambda r: DecoderBlock(CONFIG, 8, rngs=r), DEPTH, **options, rngs=rngs
    )


LOOPED = oracle.random_params(encoder())
SCANNED = {"layers": stack_layers(LOOPED["layers"])}


def value_and_gradient(build, params, key):
    """Sum of squares of the stack's output, dropout included, and its gradient."""

    def loss(params):
        out, _ = xa.apply(build, params, jnp.asarray(X), key=key, mask=xa.masks.causal())
        return jnp.sum(out**2)

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.fixture(scope="module")
def looped():
    return value_and_gradient(encoder(), LOOPED, jax.random.key(7))


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("scan", "remat"),
    [(True, False), (False, True), (True, True), (False, "dots_saveable"), (True, "dots_saveable")],
)
def test_scan_and_remat_change_neither_values_nor_gradients(scan, remat, looped):
    params = SCANNED if scan else LOOPED
    key = jax.random.key(7)
    value, gradient = value_and_gradient(encoder(scan=scan, remat=remat), params, key)
    expected_value, expected_gradient = looped
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    if scan:
        gradient = {"layers": unstack_layers(gradient["layers"])}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3),
        gradient,
        expected_gradient,
    )


def products(remat):
    """Matrix products of the gradient of a stack, which are what computing again repeats."""
    key = jax.random.key(7)
    traced = jax.make_jaxpr(lambda p: value_and_gradient(encoder(remat=remat), p, key))(LOOPED)
    return str(traced).count("dot_general")


def test_a_policy_keeps_what_it_names():
    assert products(True) > products("dots_with_no_batch_dims_saveable")
    assert products("dots_with_no_batch_dims_saveable") >= products("dots_saveable")


def test_an_unknown_policy_an_empty_period_and_a_config_are_refused(in_production):
    with pytest.raises(ValueError, match="remat is 'everything'; expected True, False or one of"):
        xa.init(encoder(remat="everything"), jax.random.key(0))
    with pytest.raises(TypeError, match="build is a BlockConfig; expected a function"):
        Stack(BlockConfig.of(8, 2, 16), 2, rngs=nnx.Rngs(0))  # ty: ignore
    with pytest.raises(ValueError, match="at least one block"):
        Stack([], 2, rngs=nnx.Rngs(0))


def test_a_looped_stack_equals_numpy_layer_by_layer():
    out, _ = jax.jit(lambda p: xa.apply(encoder(), p, jnp.asarray(X)))(LOOPED)
    expected = X
    for i in range(DEPTH):
        expected = oracle.block(LOOPED["layers"][str(i)], expected)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


def test_layers_stack_in_numeric_order_beyond_nine():
    layers = {str(i): {"kernel": jnp.full((2,), i)} for i in reversed(range(12))}
    np.testing.assert_array_equal(stack_layers(layers)["kernel"][:, 0], np.arange(12))


def test_scanned_and_looped_start_from_the_same_parameters():
    key = jax.random.key(3)
    scanned = xa.init(encoder(scan=True), key)["layers"]
    looped = xa.init(encoder(), key)["layers"]
    jax.tree.map(np.testing.assert_array_equal, scanned, stack_layers(looped))
    jax.tree.map(np.testing.assert_array_equal, unstack_layers(scanned), looped)


def test_scanned_parameters_name_their_layers_axis_first():
    looped = xa.functional.logical_axes(encoder())["layers"]["0"]
    scanned = xa.functional.logical_axes(encoder(scan=True))["layers"]
    is_axes = lambda x: isinstance(x, tuple)  # noqa: E731
    expected = jax.tree.map(lambda axes: ("layers", *axes), looped, is_leaf=is_axes)
    assert scanned == expected


class Plain(nnx.Module):
    """A block of Flax's own layers, whose parameters have no names."""

    def __init__(self, *, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.gain = nnx.Param(jnp.float32(0.5))
        self.attention = xa.nn.MultiHeadAttention(8, 2, rngs=rngs)

    def __call__(self, x, state=None, key=None):
        return x + self.gain[...] * self.dense(self.attention(x)), state


def plain(scan):
    return lambda rngs: Stack(lambda rngs: Plain(rngs=rngs), 3, scan=scan, rngs=rngs)


def test_blocks_of_plain_flax_layers_scan_as_they_loop():
    looped = xa.init(plain(scan=False), jax.random.key(0))
    x = jnp.asarray(X[..., :8])
    expected, _ = xa.apply(plain(scan=False), looped, x)
    found, _ = xa.apply(plain(scan=True), {"layers": stack_layers(looped["layers"])}, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_parameters_without_names_are_whole_on_every_device():
    axes = xa.functional.logical_axes(plain(scan=True))["layers"]
    assert axes["dense"] == {"kernel": ("layers", None, None), "bias": ("layers", None)}
    assert axes["gain"] == ("layers",)
    assert axes["attention"]["query"]["kernel"] == ("layers", "embed", "heads", "head_dim")
    mesh = AbstractMesh((2, 2), ("fsdp", "tensor"))
    assert spec(axes["dense"]["kernel"], (3, 8, 8), mesh) == PartitionSpec(None, None, None)
    assert spec(axes["gain"], (3,), mesh) == PartitionSpec(None)


@pytest.mark.parametrize("remat", [False, True], ids=["kept", "remat"])
def test_states_and_weights_go_through_a_scan_as_through_a_loop(remat):
    params = oracle.random_params(decoder())
    stacked = {"layers": stack_layers(params["layers"])}

    def call(build, params):
        stack = xa.functional.bind(build, params)
        states = stack.map(
            lambda block: dataclasses.replace(
                block.read({"source": jnp.asarray(SOURCE)}), cache=block.attention.cache((2,), 5)
            )
        )
        out, states = stack(
            jnp.asarray(X),
            states,
            mask=xa.masks.causal(offset=jnp.int32(0)),
            capture=("cross.weights",),
        )
        return out, layer_weights(states), states

    looped = jax.jit(lambda p: call(decoder(remat=remat), p))(params)
    scanned = jax.jit(lambda p: call(decoder(scan=True, remat=remat), p))(stacked)
    np.testing.assert_allclose(looped[0], scanned[0], rtol=1e-4, atol=1e-4)
    assert looped[1].shape == (DEPTH, 2, 2, 5, 4)
    np.testing.assert_allclose(looped[1], scanned[1], rtol=1e-4, atol=1e-5)
    for i, state in enumerate(looped[2]):
        np.testing.assert_allclose(state.cache.keys, scanned[2].cache.keys[i], rtol=1e-4, atol=1e-4)
        assert int(state.cache.length) == int(scanned[2].cache.length[i]) == 5


@pytest.mark.quick(1)
@pytest.mark.parametrize("scan", [False, True], ids=["looped", "scanned"])
def test_every_layer_gets_the_condition_whole_and_step_by_step(scan):
    """Against the blocks, called one after the other; the decoder makes it of its context."""
    config = dataclasses.replace(CONFIG, condition_dim=3)
    build = lambda rngs: DecoderStack(config, DEPTH, positions="none", scan=scan, rngs=rngs)  # noqa: E731
    stack = xa.functional.bind(build, oracle.random_params(build))
    x, condition = jnp.asarray(X), jnp.asarray(SOURCE[:, 0, :3])
    expected = x
    for block in stack.stack.blocks():
        expected, _ = block(expected, condition=condition)
    expected = stack.norm(expected)
    whole, _ = stack(x, stack.read(), condition=condition)
    np.testing.assert_allclose(whole, expected, rtol=1e-4, atol=1e-4)

    states, tokens = stack.prefill(stack.read(), 2, 1, 5, condition), jnp.arange(5)[None, None]
    embed = lambda tokens, positions, context: x[:, None][:, :, tokens[0, 0]]  # noqa: E731
    for piece in (tokens[..., :2], tokens[..., 2:]):
        found, states = stack.decode(embed, piece, states, condition=lambda context: context)
        np.testing.assert_allclose(found[:, 0], expected[:, piece[0, 0]], rtol=1e-4, atol=1e-4)


def test_masks_of_memories_that_no_layer_reads_are_refused():
    stack = DecoderStack(CONFIG, 1, memory_dim=8, positions="none", rngs=nnx.Rngs(0))
    states, segments = stack.read(source=jnp.asarray(SOURCE)), jnp.ones((2, 4), int)
    with pytest.raises(ValueError, match="mask of 'images', .* expected of source"):
        stack(jnp.asarray(X), states, memory_masks={"images": None})
    alone = DecoderStack(CONFIG, 1, positions="none", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="mask of 'source', .* expected of none"):
        alone(jnp.asarray(X), alone.read(), source_segment_ids=segments)


def unlike(**options):
    """Periods of an encoder block and one of another shape that reads a memory too."""
    reader = lambda rngs: DecoderBlock(CONFIG.changed(num_heads=1), 8, rngs=rngs)  # noqa: E731
    builds = [lambda rngs: EncoderBlock(CONFIG, rngs=rngs), reader]
    return lambda rngs: Stack(builds, 3, **options, rngs=rngs)


def scanned_periods(layers, period):
    """{"0": layer, ...} of a loop as a scan of periods has them."""
    own = lambda i: {str(j): layers[str(k)] for j, k in enumerate(range(i, len(layers), period))}  # noqa: E731
    return {str(i): stack_layers(own(i)) for i in range(period)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "remat"),
    [(False, True), (True, False)],
    ids=["own-remat", "shared-kept"],
)
def test_a_period_of_unlike_blocks_scans_as_it_loops(share, remat):
    looped, scanned = unlike(share=share, remat=remat), unlike(share=share, scan=True, remat=remat)
    params = oracle.random_params(looped)
    assert len(params["layers"]) == (2 if share else 6)
    other = params if share else {"layers": scanned_periods(params["layers"], 2)}

    def loss(build, params):
        stack = xa.functional.bind(build, params)
        memories = {"source": jnp.asarray(SOURCE)}
        x, states = stack(jnp.asarray(X), key=jax.random.key(1), memories=memories)
        projected, _ = stack(jnp.asarray(X), stack.map(lambda block: block.read(memories)))
        return jnp.sum(x**2) + jnp.sum(projected**2)

    value, gradient = jax.jit(jax.value_and_grad(lambda p: loss(looped, p)))(params)
    found, found_gradient = jax.jit(jax.value_and_grad(lambda p: loss(scanned, p)))(other)
    np.testing.assert_allclose(found, value, rtol=1e-5)
    expected = gradient if share else {"layers": scanned_periods(gradient["layers"], 2)}
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3)  # noqa: E731
    jax.tree.map(close, found_gradient, expected)


@pytest.mark.parametrize("scan", [False, True])
def test_shared_layers_are_one_block_run_again_and_again(scan):
    build = lambda rngs: Stack(  # noqa: E731
        lambda r: EncoderBlock(CONFIG, rngs=r), 3, share=True, scan=scan, rngs=rngs
    )
    params = oracle.random_params(build)
    out, _ = jax.jit(lambda p: xa.apply(build, p, jnp.asarray(X)))(params)
    expected = X
    for _ in range(3):
        expected = oracle.block(params["layers"]["0"], expected)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
