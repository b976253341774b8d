"""A program for eight virtual CPU devices: Adafactor's steps on a mesh and on one device, compared."""

import jax
import jax.numpy as jnp
import numpy as np

from crossattn.train import sharding
from crossattn.train.optim import OptimConfig, make_optimizer
from crossattn.train.state import init_state

AXES = {
    "table": ("vocab", "embed"),
    "query": ("layers", "embed", "heads", "head_dim"),
    "up": ("layers", "embed", "mlp"),
    "norm": ("layers", "norm"),
}
SHAPES = {"table": (256, 128), "query": (2, 128, 8, 16), "up": (2, 128, 256), "norm": (2, 128)}
# Parts of eight, of the means over columns and over rows, on data 2 x fsdp 2 x tensor 2.
ROWS = {"table": (64, 1), "query": (2, 64, 1, 1), "up": (2, 64, 1), "norm": (2, 128)}
COLUMNS = {"table": (1, 64), "query": (2, 1, 4, 16), "up": (2, 1, 128), "norm": (1, 1)}


def draw(seed):
    random = np.random.default_rng(seed)
    return {
        name: jnp.asarray(random.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()
    }


def train(mesh):
    """The state after three updates."""
    optimizer, _ = make_optimizer(OptimConfig(name="adafactor", learning_rate=0.1), 11, AXES)
    state = init_state(draw(0), optimizer)
    places = sharding.state_sharding(state, AXES, mesh)
    options = {} if places is None else {"out_shardings": (places.params, places.opt_state)}

    def update(params, opt_state, grads):
        steps, opt_state = optimizer.update(grads, opt_state, params)
        return jax.tree.map(jnp.add, params, steps), opt_state

    step = jax.jit(update, **options)
    params, opt_state = state.params, state.opt_state
    for seed in (1, 2, 3):
        params, opt_state = step(params, opt_state, draw(seed))
    return params, opt_state


if __name__ == "__main__":
    parts = train(sharding.make_mesh(sharding.MeshConfig(data=2, fsdp=2, tensor=2)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), parts, train(None)
    )
    (moments,) = [each for each in parts[1] if hasattr(each, "rows")]
    for tree, wanted in ((moments.rows, ROWS), (moments.columns, COLUMNS)):
        for name, x in tree.items():
            assert {shard.data.shape for shard in x.addressable_shards} == {wanted[name]}, name
    print("equal")
