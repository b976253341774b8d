"""A program for eight virtual CPU devices: loads a checkpoint whole and in parts, and compares them."""

import sys

import jax
import numpy as np

import crossattn as xa
from crossattn.train import sharding

if __name__ == "__main__":
    mesh = sharding.make_mesh(sharding.MeshConfig(data=1, fsdp=4, tensor=2))
    _, whole, _ = xa.load(sys.argv[1])
    model, parts, _ = xa.load(sys.argv[1], place=sharding.placement(mesh))
    wanted = sharding.params_sharding(whole, xa.functional.logical_axes(model), mesh)
    jax.tree.map(np.testing.assert_array_equal, parts, whole)
    assert jax.tree.map(lambda x: x.sharding, parts) == wanted
    query = parts["encoder"]["layers"]["0"]["attention"]["query"]["kernel"]
    assert {shard.data.shape for shard in query.addressable_shards} == {(2, 1, 4)}
    print("equal")
