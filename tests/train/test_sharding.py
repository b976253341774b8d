"""Pure functions here; eight devices and two processes in processes of their own."""

import functools
import json
import os

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from toy_task import Log, ToyTask, checksum, param_shapes

from crossattn.train import sharding
from crossattn.train.checkpoint import load_params
from crossattn.train.config import CheckpointConfig, TrainConfig
from crossattn.train.errors import NonFiniteLoss
from crossattn.train.loop import train
from crossattn.train.optim import OptimConfig
from crossattn.train.program import make_program
from crossattn.train.sharding import MeshConfig, data_shard, make_mesh, put_batch, spec

MESH = AbstractMesh((2, 2, 2, 1), sharding.MESH_AXES, axis_types=(AxisType.Auto,) * 4)


@pytest.mark.parametrize(
    ("axes", "shape", "expected"),
    [
        (("vocab", "embed"), (8, 4), (("tensor", "fsdp"), None)),
        (("vocab", "embed"), (6, 4), ("tensor", "fsdp")),  # 6 divides over 2, not over 4.
        (("embed", "heads", "head_dim"), (4, 6, 3), ("fsdp", "tensor", None)),
        (("layers", "embed", "mlp"), (3, 4, 8), (None, "fsdp", "tensor")),
        (("norm",), (4,), (None,)),
        (("vocab", "embed"), (7, 4), (None, "fsdp")),  # 7 does not divide: kept whole.
        (("heads", "mlp"), (4, 4), ("tensor", None)),  # A mesh axis is used once.
        ((None, "a new name"), (4, 4), (None, None)),
        ((), (), ()),
    ],
)
def test_the_table_says_where_an_axis_goes(axes, shape, expected):
    assert spec(axes, shape, MESH) == PartitionSpec(*expected)


def test_one_device_needs_no_mesh():
    assert make_mesh() is None
    assert data_shard(None) == (0, 1)
    batch = {"x": np.ones((3, 2))}
    assert put_batch(batch, None) is batch


def test_a_mesh_that_does_not_fit_the_devices_is_refused():
    with pytest.raises(ValueError, match=r"data -1 x fsdp 1 x tensor 64 x seq 1 does not fit"):
        make_mesh(MeshConfig(tensor=64))


class Chip:
    """A device of a slice, as far as a mesh looks at it."""

    platform, device_kind, core_on_chip = "tpu", "TPU v5 lite", 0

    def __init__(self, slice_index, x, y):
        self.slice_index, self.coords = slice_index, (x, y, 0)
        self.id = 100 * slice_index + 10 * x + y
        self.process_index = 2 * slice_index + x // 2


def slices(count):
    """As many slices of 4 x 4 chips."""
    return [Chip(i, x, y) for i in range(count) for x in range(4) for y in range(4)]


@pytest.mark.parametrize(
    ("count", "sizes", "spanned"),
    [
        (2, {"data": 2, "fsdp": 16}, {"data": 2}),
        (2, {"data": 8, "tensor": 4}, {"data": 2}),
        (2, {"data": 1, "fsdp": 32}, {"fsdp": 2}),
        (4, {"data": 2, "fsdp": 32}, {"data": 2, "fsdp": 2}),
        (3, {"data": 3, "fsdp": 4, "seq": 4}, {"data": 3}),
    ],
)
def test_slices_are_split_by_data_and_then_by_fsdp(count, sizes, spanned):
    mesh = make_mesh(MeshConfig(**sizes), slices(count))
    assert mesh.axis_names == sharding.MESH_AXES and len(set(mesh.devices.flat)) == 16 * count
    owners = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    for axis, name in enumerate(mesh.axis_names):
        along = np.moveaxis(owners, axis, 0).reshape(owners.shape[axis], -1)
        assert all(len(set(line)) == spanned.get(name, 1) for line in along.T)


def test_a_mesh_that_would_split_heads_over_slices_is_refused():
    with pytest.raises(ValueError, match=r"data 1 x fsdp 1 x tensor 32 x seq 1 .* fit 2 slices"):
        make_mesh(MeshConfig(data=1, tensor=32), slices(2))


OPTIONS = {
    "config": {"steps": 5, "log_every": 5, "ema_decay": 0.9, "accumulate": 2},
    "optim": {"learning_rate": 0.01, "weight_decay": 0.1, "schedule": "constant"},
    "checkpoint": {"every": 3},
}
MESHES = {
    "data": {"data": 8},
    "fsdp": {"fsdp": 8},
    "tensor": {"tensor": 8},
    "all": {"data": -1, "fsdp": 2, "tensor": 2},
}


CONFIG = TrainConfig(
    **OPTIONS["config"],
    optim=OptimConfig(**OPTIONS["optim"]),
    checkpoint=CheckpointConfig(**OPTIONS["checkpoint"]),
)


def train_here(workdir, task=None):
    """(losses, result) of the same run in this process, on one device."""
    log = Log()
    return log.losses, train(task or ToyTask(), CONFIG, workdir, writers=[log])


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return train_here(tmp_path_factory.mktemp("one"))[0]


