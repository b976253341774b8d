import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from crossattn.train.losses import (
    cross_entropy,
    diagonal_prior,
    guided_alignment,
    guided_columns,
    latent_alignment,
)

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
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)
    nll, _ = oracle(*example, 0.0, 0.0)
    np.testing.assert_allclose(sums["nll"], nll, rtol=1e-6)
    assert float(sums["tokens"]) == weights.sum()
    hits = (logits.argmax(-1) == labels) * weights
    assert float(sums["correct"]) == hits.sum()


def test_label_smoothing_spreads_its_share_over_the_whole_vocabulary(example):
    logits, labels, weights = example
    exact = logits.astype(np.float64)
    log_p = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    target = 0.9 * np.eye(SHAPE[-1])[labels] + 0.1 / SHAPE[-1]  # the label keeps its own share too
    expected = (-(target * log_p).sum(-1) * weights).sum()
    loss, _ = cross_entropy(*map(jnp.asarray, example), label_smoothing=0.1)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_a_uniform_prediction_costs_the_log_of_the_vocabulary():
    loss, sums = cross_entropy(jnp.zeros((4, 50)), jnp.arange(4), jnp.ones(4))
    np.testing.assert_allclose(loss / sums["tokens"], np.log(50), rtol=1e-6)


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
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


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


@pytest.fixture
def two_sentences():
    """Scores [1 5 6], prior and posterior: two sentences packed in a row, and padding."""
    random = np.random.default_rng(1)
    target, source = np.array([[1, 1, 2, 2, 0]]), np.array([[1, 1, 1, 2, 2, 0]])
    readable = (target[:, :, None] == source[:, None, :]) & (target[:, :, None] > 0)
    scores = np.log(random.dirichlet(np.ones(9), (1, 5, 6))[..., 0])
    prior, posterior = (normalised(random.random((1, 5, 6)) * readable) for _ in range(2))
    return scores, prior, posterior, target > 0


def normalised(x):
    return x / np.maximum(x.sum(-1, keepdims=True), 1e-30)


def test_latent_alignment_is_the_likelihood_of_an_ibm_model_and_distils_its_posterior(
    two_sentences,
):
    scores, prior, posterior, weights = two_sentences
    joint = prior * np.exp(scores)
    exact = normalised(joint)[:, :4]
    nll = -np.log(joint.sum(-1)[:, :4]).sum()
    distilled = -(exact * np.log(np.where(exact > 0, posterior[:, :4], 1.0))).sum()

    arrays = [jnp.asarray(x, jnp.float32) for x in (scores, prior, posterior)]
    (loss, sums), gradients = jax.value_and_grad(latent_alignment, argnums=(0, 1, 2), has_aux=True)(
        *arrays, jnp.asarray(weights)
    )
    np.testing.assert_allclose(loss, nll + distilled, rtol=1e-5)
    np.testing.assert_allclose(sums["alignment"], nll, rtol=1e-5)
    # d nll / d log p(y|x) is minus the posterior, the E-step of Brown et al. 1993.
    np.testing.assert_allclose(gradients[0][:, :4], -exact, atol=1e-5)
    np.testing.assert_allclose(
        gradients[1][:, :4], -exact / np.where(exact > 0, prior[:, :4], 1.0), rtol=1e-4
    )
    np.testing.assert_allclose(
        gradients[2][:, :4], -exact / np.where(exact > 0, posterior[:, :4], 1.0), rtol=1e-4
    )
    for gradient in gradients:
        assert not np.asarray(gradient[:, 4]).any()


def test_latent_alignment_finds_a_hidden_dictionary():
    """Sentences of word pairs in shuffled order: only co-occurrence says who translates whom."""
    random = np.random.default_rng(2)
    words, length = 12, 4
    dictionary = random.permutation(words)
    source = np.stack([random.permutation(words)[:length] for _ in range(64)])
    target = random.permuted(dictionary[source], axis=1)
    prior = jnp.full((64, length, length), 1.0 / length)

    def loss(table):
        scores = jax.nn.log_softmax(table)[source[:, None, :], target[:, :, None]]
        return latent_alignment(scores, prior, prior, jnp.ones((64, length)))[0]

    table = jnp.zeros((words, words))
    descend = jax.jit(lambda table: table - 0.3 * jax.grad(loss)(table))
    for _ in range(60):
        table = descend(table)
    np.testing.assert_array_equal(table.argmax(-1), dictionary)


