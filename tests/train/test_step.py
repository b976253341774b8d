import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_task import AXES, ToyBatches, ToyTask, assert_same

from crossattn.train.optim import OptimConfig, make_optimizer
from crossattn.train.state import init_state
from crossattn.train.step import make_train_step
from tests.closeness import close

CONFIG = OptimConfig(learning_rate=0.01, schedule="constant", weight_decay=0.1)


@functools.cache
def compiled(dropout, **options):
    """(state from seed 0, step) for the toy task, made once for all tests."""
    task, (optimizer, _) = ToyTask(dropout), make_optimizer(CONFIG, 100, AXES)
    ema = options.get("ema_decay") is not None
    init = jax.jit(lambda key: init_state(task.init(key), optimizer, ema=ema))
    return jax.device_get(init(jax.random.key(0))), make_train_step(task.loss, optimizer, **options)


def run(dropout=0.1, steps=3, batches=None, **options):
    """(state, metrics of every step) after some steps."""
    state, step = compiled(dropout, **options)
    batches, metrics = batches or ToyBatches(), []
    for _ in range(steps):
        state, out = step(state, next(batches))
        metrics.append(jax.device_get(out))
    return jax.device_get(state), metrics


@pytest.mark.parametrize("weights", [(0.0, 0.0), (0.1, 0.3), (5.0, 1.0)])
def test_weights_are_averaged_whatever_they_sum_to(weights):
    values, weights = np.float32([[1.0, 4.0], weights])

    def loss(params, batch, key):
        return jnp.vdot(params["x"] * values, batch), {"weight": batch.sum()}

    optimizer, _ = make_optimizer(CONFIG, 10, {"x": ("norm",)})
    state = init_state({"x": jnp.ones(1)}, optimizer)
    _, metrics = make_train_step(loss, optimizer)(state, weights)
    expected = np.average(values, weights=weights) if weights.any() else 0.0
    close(metrics["grad_norm"], np.float32(expected))


@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulated_microbatches_equal_the_whole_batch(accumulate):
    whole, whole_metrics = run(dropout=0.0)
    parts, parts_metrics = run(dropout=0.0, accumulate=accumulate)
    for a, b in zip(whole_metrics, parts_metrics, strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), a, b)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6),
        whole.params,
        parts.params,
    )


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="16 rows cannot be accumulated in 3"):
        run(steps=1, accumulate=3)


def test_the_same_seed_gives_the_same_bits_and_another_gives_others():
    first, second = run(), run()
    assert_same(first, second)
    other, _ = run(seed=1)
    assert (first[0].params["output"]["kernel"] != other.params["output"]["kernel"]).any()


def test_every_step_and_every_microbatch_draws_its_own_key():
    seen = []

    def loss(params, batch, key):
        data = jax.random.key_data(key)
        jax.debug.callback(lambda data: seen.append(tuple(np.asarray(data))), data)
        return jnp.sum(params["x"]), {"weight": jnp.float32(1)}

    optimizer, _ = make_optimizer(CONFIG, 10, {"x": ("norm",)})
    step = make_train_step(loss, optimizer, accumulate=2)
    state = init_state({"x": jnp.ones(1)}, optimizer)
    for _ in range(3):
        state, _ = step(state, {"rows": np.zeros((4, 1))})
    jax.effects_barrier()
    assert len(seen) == len(set(seen)) == 6


def test_a_step_that_is_not_finite_moves_no_parameter_and_says_so():
    good, _ = run(steps=2, ema_decay=0.9)
    bad, metrics = run(steps=3, batches=ToyBatches(poison_at=3), ema_decay=0.9)
    assert [bool(m["finite"]) for m in metrics] == [True, True, False]
    assert_same(good.params, bad.params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((bad.opt_state, bad.ema)))
    assert bad.step == 3


def test_the_average_follows_the_parameters_by_its_formula():
    decay = 0.9
    state, step = compiled(0.1, ema_decay=decay)
    expected, batches = state.params["hidden"]["kernel"], ToyBatches()
    for done in range(4):
        state, _ = step(state, next(batches))
        keep = min(decay, (1 + done) / (10 + done))
        expected = keep * expected + (1 - keep) * np.asarray(state.params["hidden"]["kernel"])
    close(state.ema["hidden"]["kernel"], expected)
    assert state.eval_params is state.ema


def test_bfloat16_compute_keeps_float32_parameters():
    seen = []

    def loss(params, batch, key):
        seen.append({x.dtype for x in jax.tree.leaves(params)})
        return ToyTask().loss(params, batch, key)

    state, _ = compiled(0.1)
    step = make_train_step(loss, make_optimizer(CONFIG, 100, AXES)[0], compute_dtype="bfloat16")
    half, metrics = step(state, next(ToyBatches()))
    _, full_metrics = run(steps=1)
    assert seen == [{jnp.dtype("bfloat16")}]
    assert {x.dtype for x in jax.tree.leaves(half.params)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(metrics["sums"]["loss"], full_metrics[0]["sums"]["loss"], rtol=2e-2)


def test_the_state_given_in_is_used_up():
    state, step = compiled(0.1)
    state = jax.device_put(state)
    step(state, next(ToyBatches()))
    assert state.params["hidden"]["kernel"].is_deleted()
