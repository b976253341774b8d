"""Runs that are trained as one program equal the runs alone."""

import io
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.models import transformer
from crossattn.train import members
from crossattn.train.config import CheckpointConfig, TrainConfig
from crossattn.train.errors import NonFiniteLoss, TrainError
from crossattn.train.loop import train
from crossattn.train.losses import cross_entropy
from crossattn.train.optim import OptimConfig
from crossattn.train.program import make_program, schedule_of
from crossattn.train.sharding import MeshConfig, make_mesh, put_batch
from crossattn.train.state import TrainState
from crossattn.train.writers import Console
from experiments.plan.collectives import collectives
from experiments.plan.hlo import Module
from tests.train.toy_task import ToyBatches, ToyTask

CONFIG = TrainConfig(
    steps=4,
    seed=5,
    optim=OptimConfig(learning_rate=1e-2, weight_decay=0.1, schedule="constant"),
    mesh=MeshConfig(data=1, seed=-1),
    checkpoint=CheckpointConfig(every=2),
    ema_decay=0.9,
    log_every=2,
)


@dataclass
class Toy(ToyTask):
    """Each seed has other batches; of three seeds in a row two have shorter ones, if ``buckets``."""

    seed: int = 5
    buckets: bool = False
    broken: int | None = None

    def train_iterator(self, shard_index, shard_count):
        return self.train_iterators([self.seed], shard_index, shard_count)[0]

    def train_iterators(self, seeds, shard_index, shard_count):
        found = []
        for seed in seeds:
            poisoned = 100 * seed + 2 if seed == self.broken else None
            found.append(ToyBatches((shard_index, shard_count), poisoned))
            found[-1].length = 4 + seed % 3 if self.buckets else 6
            found[-1].position = 100 * seed
        return found

    def evaluate(self, params, step):
        return {"size": float(jnp.abs(params["output"]["kernel"]).mean())}