@pytest.fixture(scope="module")
def eight_devices(toy_process, last_line, tmp_path_factory):
    """run -> (losses, what it printed last), over 8 devices, and one run begun on one device."""
    workdir = tmp_path_factory.mktemp("eight")
    with pytest.raises(NonFiniteLoss):
        train_here(workdir / "begun", ToyTask(poison_at=4))
    seldom = {"checkpoint": {"every": 100}}
    runs = {name: {"mesh": mesh} | seldom for name, mesh in MESHES.items()}
    runs["begun"] = {"mesh": MESHES["all"]}
    _, lines, _ = last_line(toy_process(workdir, OPTIONS | {"runs": runs}, devices=8))
    return {name: found[:2] for name, found in by_run(lines).items()}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", MESHES)
def test_eight_devices_give_the_losses_of_one(one_device, eight_devices, name):
    losses, out = eight_devices[name]
    assert out["status"] == "finished"
    np.testing.assert_allclose(losses, one_device, rtol=1e-4)


@pytest.mark.parametrize(("name", "arrays"), [("data", 0), ("fsdp", 3), ("tensor", 4), ("all", 4)])
def test_optimiser_and_average_lie_where_the_parameters_lie(eight_devices, name, arrays):
    copies = 4  # The parameters, Adam's two moments, the average.
    assert eight_devices[name][1]["split_arrays"] == copies * arrays


def test_a_run_begun_on_one_device_goes_on_over_eight(one_device, eight_devices):
    losses, out = eight_devices["begun"]
    assert out["step"] == 5 and len(losses) == 2
    np.testing.assert_allclose(losses[0], one_device[3], rtol=1e-4)
    assert out["split_arrays"] > 0


@pytest.fixture(scope="module")
def two_processes(two_toy_processes, last_line, tmp_path_factory):
    """(work directory, what the main process printed, what the other did) of two processes that
    together end a run which one process began, make one from begin to end, and begin one."""
    workdir = tmp_path_factory.mktemp("two")
    with pytest.raises(NonFiniteLoss):
        train_here(workdir / "ended", ToyTask(poison_at=4))
    runs = {"ended": {}, "whole": {}, "begun": {"task": {"poison_at": 4}}}
    options = OPTIONS | {"mesh": {"fsdp": 2}, "runs": runs, "join": {}}
    both = two_toy_processes(workdir, options, devices=2)
    (_, lines, _), (_, silent, _) = map(last_line, both)
    return workdir, by_run(lines), by_run(silent)


def by_run(lines):
    """run -> (losses, what it printed last, all its lines)."""
    results, mine = {}, []
    for line in lines:
        mine.append(line)
        if line.startswith("{"):
            losses = [float(each.split()[2]) for each in mine if each.startswith("tick")]
            out = json.loads(line)
            results[out.get("run", "begun")], mine = (losses, out, mine), []
    return results


@pytest.mark.slow
def test_two_processes_train_one_run_that_one_process_loads(two_processes, one_device):
    workdir, printed, silent = two_processes
    losses, main, _ = printed["whole"]
    assert main == silent["whole"][1] and main["status"] == "finished"
    np.testing.assert_allclose(losses, one_device, rtol=1e-4)
    assert not silent["whole"][0]  # Only the main process writes.
    assert sorted(os.listdir(workdir / "whole" / "checkpoints")) == ["3", "5"]
    assert load_params(workdir / "whole" / "checkpoints", param_shapes())[1] == 5
    _, again = train_here(workdir / "whole")
    assert again.status == "already finished"
    assert checksum(again.state) == main["state"]


@pytest.mark.slow
def test_two_processes_end_a_run_that_one_began(two_processes, one_device):
    _, printed, _ = two_processes
    losses, out, lines = printed["ended"]
    assert out["status"] == "finished"
    np.testing.assert_allclose(losses, one_device[3:], rtol=1e-4)
    assert not any("seen twice" in line for line in lines)


@pytest.mark.slow
def test_one_process_ends_a_run_that_two_began(two_processes, one_device):
    workdir, printed, _ = two_processes
    assert printed["begun"][1]["type"] == "NonFiniteLoss"
    losses, result = train_here(workdir / "begun")
    assert result.status == "finished"
    np.testing.assert_allclose(losses, one_device[3:], rtol=1e-4)
    # Sums over two processes run in another order: float32 numbers near 1 differ by some 1e-7.
    whole = train_here(workdir / "whole")[1].state
    near = functools.partial(np.testing.assert_allclose, rtol=0, atol=3e-6)
    jax.tree.map(near, result.state.params, whole.params)


def test_one_device_has_no_host_to_keep_an_optimiser_with():
    with pytest.raises(ValueError, match="offload_optimizer needs a mesh, and there is one device"):
        make_program(ToyTask(), TrainConfig(steps=1, offload_optimizer=True), None)
