"""Architectures written from outside: equal to numpy, learning, masked, the same on eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import crossattn as xa
from crossattn.train.sharding import MeshConfig, make_mesh, params_sharding
from tests import numpy_model as oracle
from tests.closeness import close

from .flamingo import Flamingo
from .perceiver import Perceiver

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(4, 9, 6)).astype(np.float32)
VALID = np.arange(9) < np.array([[9], [5], [7], [1]])
TOKENS = RNG.integers(3, 32, (4, 7)).astype(np.int32)
IMAGES = RNG.normal(size=(4, 2, 5, 6)).astype(np.float32)
PLACES = np.array([[1, 4], [0, 2], [2, 3], [1, 6]], np.int32)  # where each image stands in its text


def perceiver(rngs):
    return Perceiver(16, 6, num_latents=3, num_classes=5, rngs=rngs)


def flamingo(rngs):
    return Flamingo(32, 16, 6, rngs=rngs)


MODELS = {
    "perceiver": (perceiver, (INPUTS, VALID)),
    "flamingo": (flamingo, (TOKENS, IMAGES, PLACES)),
}


def runs(build, params):
    return jax.jit(lambda *inputs: xa.apply(build, params, *inputs))


def reads(p, name, x, memory, allowed):
    """x plus what a cross-attention sublayer reads, times the tanh of its gate if it has one."""
    normed = oracle.norm(p[name + "_residual"]["norm"], x)
    gate = np.tanh(p[name + "_residual"].get("gate", np.inf))
    return x + gate * oracle.attention(p[name], normed, memory, allowed)[0]


def latents_in_numpy(p, inputs, allowed):
    """Latents [B L D] that read inputs [B S M] and think, twice, with one set of parameters."""
    z = np.repeat(p["latents"][None].astype(np.float64), len(inputs), 0)
    read, think = (p["stack"]["layers"][name] for name in "01")
    network = lambda x: oracle.feedforward(read["feedforward"], x, "gelu")  # noqa: E731
    for _ in range(2):
        z = reads(read, "cross", z, inputs, allowed)
        z = oracle.residual(read["feedforward_residual"], z, network, True)
        z = oracle.block(think, z, act="gelu")
    return oracle.norm(p["norm"], z)


def flamingo_in_numpy(p, tokens, images, places):
    """Logits [B T V]; a token reads the latents of the last image before it, by a loop."""
    (B, T), (_, count, S, M) = tokens.shape, images.shape
    memory = latents_in_numpy(p["resampler"], images.reshape(-1, S, M), None)
    memory = memory.reshape(B, 3 * count, -1)
    allowed = np.zeros((B, T, 3 * count), bool)
    for row, t, image in np.ndindex(B, T, count):
        before = [i for i in range(count) if places[row, i] <= t]
        allowed[row, t, 3 * image : 3 * image + 3] = before[-1:] == [image]
    y, layers = (
        oracle.embed(p["target_input"], tokens, "sinusoidal"),
        p["decoder"]["stack"]["layers"],
    )
    for period in range(2):
        gated, plain = (layers[str(2 * period + i)] for i in range(2))
        y = reads(gated, "gated", y, memory, allowed)
        own = gated["gated_feedforward_residual"]
        more = oracle.feedforward(gated["gated_feedforward"], oracle.norm(own["norm"], y))
        y = y + np.tanh(own["gate"]) * more
        y = oracle.block(plain, y, allowed=np.tri(T, dtype=bool))
    return oracle.norm(p["decoder"]["norm"], y) @ p["output"]["table"].T.astype(np.float64)


def test_a_perceiver_is_what_numpy_makes_of_its_parameters():
    params = oracle.random_params(perceiver)
    z = latents_in_numpy(params, INPUTS, VALID[:, None])
    output = params["output"]["linear"]
    expected = z.mean(1) @ output["kernel"].astype(np.float64) + output["bias"]
    close(runs(perceiver, params)(INPUTS, VALID), expected, ulps=1000)


def test_a_flamingo_is_what_numpy_makes_of_its_parameters():
    params = oracle.random_params(flamingo)
    assert all(abs(gate) > 0.01 for gate in gates(params)), "a gate is shut"
    expected = flamingo_in_numpy(params, TOKENS, IMAGES, PLACES)
    close(runs(flamingo, params)(TOKENS, IMAGES, PLACES), expected, ulps=1000)


def gates(params):
    """The gates of all sublayers that have one."""
    flat = xa.functional.flatten(params)
    return [x for name, x in flat.items() if name.endswith("gate")]


def test_latents_read_what_is_valid_alone():
    params = oracle.random_params(perceiver)
    run = runs(perceiver, params)
    out = run(INPUTS, VALID)
    np.testing.assert_array_equal(out, run(np.where(VALID[..., None], INPUTS, 7), VALID))
    np.testing.assert_allclose(out[1:2], run(INPUTS[1:2, :5], VALID[1:2, :5]), rtol=1e-4, atol=1e-5)


def test_tokens_read_the_last_image_before_them():
    params = oracle.random_params(flamingo)
    run = runs(flamingo, params)
    before = run(TOKENS, IMAGES, PLACES)
    for image in range(2):
        changed = IMAGES.copy()
        changed[:, image] += 1
        differs = np.any(run(TOKENS, changed, PLACES) != before, axis=-1)
        first = np.argmax(differs, axis=-1)
        np.testing.assert_array_equal(first, PLACES[:, image])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_learns_and_eight_devices_give_what_one_gives(name, in_production):
    build, inputs = MODELS[name]

    def loss(params, inputs):
        return jnp.sin(xa.apply(build, params, *inputs)).sum()

    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    params = oracle.random_params(build)
    places = params_sharding(params, xa.functional.logical_axes(build), mesh)
    placed = jax.device_put(params, places)
    assert any("tensor" in str(x.sharding.spec) for x in jax.tree.leaves(placed))
    rows = jax.device_put(inputs, NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))
    call = jax.jit(jax.value_and_grad(loss))
    found, alone = (jax.device_get(call(*given)) for given in ((placed, rows), (params, inputs)))
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-3, atol=1e-3)
    for path, leaf in xa.functional.flatten(alone[1]).items():
        # Softmax ignores a bias of the keys, and the resampler's head of classes is unused.
        assert path.endswith("key.bias") or path.startswith("resampler.output") or np.any(leaf), (
            path
        )
