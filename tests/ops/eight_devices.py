"""A program for eight virtual CPU devices: prints what is wrong with each case, "" for nothing."""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import crossattn as xa
from crossattn import testing
from tests.closeness import close


def attends():
    """attend_sharded over all eight devices, either way."""
    mesh = jax.make_mesh((8,), ("seq",), (AxisType.Auto,))
    return {
        strategy: functools.partial(xa.attend_sharded, mesh=mesh, axis="seq", strategy=strategy)
        for strategy in ("merge", "ring")
    }


def batch_over_other_devices(strategy):
    """Batch and memory split over two mesh axes, inside jit, with a traced scale and the lse."""
    mesh = jax.make_mesh((2, 4), ("data", "seq"), (AxisType.Auto,) * 2)
    draw = np.random.default_rng(0).normal
    q, k, v = (np.float32(draw(size=(2, length, 2, 4))) for length in (8, 12, 12))
    split = NamedSharding(mesh, PartitionSpec("data", "seq"))
    sharded = functools.partial(xa.attend_sharded, mesh=mesh, axis="seq", strategy=strategy)

    def loss(attend, *arrays):
        *qkv, scale = arrays
        out, lse = attend(*qkv, xa.masks.window(3), scale=scale, return_lse=True)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

    def run(attend, *arrays):
        call = jax.jit(jax.value_and_grad(functools.partial(loss, attend), (0, 1, 2, 3)))
        return call(*arrays, jnp.float32(0.6))

    found = run(sharded, *(jax.device_put(x, split) for x in (q, k, v)))
    close(found, run(xa.attend, q, k, v))
    out = jax.jit(sharded)(*(jax.device_put(x, split) for x in (q, k, v)))
    wanted = PartitionSpec(None, "seq") if strategy == "ring" else PartitionSpec()
    parts = {shard.data.shape[1] for shard in out.addressable_shards}
    assert parts == {2 if strategy == "ring" else 8}, f"{out.sharding}, expected {wanted}"


def fault(check, *arguments):
    try:
        check(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}" or "failed"
    return ""


def main(chosen):
    cases = testing.cases()
    found = {
        f"{strategy} {name}": fault(testing.check, attend, cases[name])
        for strategy, attend in attends().items()
        for name in chosen[strategy]
    }
    for strategy in ("merge", "ring"):
        found[f"{strategy} two axes"] = fault(batch_over_other_devices, strategy)
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
