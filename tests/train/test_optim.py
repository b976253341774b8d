from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax.contrib import MuonDimensionNumbers

from crossattn.train.optim import OptimConfig, make_optimizer, make_schedule, matrix_sides
from tests.closeness import close

PARAMETERS = {
    "embedding": (("vocab", "embed"), (10, 8)),
    "query": (("embed", "heads", "head_dim"), (8, 2, 4)),
    "query_bias": (("heads", "head_dim"), (2, 4)),
    "out": (("heads", "head_dim", "embed"), (2, 4, 8)),
    "stacked": (("layers", "embed", "mlp"), (3, 8, 16)),
    "positions": ((None, "embed"), (5, 8)),
    "norm": (("norm",), (8,)),
}
AXES = {name: axes for name, (axes, _) in PARAMETERS.items()}
SHAPES = {name: shape for name, (_, shape) in PARAMETERS.items()}
NAMES = ["adamw", "adafactor", "lion", "muon", "sgd"]


def random_tree(seed):
    random = np.random.default_rng(seed)
    return {k: jnp.asarray(random.normal(size=s), jnp.float32) for k, s in SHAPES.items()}


def one_update(config, grads, params):
    optimizer, _ = make_optimizer(config, 10, AXES)

    @jax.jit
    def update(grads, params):
        return optimizer.update(grads, optimizer.init(params), params)[0]

    return update(grads, params)


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "sgd"])
def test_a_first_moment_in_bfloat16_takes_half_and_steps_nearly_the_same(name):
    params, grads = random_tree(0), random_tree(1)
    config = OptimConfig(name=name, learning_rate=0.1, schedule="constant", clip_norm=None)
    whole, half = config, replace(config, mu_dtype="bfloat16")
    states = [make_optimizer(one, 10, AXES)[0].init(params) for one in (whole, half)]
    bytes_of = [sum(x.nbytes for x in jax.tree.leaves(state)) for state in states]
    assert {x.dtype.name for x in jax.tree.leaves(states[0])} == {"float32", "int32"}
    halved = sum(x.nbytes for x in jax.tree.leaves(states[1]) if x.dtype == jnp.bfloat16)
    assert halved == sum(x.nbytes for x in jax.tree.leaves(params)) / 2
    assert bytes_of[0] - bytes_of[1] == halved  # second moments are as they were
    updates = [one_update(one, grads, params) for one in (whole, half)]
    for name in SHAPES:
        np.testing.assert_allclose(*(own[name] for own in updates), rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_decay_pulls_matrices_and_tables_and_leaves_norms_and_biases(name):
    config = OptimConfig(name=name, learning_rate=0.1, schedule="constant", weight_decay=0.5)
    params, zeros = random_tree(1), jax.tree.map(jnp.zeros_like, random_tree(1))
    updates = one_update(config, zeros, params)
    for key in SHAPES:
        kept = key in ("query_bias", "norm")
        expected = 0 * params[key] if kept else -0.1 * 0.5 * params[key]
        close(updates[key], expected, size=0.1, err_msg=key)


@pytest.mark.parametrize(
    ("name", "direction"),
    [("adamw", np.sign), ("lion", np.sign), ("sgd", lambda gradient: 1.5 * gradient)],
)
def test_a_first_step_is_the_closed_form(name, direction):
    params, grads = random_tree(1), random_tree(2)
    options = dict(learning_rate=0.1, schedule="constant", clip_norm=None, momentum=0.5)
    for key, update in one_update(OptimConfig(name=name, **options), grads, params).items():
        np.testing.assert_allclose(update, -0.1 * direction(grads[key]), rtol=1e-4, err_msg=key)


def test_the_gradient_is_clipped_to_the_norm():
    params, grads = random_tree(1), random_tree(2)
    config = OptimConfig(
        name="sgd", learning_rate=1.0, schedule="constant", momentum=0.0, clip_norm=0.5
    )
    updates = one_update(config, grads, params)
    norm = np.sqrt(sum(float((u**2).sum()) for u in updates.values()))
    np.testing.assert_allclose(norm, 0.5, rtol=1e-5)


def test_muon_orthogonalises_attention_kernels_as_the_matrices_they_are():
    params, grads = random_tree(1), random_tree(2)
    config = OptimConfig(name="muon", learning_rate=1.0, schedule="constant", clip_norm=None)
    updates = one_update(config, grads, params)
    matrices = [
        np.asarray(updates["query"]).reshape(8, 8),
        np.asarray(updates["out"]).reshape(8, 8),
    ]
    for matrix in matrices + list(np.asarray(updates["stacked"])):
        singular = np.linalg.svd(matrix, compute_uv=False) / (0.2 * max(matrix.shape) ** 0.5)
        assert singular.min() > 0.3 and singular.max() < 1.5
    for key in ("embedding", "query_bias", "positions", "norm"):  # These go to Adam.
        np.testing.assert_allclose(updates[key], -np.sign(grads[key]), rtol=1e-4, err_msg=key)


@pytest.mark.parametrize(
    ("axes", "sides"),
    [
        (("embed", "heads", "head_dim"), ((0,), (1, 2))),
        (("heads", "head_dim", "embed"), ((0, 1), (2,))),
        (("layers", "embed", "kv_heads", "head_dim"), ((1,), (2, 3))),
        (("embed", None, "mlp"), ((0,), (2,))),
        (("embed", "embed"), ((0,), (1,))),
        (("vocab", "embed"), None),
        (("layers", "heads", "head_dim"), None),
        ((None, "embed"), None),
        ((), None),
    ],
)
def test_the_two_sides_of_a_matrix_are_read_off_its_axes(axes, sides):
    assert matrix_sides(axes) == (None if sides is None else MuonDimensionNumbers(*sides))


def test_schedules_have_the_shapes_they_are_named_for():
    def at(name, *steps, **options):
        config = OptimConfig(learning_rate=2.0, schedule=name, **options)
        return np.float32([make_schedule(config, 100)(step) for step in steps])

    close(at("constant", 0, 1, 3, 50, warmup_steps=4), np.array([0.5, 1, 2, 2]))
    close(at("linear", 0, 33, 99), np.array([2, 4 / 3, 0]))
    close(at("cosine", 0, 33, 99, final_fraction=0.1), np.array([2, 1.55, 0.2]))
    close(at("rsqrt", 3, 15, 63, warmup_steps=4), np.array([2, 1, 0.5]))
    close(at("rsqrt", 0, 3), np.array([2, 1]))
    close(at("wsd", 0, 79, 89, 99, cooldown_fraction=0.2), np.array([2, 2, 1, 0]))


@pytest.mark.parametrize("warmup_steps", [0, 1, 5, 19])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_rates_begin_to_fall_at_the_peak_and_end_at_the_final_fraction(schedule, warmup_steps):
    options = dict(learning_rate=2.0, final_fraction=0.1, cooldown_fraction=1.0)
    config = OptimConfig(**options, schedule=schedule, warmup_steps=warmup_steps)
    rates = np.float32([make_schedule(config, 20)(step) for step in range(20)])
    peak = max(warmup_steps - 1, 0)
    close(rates[[peak, -1]], np.array([2, 0.2]))
    assert (np.diff(rates[: peak + 1]) > 0).all() and (np.diff(rates[peak:]) < 0).all()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"learning_rate": -1.0}, "learning_rate is -1.0; expected a number, 0 or more"),
        ({"weight_decay": float("nan")}, "weight_decay is nan; expected a number, 0 or more"),
        ({"mu_dtype": "float16"}, "mu_dtype is 'float16'; use float32 or bfloat16"),
    ],
)
def test_values_out_of_range_are_refused(in_production, options, said):
    with pytest.raises(ValueError, match=said):
        OptimConfig(**options)


def test_unknown_names_are_refused(in_production):
    with pytest.raises(ValueError, match="'adam' is not one of adamw"):
        make_optimizer(OptimConfig(name="adam"), 10, AXES)
    with pytest.raises(ValueError, match="'cosin' is not one of constant"):
        make_optimizer(OptimConfig(schedule="cosin"), 10, AXES)