def test_diagonal_prior_is_the_same_packed_as_alone():
    packed = diagonal_prior(
        jnp.array([0, 1, 0, 1, 2, 0]),
        jnp.array([0, 1, 2, 0, 1, 0, 0]),
        jnp.array([1, 1, 2, 2, 2, 0]),
        jnp.array([1, 1, 1, 2, 2, 0, 0]),
        4.0,
    )
    far = np.abs(np.arange(3)[:, None] / 3 - np.arange(2)[None] / 2)
    np.testing.assert_allclose(packed[2:5, 3:5], normalised(np.exp(-4.0 * far)), rtol=1e-5)
    np.testing.assert_allclose(packed.sum(-1), [1, 1, 1, 1, 1, 0], rtol=1e-5)
    assert not np.asarray(packed[:2, 3:]).any() and not np.asarray(packed[2:5, :3]).any()


def test_diagonal_prior_without_sharpness_is_even():
    four = jnp.arange(4)
    prior = diagonal_prior(four, four, jnp.ones(4, int), jnp.ones(4, int), 0.0)
    np.testing.assert_allclose(prior, 0.25)


def test_guided_alignment_is_the_cross_entropy_with_an_even_distribution_over_linked_words(
    two_sentences,
):
    _, attention, _, _ = two_sentences
    # Three tokens of two words, one, none; in the second sentence two of one word; padding.
    links = np.array([[[0, 1, 2], [0, -1, -1], [-1, -1, -1], [3, 4, -1], [-1, -1, -1]]])
    source_words = np.array([[0, 0, 1, 0, 0, 0]])
    linked_words = {0: ([0, 1], [2]), 1: ([0],), 3: ([3, 4],)}
    expected, slope = 0.0, np.zeros(attention.shape)
    for t, words in linked_words.items():
        for tokens in words:
            mass = attention[0, t, tokens].sum()
            expected -= np.log(mass) / len(words)
            slope[0, t, tokens] = -1 / mass / len(words)

    def loss(x):
        return guided_alignment(x, jnp.asarray(links), jnp.asarray(source_words))

    (found, sums), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.float32(attention))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(sums["guided"], expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, slope, rtol=1e-4)


def test_attention_without_a_trace_of_the_link_costs_much_but_not_everything():
    attention = jnp.array([[[1.0, 0.0]]])
    links, words = jnp.array([[[1]]]), jnp.array([[0, 1]])
    loss, gradient = jax.value_and_grad(lambda x: guided_alignment(x, links, words)[0])(attention)
    assert 15 < loss < 30 and np.isfinite(gradient).all()


def test_guided_columns_is_what_links_lack_of_all_that_a_source_token_gets():
    attention = np.array([[[0.6, 0.4, 0.0], [0.1, 0.7, 0.2], [0.3, 0.3, 0.4]]])
    linked = np.array([[[1, 0, 0], [0, 1, 0], [1, 0, 0]]], bool)  # the last column has no link
    expected = np.log(1.0 / 0.9) + np.log(1.4 / 0.7)

    def loss(x):
        return guided_columns(x, jnp.asarray(linked))

    (found, sums), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.float32(attention))
    np.testing.assert_allclose([found, sums["columns"]], expected, rtol=1e-5)
    slope = np.zeros_like(attention)
    slope[0, :, 0] = 1 / 1.0 - linked[0, :, 0] / 0.9
    slope[0, :, 1] = 1 / 1.4 - linked[0, :, 1] / 0.7
    np.testing.assert_allclose(gradient, slope, rtol=1e-4, atol=1e-6)


def test_a_column_that_nobody_reads_costs_nothing_that_is_not_finite():
    linked = jnp.ones((1, 2, 2), bool)
    loss, gradient = jax.value_and_grad(lambda x: guided_columns(x, linked)[0])(
        jnp.zeros((1, 2, 2))
    )
    assert loss == 0 and np.isfinite(gradient).all()


def test_guided_alignment_teaches_queries_whom_to_attend():
    random = np.random.default_rng(3)
    keys, links = random.normal(size=(4, 6, 8)), random.integers(0, 6, (4, 5, 1))

    def loss(queries):
        attention = jax.nn.softmax(jnp.einsum("bth,bsh->bts", queries, keys))
        words = jnp.broadcast_to(jnp.arange(6), (4, 6))
        return guided_alignment(attention, jnp.asarray(links), words)[0], attention

    queries = jnp.zeros((4, 5, 8))
    descend = jax.jit(lambda queries: queries - jax.grad(loss, has_aux=True)(queries)[0])
    for _ in range(30):
        queries = descend(queries)
    np.testing.assert_array_equal(loss(queries)[1].argmax(-1), links[..., 0])
