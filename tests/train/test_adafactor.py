"""Adafactor against optax's on plain matrices; what it keeps, and where that lies."""

import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType

from crossattn import functional
from crossattn.models import Transformer
from crossattn.train import sharding
from crossattn.train.adafactor import scale_by_adafactor
from crossattn.train.optim import OptimConfig, factored_sides, make_optimizer
from crossattn.train.state import init_state
from experiments.settings import model_config

OPTAX = optax.chain(
    optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms()
)


def steps(optimizer, param, grads):
    """The steps that a parameter takes for gradients one after the other."""
    state, update, found = optimizer.init(param), jax.jit(optimizer.update), []
    for grad in grads:
        step, state = update(grad, state, param)
        found.append(np.asarray(step))
    return found


def draws(shape, count=3):
    random = np.random.default_rng(0)
    rows = np.exp(random.normal(size=(shape[0],) + (1,) * (len(shape) - 1)))
    grads = [random.normal(size=shape) * rows * 10.0**-i for i in range(count)]
    param = 0.1 * random.normal(size=shape)
    return jnp.asarray(param, jnp.float32), [jnp.asarray(g, jnp.float32) for g in grads]


@pytest.mark.parametrize(
    ("axes", "shape", "matrix"),
    [
        *[(("embed", "mlp"), shape, shape) for shape in [(128, 160), (160, 128), (7, 300), (3, 5)]],
        (("norm",), (40,), (40,)),
        (("embed", "heads", "head_dim"), (192, 8, 16), (192, 128)),
        (("heads", "head_dim", "embed"), (8, 16, 192), (128, 192)),
        (("vocab", "embed"), (256, 128), (256, 128)),
    ],
)
def test_parameters_are_updated_as_by_optax_with_heads_and_their_size_as_one_side(
    axes, shape, matrix
):
    """Matrices of less than 128 rows or columns too, which keep a whole second moment."""
    param, grads = draws(shape)
    ours = steps(scale_by_adafactor(factored_sides(axes)), param, grads)
    theirs = steps(OPTAX, param.reshape(matrix), [grad.reshape(matrix) for grad in grads])
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine.reshape(matrix), other, rtol=2e-5, atol=1e-9)


def test_layers_of_a_scan_are_updated_as_if_they_were_looped():
    param, grads = draws((3, 128, 160))
    stacked = steps(scale_by_adafactor(factored_sides(("layers", "embed", "mlp"))), param, grads)
    for layer in range(3):
        alone = steps(OPTAX, param[layer], [grad[layer] for grad in grads])
        for mine, other in zip(stacked, alone, strict=True):
            np.testing.assert_allclose(mine[layer], other, rtol=2e-5, atol=1e-9)


def state_of(name):
    """(shapes of the state of a config's model under its optimiser, logical axes)."""
    config = importlib.import_module(f"configs.{name}").get_config()
    shape = model_config(config.model, vocab_size=32128, max_length=512)
    build = functional.logical_axes, functional.init
    axes, init = (lambda *a, f=f: f(lambda rngs: Transformer(shape, rngs=rngs), *a) for f in build)
    optimizer, _ = make_optimizer(OptimConfig(**config.optim.to_dict()), 100, axes())
    return jax.eval_shape(lambda key: init_state(init(key), optimizer), jax.random.key(0)), axes()


@pytest.fixture(scope="module")
def eleven_billion():
    return state_of("t5_11b")


@pytest.mark.slow
def test_eleven_billion_parameters_take_hardly_more_to_optimise(eleven_billion):
    state, _ = eleven_billion
    params, kept = (
        sum(x.size for x in jax.tree.leaves(tree)) for tree in (state.params, state.opt_state)
    )
    assert params > 11e9 and kept < params / 1000


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 8, 1, 1), (2, 2, 2, 1), (1, 1, 8, 1)])
def test_nothing_larger_than_a_vector_is_whole_on_every_device(eleven_billion, sizes):
    state, axes = eleven_billion
    mesh = AbstractMesh(sizes, sharding.MESH_AXES, axis_types=(AxisType.Auto,) * 4)
    places = sharding.state_sharding(state, axes, mesh).opt_state
    split = 0
    for x, place in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(places), strict=True):
        whole = place.shard_shape(x.shape) == x.shape
        of_a_layer = x.shape[1:] if x.shape[:1] == (24,) else x.shape
        assert not whole or math.prod(of_a_layer) <= 32128, (x.shape, place.spec)
        split += not whole
    assert split >= 18  # one side at least of each matrix
