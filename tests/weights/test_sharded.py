"""A checkpoint read onto several devices has the parameters that it has on one."""

import sys

import jax
import numpy as np
import pytest

import crossattn as xa
from crossattn.train import sharding
from tests.conftest import on_eight_devices
from tests.weights import checkpoints


@pytest.mark.slow
def test_each_device_gets_its_part_of_each_tensor(tmp_path):
    folder = checkpoints.fresh(checkpoints.BART, tmp_path / "bart")
    assert on_eight_devices("-m", "tests.weights.test_sharded", str(folder)) == "equal\n"


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
