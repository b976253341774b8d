"""Losses on cross-attention: against enumeration, closed forms, and what they are said to teach."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.train.alignment_losses import (
    coverage,
    diagonal_prior,
    guided_alignment,
    guided_columns,
    guided_spans,
    latent_alignment,
    placed_attention,
    placed_prior,
    prior_alignment,
)
from tests.closeness import close


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
    close(gradient, slope)


def test_a_column_that_nobody_reads_costs_nothing_that_is_not_finite():
    linked = jnp.ones((1, 2, 2), bool)
    loss, gradient = jax.value_and_grad(lambda x: guided_columns(x, linked)[0])(
        jnp.zeros((1, 2, 2))
    )
    assert loss == 0 and np.isfinite(gradient).all()


def test_a_prior_is_learnt_by_cross_entropy_and_is_where_it_ends():
    rng = np.random.default_rng(0)
    prior, attention = (
        jnp.asarray(rng.dirichlet(np.ones(5), (2, 4)), jnp.float32) for _ in range(2)
    )
    weights = jnp.array([[1, 1, 1, 0], [2, 1, 0, 0]])
    loss, sums = prior_alignment(attention, prior, weights)
    expected = -(weights[..., None] * prior * np.log(attention)).sum()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(sums["prior"], expected, rtol=1e-5)

    def of_logits(logits):
        return prior_alignment(jax.nn.softmax(logits), prior, weights)[0]

    gradient = jax.grad(of_logits)
    close(gradient(jnp.log(prior)), np.zeros(prior.shape), size=weights.max())
    close(gradient(jnp.log(attention)), np.float64(weights[..., None]) * (attention - prior))


def test_a_placed_prior_is_normal_around_known_places_and_padding_has_none():
    places, width = np.array([[-0.3, 1.5, 2.0, 9.0]]), 0.8
    prior = placed_prior(jnp.asarray(places), jnp.array([[1, 1, 1, 0]]), width)
    expected = np.exp(-((places[..., None] - np.arange(4)) ** 2) / (2 * width**2)) * [1, 1, 1, 0]
    close(prior, normalised(expected))
    assert float(prior[0, 1, 1]) == pytest.approx(prior[0, 1, 2])
    empty = placed_prior(jnp.asarray(places), jnp.zeros((1, 4), jnp.int32), width)
    np.testing.assert_array_equal(empty, np.zeros((1, 4, 4)))


def test_placed_attention_teaches_the_mean_of_the_heads_of_every_layer():
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.dirichlet(np.ones(5), (3, 2, 4, 6)), jnp.float32)  # [L B N T S]
    places = jnp.asarray(rng.uniform(0, 4, (2, 6)), jnp.float32)
    target, source = jnp.array([[1] * 6, [1, 1, 0, 0, 0, 0]]), jnp.array([[1] * 5, [1, 1, 1, 0, 0]])
    loss, sums = placed_attention(weights, places, target, source, 0.7)
    prior = np.float64(placed_prior(places, source, 0.7))
    surprise = -(prior * np.log(np.float64(weights).mean(2))).sum(-1)
    close(loss, (surprise * (target > 0)).sum((1, 2)).mean())
    assert sums["placed"] == loss


def test_coverage_wants_of_every_source_token_its_share():
    mass = jnp.array([[1.0, 0.0, 3.0, 9.0]])
    valid = jnp.array([[True, True, True, False]])
    loss, sums = coverage(mass, valid)
    assert loss == sums["coverage"] == 0 + 1 + 4
    assert coverage(mass, valid, 2.0)[0] == 1 + 4 + 1
    assert coverage(mass, valid, jnp.array([[1.0, 0.0, 3.0, 7.0]]))[0] == 0


@pytest.mark.quick(1)
@pytest.mark.parametrize("backward", [False, True], ids=["value", "gradient"])
def test_statistics_in_linear_memory_teach_what_the_matrix_teaches(backward):
    """Spans and coverage from ``attention_stats`` and from the weights; spans also as links."""
    rng = np.random.default_rng(0)
    B, T, S, N, H = 2, 5, 9, 2, 4
    q, k = (jnp.asarray(rng.normal(size=(B, n, N, H)), jnp.float32) for n in (T, S))
    valid = jnp.arange(S) < jnp.array([[9], [6]])
    first = jnp.asarray(rng.integers(0, 4, (B, T)))
    last, linked = first + 2, jnp.array([[1, 1, 0, 1, 1], [1, 0, 1, 1, 0]])
    mask = xa.masks.key_padding(valid)

    def from_statistics(q, k):
        stats = xa.attention_stats(q, k, mask, spans=(first, last))
        guided, _ = guided_spans(stats.span_mass.mean(1), linked)
        return guided + 0.7 * coverage(stats.mass.mean(1), valid)[0]

    def from_matrix(q, k):
        _, weights = xa.attend(q, k, k, mask, return_weights=True)
        links = jnp.stack([first, first + 1], -1)
        links = jnp.where(linked[..., None] > 0, links, -1)
        one_word = jnp.zeros((B, S), jnp.int32)  # both places of a link are of one word
        guided, _ = guided_alignment(weights.mean(1), links, one_word)
        return guided + 0.7 * coverage(weights.mean(1).sum(-2), valid)[0]

    losses = [from_statistics, from_matrix]
    if backward:
        losses = [jax.grad(f, argnums=(0, 1)) for f in losses]
    found, expected = (jax.tree.leaves(f(q, k)) for f in losses)
    for a, b in zip(found, expected, strict=True):
        close(a, b)
