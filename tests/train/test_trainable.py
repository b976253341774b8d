import jax
import numpy as np
import optax
import pytest
from toy_task import AXES, ToyBatches, ToyTask, assert_same

from crossattn.functional import flatten
from crossattn.train.config import CheckpointConfig, TrainConfig
from crossattn.train.loop import train
from crossattn.train.optim import OptimConfig
from crossattn.train.program import make_program
from crossattn.train.trainable import trained_names
from crossattn.train.writers import Writer

FROZEN = {"embedding.table", "norm.scale"}
CONFIG = dict(learning_rate=0.01, schedule="constant", weight_decay=0.1)


def program(optim=None, task=None, **options):
    config = TrainConfig(steps=100, optim=OptimConfig(**CONFIG | (optim or {})), **options)
    return make_program(task or ToyTask(dropout=0.0), config, None)


def stepped(program, steps=3):
    state, batches = jax.jit(program.fresh)(jax.random.key(0)), ToyBatches()
    start = flatten(jax.device_get(state.params))
    for _ in range(steps):
        state, _ = program.step(state, next(batches))
    return start, flatten(jax.device_get(state.params)), state


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"compute_dtype": "bfloat16"}])
def test_what_is_frozen_stays_bit_for_bit_and_the_rest_learns(options):
    start, end, _ = stepped(program({"train": "hidden|output"}, **options))
    changed = {name for name in start if not np.array_equal(start[name], end[name])}
    assert changed == start.keys() - FROZEN


@pytest.mark.slow
def test_training_a_part_is_plain_optax_on_that_part():
    task, batches = ToyTask(dropout=0.0), ToyBatches()
    params = jax.jit(task.init)(jax.random.key(0))
    part, rest = {"output": params["output"]}, {k: params[k] for k in params if k != "output"}
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(0.01, 0.9, 0.98, 1e-9, weight_decay=0.1)
    )
    opt_state = optimizer.init(part)
    for _ in range(3):
        batch = next(batches)

        def mean(part, batch=batch):
            loss, sums = task.loss(rest | part, batch, None)
            return loss / sums["weight"]

        updates, opt_state = optimizer.update(jax.grad(mean)(part), opt_state, part)
        part = optax.apply_updates(part, updates)
    _, end, _ = stepped(program({"train": "^output"}))
    np.testing.assert_allclose(end["output.kernel"], part["output"]["kernel"], rtol=1e-5)


def test_what_is_frozen_has_no_state_and_no_gradient():
    whole, part = program(), program({"train": "^output"})
    size = lambda program: sum(x.size for x in jax.tree.leaves(program.target.opt_state))  # noqa: E731
    kernel = part.target.params["output"]["kernel"].size
    assert size(part) <= 2 * kernel + 2 < size(whole)
    batch = next(ToyBatches())
    flops = [
        p.step.lower(p.target, batch).compile().cost_analysis()["flops"] for p in (whole, part)
    ]
    assert flops[1] < 0.75 * flops[0]


def test_constants_are_never_trained():
    axes = AXES | {"table": ("constant", None)}
    assert trained_names(axes, None) == flatten(AXES).keys()
    assert trained_names(AXES, None) is None


@pytest.mark.parametrize("rates, factor", [("hidden=0.5,.=1", 0.5), ("bias=2,hidden=0", 0.0)])
def test_rates_multiply_the_updates_of_the_first_pattern_that_fits(rates, factor):
    sgd = {"name": "sgd", "weight_decay": 0.0, "learning_rate": 0.1}
    start, plain, _ = stepped(program(sgd), 1)
    _, end, _ = stepped(program(sgd | {"rates": rates}), 1)
    moved, own = (x["hidden.kernel"] - start["hidden.kernel"] for x in (plain, end))
    np.testing.assert_allclose(own, factor * moved, rtol=1e-4, atol=1e-7)
    np.testing.assert_array_equal(plain["output.kernel"], end["output.kernel"])


@pytest.mark.parametrize(
    "options, said",
    [
        ({"train": "cross"}, "'cross', which is found in the name of no parameter; names are such"),
        ({"train": "("}, "no regular expression"),
        ({"rates": "hidden"}, "expected PATTERN=FACTOR"),
        ({"rates": "hidden=-1"}, "expected PATTERN=FACTOR"),
        ({"train": "output", "rates": "hidden=1"}, "found in the name of no parameter"),
    ],
)
def test_patterns_that_fit_nothing_are_refused(options, said):
    with pytest.raises(ValueError, match="optim.*" + said.replace("(", r"\(")):
        program(options)


def test_a_run_of_a_part_goes_on_exactly(tmp_path):
    def run(folder, steps):
        config = TrainConfig(
            steps=steps,
            optim=OptimConfig(**CONFIG, train="output", rates="kernel=0.5"),
            checkpoint=CheckpointConfig(every=2),
            ema_decay=0.9,
        )
        return train(ToyTask(), config, tmp_path / folder, writers=[Writer()]).state

    run("cut", 2)
    cut, whole = run("cut", 4), run("whole", 4)
    assert_same(cut, whole)
