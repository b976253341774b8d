"""A program for eight virtual CPU devices: prints what is wrong with each model, "" for nothing."""

import json

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import crossattn as xa
from crossattn.train.sharding import MeshConfig, make_mesh, params_sharding
from tests import numpy_model as oracle
from tests.extending.test_models import MODELS


def compare(build, inputs):
    def loss(params, inputs):
        return jax.numpy.sin(xa.apply(build, params, *inputs)).sum()

    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    params = oracle.random_params(build)
    placed = jax.device_put(
        params, params_sharding(params, xa.functional.logical_axes(build), mesh)
    )
    assert any("tensor" in str(x.sharding.spec) for x in jax.tree.leaves(placed))
    rows = jax.device_put(inputs, NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))
    call = jax.jit(jax.value_and_grad(loss))
    found, alone = (jax.device_get(call(*given)) for given in ((placed, rows), (params, inputs)))
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-3, atol=1e-3)


def fault(build, inputs):
    try:
        compare(build, inputs)
    except Exception as error:
        return f"{type(error).__name__}: {error}" or "failed"
    return ""


if __name__ == "__main__":
    assert jax.device_count() == 8
    print(json.dumps({name: fault(*model) for name, model in MODELS.items()}))
