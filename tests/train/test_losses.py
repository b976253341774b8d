import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from crossattn.train.losses import cross_entropy
from tests.closeness import close

SHAPE = (2, 5, 11)


@pytest.fixture
def example():
    random = np.random.default_rng(0)
    logits = random.normal(size=SHAPE).astype(np.float32) * 3
    labels = random.integers(0, SHAPE[-1], SHAPE[:-1]).astype(np.int32)
    weights = (random.random(SHAPE[:-1]) < 0.7).astype(np.float32)
    return logits, labels, weights


def oracle(logits, labels, weights, smoothing, z_loss):
    """Loss and gradient in float64, from the definition: cross-entropy with a mixed target."""
    logits = logits.astype(np.float64)
    vocabulary = logits.shape[-1]
    target = (1 - smoothing) * np.eye(vocabulary)[labels] + smoothing / vocabulary
    log_z = np.log(np.exp(logits).sum(-1, keepdims=True))
    per_token = -(target * (logits - log_z)).sum(-1) + z_loss * log_z[..., 0] ** 2
    probabilities = np.exp(logits - log_z)
    gradient = probabilities * (1 + 2 * z_loss * log_z) - target
    return (per_token * weights).sum(), gradient * weights[..., None]


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_loss_and_gradient_are_those_of_the_definition(example, smoothing, z_loss):
    logits, labels, weights = example

    def loss(x):
        return cross_entropy(x, labels, weights, smoothing, z_loss)

    (value, sums), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(logits))
    expected, expected_gradient = oracle(*example, smoothing, z_loss)
    close(value, expected)
    close(gradient, expected_gradient)
    nll, _ = oracle(*example, 0.0, 0.0)
    close(sums["nll"], nll)
    assert float(sums["weight"]) == weights.sum()
    hits = (logits.argmax(-1) == labels) * weights
    assert float(sums["correct"]) == hits.sum()


def test_uniform_logits_are_right_by_chance_alone():
    """Also beside others: a model that says nothing is no good one."""
    logits, labels = jnp.zeros((1, 3, 8)).at[0, 2, 5].set(1.0), jnp.array([[0, 7, 5]])
    for chosen, right in (([1, 1, 0], 2 / 8), ([1, 1, 1], 1 + 2 / 8)):
        sums = cross_entropy(logits, labels, jnp.array([chosen], jnp.float32))[1]
        assert float(sums["correct"]) == right


def test_what_padding_holds_never_reaches_loss_or_gradient(example):
    logits, labels, weights = map(np.array, example)
    weights[0, :2] = 0
    poisoned, wild = logits.copy(), labels.copy()
    poisoned[0, 0], poisoned[0, 1], wild[0, :2] = np.nan, np.inf, 10**6

    def run(x, y):
        loss = lambda x: cross_entropy(x, y, weights, 0.1, 1e-3)  # noqa: E731
        return jax.value_and_grad(loss, has_aux=True)(jnp.asarray(x))

    (clean, clean_sums), clean_gradient = run(logits, labels)
    (loss, sums), gradient = run(poisoned, wild)
    assert loss == clean and sums == clean_sums
    np.testing.assert_array_equal(gradient, clean_gradient)
    assert (gradient[0, :2] == 0).all()


def test_huge_logits_do_not_overflow():
    logits = jnp.array([[1e30, 0.0], [-1e30, 0.0]])
    loss, _ = cross_entropy(logits, jnp.array([0, 1]), jnp.ones(2))
    assert float(loss) == 0.0


def test_a_label_outside_the_vocabulary_cannot_go_unnoticed():
    loss, _ = cross_entropy(jnp.zeros((1, 4)), jnp.array([4]), jnp.ones(1))
    assert np.isnan(loss)


def test_bfloat16_logits_are_computed_on_in_float32(example):
    logits, labels, weights = example
    rounded = jnp.asarray(logits, jnp.bfloat16)
    loss, gradient = jax.value_and_grad(lambda x: cross_entropy(x, labels, weights)[0])(rounded)
    expected, _ = oracle(np.asarray(rounded, np.float32), labels, weights, 0.0, 0.0)
    assert loss.dtype == jnp.float32 and gradient.dtype == jnp.bfloat16
    close(loss, expected)


def test_gradients_reach_logits_and_weights_and_pass_through_transformations(example):
    logits, labels, weights = example

    def loss(x, w):
        per_row = jax.vmap(lambda x, y, w: cross_entropy(x, y, w, 0.1, 1e-2)[0])
        return jax.jit(per_row)(x, labels, w).sum()

    check_grads(loss, (logits, weights + 0.5), 1, modes=["rev"], atol=1e-2, rtol=1e-2)


def test_bad_arguments_are_named(example):
    logits, labels, weights = map(jnp.asarray, example)
    with pytest.raises(ValueError, match="label_smoothing is 1.0"):
        cross_entropy(logits, labels, weights, 1.0)
    with pytest.raises((ValueError, TypeError), match="labels"):  # TypeError: jaxtyping's checks.
        cross_entropy(logits, labels[:, :4], weights)
