"""Attention taught by links, by the diagonal and by coverage, from a config: it trains, learns, and mixes."""

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from configs import greek_english
from crossattn.data.errors import DataError
from crossattn.data.sources import phrases
from crossattn.models import transformer
from crossattn.train.alignment import Recipe
from experiments import train
from experiments.runs import parameters
from experiments.tasks import corpus, hmm, make_task
from experiments.tasks.alignment import aer_interval, aligned_pairs, score, stated_recipe
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


@pytest.mark.slow
def test_gold_links_teach_attention_to_align(few_phrases, tmp_path):
    config = tiny()
    config.train.update(steps=40, log_every=10)
    config.optim.learning_rate = 1e-2
    assert train.run(config, tmp_path).status == "finished"
    guided = logged(tmp_path, "guided")
    assert guided[-1] < 0.7 * guided[0]
    task = make_task(config, tmp_path / "assets")
    pairs = aligned_pairs(task.translator(parameters(task, tmp_path)), task.examples("validation"))
    taught = stated_recipe(config)
    # The last word of a phrase has no row after it: that is at most a third of these links.
    assert score(pairs, taught)["aer"] < score(pairs, replace(taught, head=1))["aer"]
    assert score(pairs, taught)["precision"] > 60
    interval = aer_interval(pairs, taught)
    assert interval.low < interval.value < interval.high
    assert interval.value == pytest.approx(score(pairs, taught)["aer"])


def test_links_that_are_counted_need_none_in_the_data(tmp_path, monkeypatch):
    calls, align = [], hmm.align
    monkeypatch.setattr(hmm, "align", lambda pairs: calls.append(1) or align(pairs))
    colours, things = ("noir", "vert", "bleu"), ("chat", "chien", "nid", "toit", "pain", "sel")
    pairs = list(itertools.product(things, colours))
    (tmp_path / "a.fr").write_text("".join(f"{thing} {colour}\n" for thing, colour in pairs))
    (tmp_path / "a.en").write_text("".join(f"{colour} {thing}\n" for thing, colour in pairs))
    config = tiny()
    config.loss.alignment = "hmm"
    config.data.update(name=f"files:{tmp_path / 'a.fr'},{tmp_path / 'a.en'}", options={})
    task = make_task(config)
    task.refuse_unready()
    batch, _ = map(next, task.train_iterators([0, 1], 0, 1))
    assert len(calls) == 1  # for all seeds
    assert (batch["target_linked"].sum() > 0) and (batch["target_links"] >= 0).any()
    assert stated_recipe(config) == Recipe(layer=-1, head=0, row_offset=2)
    with pytest.raises(DataError, match="counts links at each start, which are not prepared"):
        task.corpus.prepare()


def test_links_are_counted_on_few_pairs_alone(few_phrases, monkeypatch):
    monkeypatch.setattr(corpus, "_IN_MEMORY", 10)
    config = tiny()
    config.loss.alignment = "hmm"
    with pytest.raises(
        DataError, match=r"counts links in memory, of 10 pairs at most; .* has \d+; take 'latent'"
    ):
        make_task(config).train_iterator(0, 1)


def test_the_head_that_learnt_links_is_the_one_that_is_read():
    config = tiny(alignment_head=1)
    assert stated_recipe(config) == Recipe(layer=-1, head=1, row_offset=2)
    config.loss.alignment_layer = 0
    assert stated_recipe(config) == Recipe(layer=0, head=1, row_offset=2)
    config.evaluate.alignment.choose = False
    assert stated_recipe(config) == Recipe()


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
    return SimpleNamespace(
        alignment="gold",
        alignment_layer=None,
        alignment_head=1,
        alignment_head_weight=0.5,
        alignment_diagonal=8.0,
    )


@pytest.fixture
def batch():
    """Two sentences of two tokens each in a row, and padding; a token has one link, the first has two."""
    links = np.full((1, 5, 2), -1)
    links[0, :4, 0], links[0, 0, 1] = np.arange(4), 1
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
    return SimpleNamespace(word_scores=lambda source, target: scores[:, : target.shape[1]])


WEIGHTS = np.random.default_rng(0).dirichlet(np.ones(4), (3, 1, 2, 5))  # [L B N T S]
SCORES = jnp.log(jnp.asarray(np.random.default_rng(1).random((1, 5, 4)), jnp.float32))


def parts_of(batch, options, weights=WEIGHTS):
    """The loss of the first layer, and that of the head."""
    losses = []
    for options.alignment_head_weight in (0.0, 0.5):
        losses.append(alignment_loss(model(SCORES), batch, jnp.asarray(weights), options)[0])
    return losses[0], (losses[1] - losses[0]) / 0.5


LINKED = np.eye(5, 4) > 0
LINKED[0, 1] = True


@pytest.mark.parametrize(("layer", "head"), [(None, 1), (None, 0), (1, 1)])
def test_the_loss_of_the_head_is_that_of_its_rows_and_columns(batch, options, layer, head):
    """Only the first token of each sentence is followed by one, whose row knows both."""
    options.alignment_layer, options.alignment_head = layer, head
    taught, followed = WEIGHTS[-1 if layer is None else layer, 0, head], [0, 2]
    later = np.zeros((5, 4))
    later[followed] = taught[[1, 3]]
    rows = -sum(np.log(later[t][LINKED[t]]).mean() for t in followed)
    columns = -sum(
        np.log(later[t, s] / later[:, s].sum()) for t in followed for s in np.flatnonzero(LINKED[t])
    )
    found = parts_of(batch, options)[1]
    np.testing.assert_allclose(found, rows + columns, rtol=1e-4)


@pytest.mark.slow
def test_the_loss_of_the_head_teaches_no_other_head(batch, options):
    learnt = jax.grad(lambda weights: parts_of(batch, options, weights)[1])(jnp.asarray(WEIGHTS))
    layers, _, heads, rows, _ = np.nonzero(np.abs(np.asarray(learnt)) > 1e-6)
    assert set(layers) == {2} and set(heads) == {1} and set(rows) == {1, 3}


def test_links_that_are_known_take_the_place_of_the_posterior_in_the_first_layer(batch, options):
    mean = WEIGHTS[0, 0].mean(0)
    expected = -sum(np.log(mean[t][LINKED[t]]).mean() for t in range(4))
    options.alignment_head_weight = 0.0
    loss, sums = alignment_loss(model(SCORES), batch, jnp.asarray(WEIGHTS), options)
    np.testing.assert_allclose(loss - sums["alignment"], expected, rtol=1e-5)


def test_without_links_the_first_layer_learns_as_latent_and_teaches_the_head(batch, options):
    """So do batches of an evaluation, which have no head to teach."""
    bare = {name: value for name, value in batch.items() if "link" not in name}
    batch |= {
        "target_links": jnp.full((1, 5, 2), -1),
        "target_linked": jnp.zeros((1, 5), int),
    }
    first, head = parts_of(batch, options)
    loss, sums = alignment_loss(model(SCORES), bare, jnp.asarray(WEIGHTS), options)
    assert set(sums) == {"alignment"}
    options.alignment = "latent"
    latent, _ = alignment_loss(model(SCORES), bare, jnp.asarray(WEIGHTS), options)
    np.testing.assert_allclose([first, loss], [latent, latent], rtol=1e-6)
    guess, taught = WEIGHTS[0, 0].mean(0), WEIGHTS[2, 0, 1]
    expected = -sum((guess[t] * np.log(taught[t + 1])).sum() for t in (0, 2))
    np.testing.assert_allclose(head, expected, rtol=1e-4)


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
