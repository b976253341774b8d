"""A program for eight virtual CPU devices: losses, gradients, optimisers and runs against one device's.

It prints {case: its error, "" for none}.
"""

import functools
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import crossattn as xa
from crossattn.models import perceiver_io, transformer
from crossattn.train.config import CheckpointConfig, TrainConfig
from crossattn.train.linear_loss import linear_cross_entropy
from crossattn.train.loop import train
from crossattn.train.losses import cross_entropy
from crossattn.train.optim import OptimConfig, make_optimizer
from crossattn.train.sharding import (
    MeshConfig,
    batch_sharding,
    make_mesh,
    params_sharding,
    put_batch,
    state_sharding,
)
from crossattn.train.state import init_state
from crossattn.train.step import make_train_step
from crossattn.train.writers import Writer
from experiments.plan.collectives import collectives
from experiments.plan.hlo import Module
from tests.closeness import close
from tests.train.toy_task import ToyTask, assert_same

ROWS, LENGTH, VOCAB, DIM = 16, 8, 64, 16
RANDOM = np.random.default_rng(0)
TOKENS = RANDOM.integers(1, VOCAB, (3, ROWS, LENGTH)).astype(np.int32)
BATCH = dict(
    source=TOKENS[0], read=TOKENS[1], told=TOKENS[2], weights=(TOKENS[2] % 5 > 0).astype(np.int32)
)
MESHES = {
    "data": {"data": 8},
    "all": {"data": 2, "fsdp": 2, "tensor": 2},
    "seq": {"data": 2, "fsdp": 1, "tensor": 2, "seq": 2},
}


def sent(compiled, mesh, axis):
    """Bytes that a device sends along an axis of the mesh, loops as often as they run."""
    found = collectives(Module(compiled.as_text()), dict(mesh.shape))
    return sum(c.sent for c in found if axis in c.axes)


def check_loss(name, chunks):
    """A loss in chunks, of its table's parts."""
    vectors = RANDOM.normal(size=(ROWS, LENGTH, DIM)).astype(np.float32)
    table = RANDOM.normal(size=(VOCAB, DIM)).astype(np.float32)

    def loss(vectors, table, labels, weights):
        return linear_cross_entropy(
            vectors, table, labels, weights, label_smoothing=0.1, z_loss=0.01, chunks=chunks
        )

    def plain(vectors, table, labels, weights):
        logits = jnp.einsum("btd,vd->btv", vectors, table, precision="highest")
        return cross_entropy(logits, labels, weights, 0.1, 0.01)

    given = vectors, table, BATCH["told"], BATCH["weights"]
    expected = jax.value_and_grad(plain, (0, 1), has_aux=True)(*given)
    mesh = make_mesh(MeshConfig(**MESHES[name]))
    assert mesh is not None
    places = [batch_sharding(x.shape, mesh) for x in given]
    places[1] = params_sharding(table, ("vocab", "embed"), mesh)
    run = jax.jit(
        jax.value_and_grad(loss, (0, 1), has_aux=True), out_shardings=(None, tuple(places[:2]))
    )
    given = jax.device_put(given, tuple(places))
    close(run(*given), expected, ulps=200)
    close(jax.jit(loss)(*given), expected[0], ulps=200)
    once = 3 * table.nbytes  # gathered, and its gradient summed
    for axis in ("data", "fsdp"):
        assert sent(run.lower(*given).compile(), mesh, axis) <= once + 2048, f"more along {axis}"


def check_accumulated(name):
    """Microbatches through scanned layers with dropout."""
    config = transformer.tiny(scan=True)
    config = replace(config, block=replace(config.block, dropout_rate=0.3))
    build = functools.partial(_build, transformer.Transformer, config)

    def loss(params, batch, key):
        model = xa.functional.bind(build, params)
        hidden, _ = model.hidden(batch["source"], batch["read"], key=key)
        table = model.output_table()
        return linear_cross_entropy(hidden, table, batch["told"], batch["weights"], chunks=2)

    optimizer = optax.sgd(1.0)
    params = xa.functional.init(build, jax.random.key(0))
    state = jax.device_get(init_state(params, optimizer))
    alone, _ = make_train_step(loss, optimizer, accumulate=2)(state, BATCH)
    mesh = make_mesh(MeshConfig(**MESHES[name]))
    places = state_sharding(state, xa.functional.logical_axes(build), mesh)
    step = make_train_step(loss, optimizer, accumulate=2, state_sharding=places)
    given = jax.device_put(state, places), put_batch(BATCH, mesh)
    compiled = step.lower(*given).compile()
    found, _ = compiled(*given)
    close_as_a_whole(found.params, jax.device_get(alone.params))
    weights = sum(x.nbytes for x in jax.tree.leaves(state.params))
    assert sent(compiled, mesh, "data") <= 2 * weights + 2048, "gradients are sent more than once"


