"""Attention taught by links, by the diagonal and by coverage, from a config: it trains, learns, and mixes."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from configs import greek_english
from crossattn.data.sources import phrases
from crossattn.models import transformer
from crossattn.train.alignment import Recipe
from experiments import train
from experiments.runs import parameters
from experiments.tasks import make_task
from experiments.tasks.alignment import aligned_pairs, score
from experiments.tasks.alignment_loss import TransformerWithLexicon, alignment_loss, coverage_loss
from tests import numpy_model as oracle


def tiny(**loss):
    config = greek_english.get_config("tiny")
    config.loss.update(alignment="gold", **loss)
    config.evaluate.examples = 0
    return config


def logged(workdir, name):
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if line["kind"] == "train" and name in line]


@pytest.fixture
def few_phrases(monkeypatch):
    monkeypatch.setattr(phrases, "NUM_PAIRS", 540)  # Mostly short ones.


def test_gold_links_teach_attention_to_align(few_phrases, tmp_path):
    config = tiny()
    config.train.update(steps=40, log_every=10)
    config.optim.learning_rate = 1e-2
    assert train.run(config, tmp_path).status == "finished"
    guided = logged(tmp_path, "guided")
    assert guided[-1] < 0.7 * guided[0]
    task = make_task(config, tmp_path / "assets")
    pairs = aligned_pairs(
        task.translator(parameters(task, tmp_path)), task.some("validation", None)
    )
    # The last word of a phrase has no row after it: that is at most a third of these links.
    assert score(pairs, Recipe(row_offset=2))["aer"] < score(pairs, Recipe(row_offset=0))["aer"]
    assert score(pairs, Recipe(row_offset=2))["precision"] > 60


@pytest.mark.slow
def test_a_tenth_of_the_links_trains_beside_latent_ones(few_phrases, tmp_path):
    config = tiny(alignment_share=0.1)
    assert train.run(config, tmp_path).status == "finished"
    for name in ("guided", "alignment"):
        values = logged(tmp_path, name)
        assert len(values) >= 3 and np.isfinite(values).all() and min(values) > 0


@pytest.mark.slow
def test_the_diagonal_is_learnt_and_coverage_kept_without_links(few_phrases, tmp_path):
    config = tiny(alignment_coverage=0.2)
    config.loss.alignment = "diagonal"
    config.train.update(steps=20, log_every=5)
    config.optim.learning_rate = 1e-2
    assert train.run(config, tmp_path).status == "finished"
    prior, covered = logged(tmp_path, "prior"), logged(tmp_path, "coverage")
    assert prior[-1] < 0.9 * prior[0]
    assert len(covered) == len(prior) and np.isfinite(covered).all()
    # What is logged as the loss is what is minimised: the cross-entropy and both terms.
    parts = np.array(logged(tmp_path, "cross_entropy")) + prior + 0.2 * np.array(covered)
    np.testing.assert_allclose(logged(tmp_path, "loss"), parts, rtol=1e-5)


def test_coverage_is_of_a_sentence_and_its_own_target_tokens(batch, options):
    """Two sentences in a row of two tokens a side: every source token is to get one token's attention."""
    attention = WEIGHTS[2, 0].mean(0)
    expected = np.square(1 - attention[:4].sum(0)).sum()
    loss, sums = coverage_loss(batch, jnp.asarray(WEIGHTS), options)
    np.testing.assert_allclose([loss, sums["coverage"]], expected, rtol=1e-5)
    batch["target_segment_ids"] = jnp.array([[1, 1, 1, 2, 0]])
    wanted = np.array([1.5, 1.5, 0.5, 0.5])
    loss, _ = coverage_loss(batch, jnp.asarray(WEIGHTS), options)
    np.testing.assert_allclose(loss, np.square(wanted - attention[:4].sum(0)).sum(), rtol=1e-5)


@pytest.fixture
def options():
    return SimpleNamespace(alignment="gold", alignment_layer=None, alignment_diagonal=8.0)


