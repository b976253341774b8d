"""A program for eight virtual CPU devices: prints what is wrong with each model's gradients, "" for nothing.

It holds what one device computes as well, for the sake of compiling it once.
"""

import json
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import crossattn as xa
from crossattn.train.sharding import MeshConfig, make_mesh, params_sharding
from tests.closeness import close
from tests.models import every_model


def gradient(name, params, inputs):
    """The loss and its gradient."""
    run = jax.jit(jax.value_and_grad(lambda p, x: every_model.loss(name, p, x)))
    return jax.device_get(run(params, inputs))


def check_finite_and_whole(name, value, found):
    trained = xa.functional.flatten(xa.functional.trainable(every_model.build_of(name)))
    assert np.isfinite(value), "the loss"
    for path, leaf in xa.functional.flatten(found).items():
        assert np.all(np.isfinite(leaf)), f"{path} is not finite"
        # A number that all keys have in common moves no softmax.
        assert np.any(leaf) == trained[path] or path.endswith("key.bias"), f"{path} gets none"


def check_split(name, alone):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    params, axes = (
        every_model.params_of(name),
        xa.functional.logical_axes(every_model.build_of(name)),
    )
    placed = jax.device_put(params, params_sharding(params, axes, mesh))
    assert any("tensor" in str(x.sharding.spec) for x in jax.tree.leaves(placed))
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    found = gradient(name, placed, jax.device_put(every_model.example(name, 4), rows))
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(alone))
    close(found, alone, ulps=5000, size=largest)


def faults(name):
    """Returns the faults of the gradient on one device, and on eight."""
    alone = gradient(name, every_model.params_of(name), every_model.example(name, 4))
    return {
        "gradient": fault(check_finite_and_whole, name, *alone),
        "split": fault(check_split, name, alone),
    }


def fault(check, *given):
    try:
        check(*given)
    except Exception as error:
        return f"{type(error).__name__}: {error}" or "failed"
    return ""


if __name__ == "__main__":
    assert jax.device_count() == 8
    print(json.dumps({name: faults(name) for name in sys.argv[1:]}))