def check_repeated(name):
    """Four repeats of the same layers with dropout."""
    config = perceiver_io.tiny(repeats=4, scan=True)
    config = replace(config, block=replace(config.block, dropout_rate=0.3))
    build = functools.partial(_build, perceiver_io.PerceiverIO, config)
    params = xa.functional.init(build, jax.random.key(0))

    def loss(params, tokens):
        key = jax.random.key(1)
        return (xa.functional.apply(build, params, tokens, key=key) ** 2).mean()

    tokens = BATCH["source"] % config.vocab_size
    expected = jax.device_get(jax.jit(jax.value_and_grad(loss))(params, tokens))
    mesh = make_mesh(MeshConfig(**MESHES[name]))
    places = params_sharding(params, xa.functional.logical_axes(build), mesh)
    run = jax.jit(jax.value_and_grad(loss), out_shardings=(None, places))
    given = jax.device_put(params, places), put_batch(tokens, mesh)
    compiled = run.lower(*given).compile()
    close_as_a_whole(compiled(*given), expected)
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    assert sent(compiled, mesh, "data") <= 2 * weights + 2048, "gradients are sent more than once"


def close_as_a_whole(found, expected):
    """A number that all keys have in common moves no softmax: its gradient is rounding alone."""
    close(found, expected, ulps=500, size=max(np.abs(x).max() for x in jax.tree.leaves(expected)))


def _build(module, config, rngs):
    return module(config, rngs=rngs)


ADAFACTOR_AXES = {
    "table": ("vocab", "embed"),
    "query": ("layers", "embed", "heads", "head_dim"),
    "up": ("layers", "embed", "mlp"),
    "norm": ("layers", "norm"),
}
SHAPES = {"table": (256, 128), "query": (2, 128, 8, 16), "up": (2, 128, 256), "norm": (2, 128)}
# Parts of eight, of the means over columns and over rows, on data 2 x fsdp 2 x tensor 2.
ROW_PARTS = {"table": (64, 1), "query": (2, 64, 1, 1), "up": (2, 64, 1), "norm": (2, 128)}
COLUMN_PARTS = {"table": (1, 64), "query": (2, 1, 4, 16), "up": (2, 1, 128), "norm": (1, 1)}


def check_adafactor():
    """Three updates, and the places of the moments."""
    make = lambda shape: jnp.asarray(RANDOM.normal(size=shape), jnp.float32)  # noqa: E731
    draws = [{name: make(shape) for name, shape in SHAPES.items()} for _ in range(4)]
    config = OptimConfig(name="adafactor", learning_rate=0.1)
    optimizer, _ = make_optimizer(config, 11, ADAFACTOR_AXES)
    state = init_state(draws[0], optimizer)

    def update(params, opt_state, grads):
        steps, opt_state = optimizer.update(grads, opt_state, params)
        return jax.tree.map(jnp.add, params, steps), opt_state

    def updated(**options):
        step, found = jax.jit(update, **options), (state.params, state.opt_state)
        for grads in draws[1:]:
            found = step(*found, grads)
        return found

    places = state_sharding(state, ADAFACTOR_AXES, make_mesh(MeshConfig(**MESHES["all"])))
    parts = updated(out_shardings=(places.params, places.opt_state))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), parts, updated()
    )
    (moments,) = [each for each in parts[1] if hasattr(each, "rows")]
    for tree, wanted in ((moments.rows, ROW_PARTS), (moments.columns, COLUMN_PARTS)):
        for name, x in tree.items():
            assert {shard.data.shape for shard in x.addressable_shards} == {wanted[name]}, name


def check_offloaded():
    """A run whose optimiser's state lies with the host, begun anew from its checkpoint."""
    optim = OptimConfig(learning_rate=0.05, schedule="constant")
    mesh, checkpoint = MeshConfig(fsdp=2), CheckpointConfig(every=3)
    config = TrainConfig(steps=6, optim=optim, mesh=mesh, checkpoint=checkpoint)
    offloaded = replace(config, offload_optimizer=True)
    with tempfile.TemporaryDirectory() as folder:
        here = train(ToyTask(), config, Path(folder, "here"), writers=[Writer()])
        for part in (replace(offloaded, steps=3), offloaded):
            there = train(ToyTask(), part, Path(folder, "there"), writers=[Writer()])
    trees = there.state.opt_state, there.state.params
    kinds = [{x.sharding.memory_kind for x in jax.tree.leaves(tree)} for tree in trees]
    assert kinds[0] == {"pinned_host"} and "pinned_host" not in kinds[1], kinds
    assert_same(here.state, there.state)


CASES = {
    "loss on all axes": functools.partial(check_loss, "all", 4),
    "loss along seq": functools.partial(check_loss, "seq", 4),
    "accumulated": functools.partial(check_accumulated, "all"),
    "repeated": functools.partial(check_repeated, "data"),
    "adafactor": check_adafactor,
    "offloaded": check_offloaded,
}


def fault(check):
    try:
        check()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:2000] or "failed"
    return ""


if __name__ == "__main__":
    assert jax.device_count() == 8
    print(json.dumps({name: fault(check) for name, check in CASES.items()}))
