"""A program for two virtual CPU devices: runs whose optimiser's state lies with the host, and with them."""

import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from toy_task import ToyTask

from crossattn.train.config import CheckpointConfig, TrainConfig
from crossattn.train.loop import train
from crossattn.train.optim import OptimConfig
from crossattn.train.sharding import MeshConfig
from crossattn.train.writers import Writer

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    optim = OptimConfig(learning_rate=0.05, schedule="constant")
    config = TrainConfig(
        steps=6, optim=optim, mesh=MeshConfig(fsdp=2), checkpoint=CheckpointConfig(every=3)
    )
    here = train(ToyTask(), config, folder / "here", writers=[Writer()])
    offloaded = replace(config, offload_optimizer=True)
    train(ToyTask(), replace(offloaded, steps=3), folder / "there", writers=[Writer()])
    there = train(ToyTask(), offloaded, folder / "there", writers=[Writer()])  # from its checkpoint
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(there.state.opt_state)}
    assert kinds == {"pinned_host"}, kinds
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(there.state.params)}
    assert "pinned_host" not in kinds, kinds
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (here.state, there.state)))
    print("equal")