@pytest.fixture
def batch():
    """Two sentences of two tokens each in a row, and padding; each token has one link."""
    links = np.full((1, 5, 2), -1)
    links[0, :4, 0] = np.arange(4)
    segment_ids, positions = jnp.array([[1, 1, 2, 2, 0]]), jnp.array([[0, 1, 0, 1, 0]])
    return {
        "source": jnp.array([[5, 6, 7, 8]]),
        "source_segment_ids": segment_ids[:, :4],
        "source_positions": positions[:, :4],
        "target_in": jnp.array([[9, 10, 11, 12, 0]]),
        "target_segment_ids": segment_ids,
        "target_positions": positions + 1,
        "target_links": jnp.asarray(links),
        "target_linked": jnp.array([[1, 1, 1, 1, 0]]),
        "linked_words": jnp.array([[0, 1, 0, 1]]),
    }


def model(scores):
    return SimpleNamespace(word_scores=lambda source, target: scores)


WEIGHTS = np.random.default_rng(0).dirichlet(np.ones(4), (3, 1, 2, 5))  # [L B N T S]
SCORES = jnp.log(jnp.asarray(np.random.default_rng(1).random((1, 5, 4)), jnp.float32))


def test_the_row_after_the_one_that_reads_a_token_learns_its_links_in_the_last_layer(
    batch, options
):
    """Only the first token of each sentence is followed by one."""
    expected = -sum(np.log(WEIGHTS[2, 0, :, t + 1, s].mean()) for t, s in ((0, 0), (2, 2)))
    _, sums = alignment_loss(model(SCORES), batch, jnp.asarray(WEIGHTS), options)
    np.testing.assert_allclose(sums["guided"], expected, rtol=1e-5)
    options.alignment_layer = 0
    _, sums = alignment_loss(model(SCORES), batch, jnp.asarray(WEIGHTS), options)
    assert not np.isclose(sums["guided"], expected)


def test_the_row_that_reads_a_token_learns_its_links_in_the_layers_before(batch, options):
    def loss(weights):
        return alignment_loss(model(SCORES), batch, weights, options)[0]

    learnt = np.asarray(jax.grad(loss)(jnp.asarray(WEIGHTS)))[:2, 0] != 0
    expected = np.zeros((5, 4), bool)
    expected[np.arange(4), np.arange(4)] = True
    np.testing.assert_array_equal(learnt, np.broadcast_to(expected, (2, 2, 5, 4)))


@pytest.mark.parametrize("known", [0, 1])
def test_the_lexicon_learns_from_linked_words_alone_where_links_are_known(batch, options, known):
    batch["target_linked"] = jnp.full((1, 5), known)
    if not known:
        batch["target_links"] = jnp.full((1, 5, 2), -1)

    def loss(scores):
        return alignment_loss(model(scores), batch, jnp.asarray(WEIGHTS), options)[0]

    learnt = np.asarray(jax.grad(loss)(SCORES)) != 0
    expected = np.zeros((1, 5, 4), bool)
    expected[0, 0, :2], expected[0, 2, 2:] = True, True  # Anything of the own sentence,
    if known:
        expected[0, 0, 1], expected[0, 2, 3] = False, False  # or just what is linked.
    np.testing.assert_array_equal(learnt, expected)


def test_evaluation_takes_every_link_for_latent(batch, options):
    bare = {name: value for name, value in batch.items() if "link" not in name}
    loss, sums = alignment_loss(model(SCORES), bare, jnp.asarray(WEIGHTS), options)
    assert np.isfinite(loss) and set(sums) == {"alignment"}


SOURCE = np.random.default_rng(0).integers(3, 64, (2, 6))


@pytest.mark.parametrize("config", [transformer.tiny(), transformer.tiny(source_vocab_size=64)])
def test_word_scores_are_log_probabilities_of_single_words(config):
    build = lambda rngs: TransformerWithLexicon(config, rngs=rngs)  # noqa: E731
    params = oracle.random_params(build)
    every = jnp.broadcast_to(jnp.arange(config.vocab_size), (2, config.vocab_size))
    scores = jax.jit(lambda source: xa.apply(build, params, source, every, method="word_scores"))
    found = scores(SOURCE)
    assert found.shape == (2, 64, 6)
    np.testing.assert_allclose(np.exp(found).sum(1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(scores(SOURCE[:, ::-1]), found[:, :, ::-1], rtol=1e-5)