@pytest.fixture(scope="module", autouse=True)
def _on_one_device():
    """Replaces the fixture of the folder: each test says how many devices it has."""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Trains on the first devices of those that there are."""

    def call(config, task=None, devices=1, name="run"):
        own = jax.devices()[:devices]
        with monkeypatch.context() as patch:
            patch.setattr(jax, "devices", lambda: own)
            task = task or Toy(seed=config.seed)
            return train(task, config, tmp_path / name, writers=[])

    return call


def close(found, expected):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), found, expected
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"dropout": 0.3}, {}),
        ({"dropout": 0.0, "buckets": True}, {}),
        ({"dropout": 0.3}, {"accumulate": 2}),
    ],
    ids=["dropout", "lengths that differ", "accumulated"],
)
def test_each_seed_is_its_run_alone(run, options, changes):
    config, alone = replace(CONFIG, **changes), []
    found = run(replace(config, seeds=3), Toy(**options))
    for index, seed in enumerate((5, 6, 7)):
        alone.append(run(replace(config, seed=seed), Toy(seed=seed, **options), name=str(seed)))
        own = members.take((found.state.params, found.state.ema), index)
        close(own, (alone[-1].state.params, alone[-1].state.ema))
    sizes = [each.evaluation["size"] for each in alone]
    each = {f"seed_{seed}/size": size for seed, size in zip((5, 6, 7), sizes, strict=True)}
    assert found.evaluation == pytest.approx({"size": np.mean(sizes)} | each, rel=1e-5)
    assert found.totals["tokens"] == pytest.approx(sum(x.totals["tokens"] for x in alone))


@pytest.mark.slow
def test_each_number_of_a_sweep_is_its_run_alone(run):
    sweep = "optim.learning_rate=1e-3,2e-2;optim.weight_decay=0,0.5"
    found = run(replace(CONFIG, sweep=sweep, optim=replace(CONFIG.optim, schedule="cosine")))
    names = [member.name for member in replace(CONFIG, sweep=sweep).members]
    assert names[1] == "learning_rate_0.001_weight_decay_0.5"
    for index, (rate, decay) in enumerate([(1e-3, 0.0), (1e-3, 0.5), (2e-2, 0.0), (2e-2, 0.5)]):
        own = OptimConfig(learning_rate=rate, weight_decay=decay, schedule="cosine")
        alone = run(replace(CONFIG, optim=own), name=names[index])
        close(members.take(found.state.params, index), alone.state.params)


def test_the_logged_learning_rate_is_that_of_each_member():
    """Also where members differ in the end of the schedule alone."""
    optim = replace(CONFIG.optim, schedule="linear")
    config = replace(CONFIG, optim=optim, sweep="optim.final_fraction=0,0.5")
    np.testing.assert_allclose(schedule_of(config)(3), [0.0, 5e-3], atol=1e-9)
    assert np.ndim(schedule_of(replace(CONFIG, seeds=2))(0)) == 0


@pytest.mark.slow
def test_a_run_of_members_goes_on_to_the_same_bits(run):
    config = replace(CONFIG, seeds=2)
    whole = run(config, name="whole")
    run(replace(config, steps=2))
    resumed = run(config)
    assert int(resumed.state.step) == 4
    jax.tree.map(np.testing.assert_array_equal, resumed.state, whole.state)
    assert resumed.evaluation == whole.evaluation


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [MeshConfig(seed=4, data=2), MeshConfig(seed=2, fsdp=2, data=2), MeshConfig()]
)
def test_members_on_a_mesh_are_those_of_one_device(run, mesh):
    config = replace(CONFIG, seeds=4, steps=2)
    found = run(replace(config, mesh=mesh), devices=8)
    close(found.state, run(config, name="one").state)
    if mesh.seed > 1:
        table = found.state.params["embedding"]["table"]
        assert table.sharding.spec[0] == "seed"


class Translation(ToyTask):
    """A translator with dropout, for the program of its step."""

    config = transformer.tiny(scan=True)
    config = replace(config, block=replace(config.block, dropout_rate=0.1))

    def build(self, rngs):
        return transformer.Transformer(self.config, rngs=rngs)

    def init(self, key):
        return xa.functional.init(self.build, key)

    def logical_axes(self):
        return xa.functional.logical_axes(self.build)

    def loss(self, params, batch, key):
        model = xa.functional.bind(self.build, params)
        logits = model(batch["source"], batch["target"], key=key)
        return cross_entropy(logits, batch["target"], batch["target"] > 0)


def sent(compiled, mesh):
    """The axes of the mesh along which devices send something."""
    found = collectives(Module(compiled.as_text()), dict(mesh.shape))
    return {axis for each in found if each.sent for axis in each.axes}


@pytest.mark.slow
@pytest.mark.parametrize("data", [1, 2])
def test_devices_of_different_members_send_each_other_nothing(data):
    config = replace(CONFIG, seeds=8 // data, mesh=MeshConfig(data=data, seed=8 // data))
    mesh = make_mesh(config.mesh)
    program = make_program(Translation(), config, mesh)
    random = np.random.default_rng(0)
    batch = {
        name: random.integers(1, 60, (8 // data, 4, 12)).astype(np.int32)
        for name in ("source", "target")
    }
    given = program.target, put_batch(batch, mesh, True, "seed")
    found = sent(program.step.lower(*given).compile(), mesh)
    assert "seed" not in found and ("data" in found) == (data > 1)


def test_what_members_lack_of_the_largest_shape_is_nothing():
    """A link at place 0 is one, so that what is missing is -1 there."""
    of_each = (
        {"links": np.array([[0, -1], [2, -1]]), "ids": np.array([[1, 1]]), "x": np.array([-1.0])},
        {"links": np.array([[1, 3]]), "ids": np.array([[1, 2], [1, 0]]), "x": np.array([2.0, 3.0])},
    )
    batch = next(members.MemberBatches([iter([own]) for own in of_each]))
    assert batch["links"].tolist() == [[[0, -1], [2, -1]], [[1, 3], [-1, -1]]]
    assert batch["ids"].tolist() == [[[1, 1], [0, 0]], [[1, 2], [1, 0]]]
    assert batch["x"].tolist() == [[-1.0, 0.0], [2.0, 3.0]]


def test_padding_that_costs_more_than_the_batches_is_told_once(caplog):
    long, short = {"ids": np.ones((2, 8), int)}, {"ids": np.ones((2, 1), int)}
    for others, said in ((long, 0), (short, 1)):
        own = [iter([long] * 2), *(iter([others] * 2) for _ in range(3))]
        batches = members.MemberBatches(own)
        assert next(batches)["ids"].shape == next(batches)["ids"].shape == (4, 2, 8)
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == said and all("is 2.9 times as large" in text for text in told)


@pytest.mark.parametrize(("platform", "loops"), [("cpu", True), ("tpu", False)])
def test_members_are_looped_over_on_cpu_and_batched_elsewhere(platform, loops):
    config = replace(CONFIG, seeds=3, mesh=MeshConfig())
    program = make_program(ToyTask(), config, None)
    batch = members.MemberBatches([ToyBatches((0, 1)) for _ in range(3)])
    shapes = jax.eval_shape(lambda: next(batch))
    lowered = program.step.trace(program.target, shapes).lower(lowering_platforms=(platform,))
    assert ("stablehlo.while" in lowered.as_text()) == loops


def test_a_step_with_convolutions_is_of_all_members_at_once_and_equals_each():
    def step(state, x):
        def loss(w):
            return jnp.sum(jnp.sin(jnp.convolve(x, w)))

        value, gradient = jax.value_and_grad(loss)(state.params)
        return TrainState(state.step + 1, state.params - gradient, (), None), value

    weights, x = (jax.random.normal(each, (3, 8)) for each in jax.random.split(jax.random.key(0)))
    together = jax.jit(members.each_step(step, None))
    state = TrainState(jnp.zeros((), jnp.int32), weights, (), None)
    assert "stablehlo.while" not in together.lower(state, x).as_text()
    new, losses = together(state, x)
    for member in range(3):
        alone, loss = step(TrainState(state.step, weights[member], (), None), x[member])
        np.testing.assert_allclose(new.params[member], alone.params, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(losses[member], loss, rtol=1e-5)
    assert new.step == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sweep": "optim.learning_rate=fast"}, "expected KEY=NUMBER"),
        ({"sweep": "model.dim=32,64"}, "with a key of optim.learning_rate"),
        ({"sweep": "optim.b1=0.9,0.9"}, "a value twice"),
        ({"sweep": "optim.b1=0.9;optim.b1=0.8"}, "each once"),
        ({"sweep": "optim.learning_rate=-1,1"}, "learning_rate is -1"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        replace(CONFIG, **changes)


def test_a_mesh_that_does_not_divide_the_members_is_refused(run):
    with pytest.raises(ValueError, match=r"mesh.seed is 8 and the run has 3 members; expected"):
        run(replace(CONFIG, seeds=3), devices=8)
    with pytest.raises(ValueError, match="the run has no members"):
        run(CONFIG, devices=8, name="none")


def test_a_loss_that_is_not_finite_names_its_member(run):
    with pytest.raises(NonFiniteLoss, match="step 2: the loss of seed_6 is nan"):
        run(replace(CONFIG, seeds=3), Toy(broken=6))


def test_a_task_without_batches_by_seed_is_refused(run):
    with pytest.raises(TrainError, match="ToyTask has no train_iterators"):
        run(replace(CONFIG, seeds=2), ToyTask())


def test_the_console_shows_the_range_of_members():
    out = io.StringIO()
    console = Console(10, out)
    console.write(4, "eval", {"loss": 2.0, "nll": 1.0, "seed_0/loss": 1.5, "seed_1/loss": 2.5})
    assert out.getvalue() == "evaluation at step 4: loss 2 (1.5 to 2.5)  nll 1\n"
