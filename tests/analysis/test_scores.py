"""Scores of source tokens are what their equations say, and leave-one-out is a run without the token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.analysis import scores
from crossattn.interventions import Intervention
from tests.closeness import close
from tests.compiled import compiled
from tests.interventions.test_sites import given, model_of, run

B, T, S = 2, 5, 6


@pytest.fixture(scope="module")
def model():
    return model_of()


@pytest.fixture(scope="module")
def pairs():
    example = given()
    return example | {"target_out": jnp.roll(example["target_in"], -1, 1)}


def captured(model, pairs, *names):
    inputs = {name: x for name, x in pairs.items() if name != "target_out"}
    _, found = run(model, None, **inputs, capture=names)
    return [np.asarray(found[name], np.float64) for name in names]


def test_value_weighted_norms_are_the_norms_of_the_vectors_that_are_added(model, pairs):
    weights, values = captured(model, pairs, "decoder.cross.weights", "decoder.cross.values")
    kernels = [
        np.asarray(b.cross.out.kernel.get_value(), np.float64) for b in model.decoder.stack.blocks()
    ]
    vectors = np.einsum("lbnts,lbsnh,lnhd->lbtsd", weights, values, np.stack(kernels))
    found = compiled(scores.value_weighted_norms, model, pairs)
    close(found, np.linalg.norm(vectors, axis=-1).mean(0))
    # They add up to the sublayer's output, before its bias.
    _, cross = run(
        model,
        None,
        **{k: x for k, x in pairs.items() if k != "target_out"},
        capture=["decoder.cross"],
    )
    bias = [np.asarray(b.cross.out.bias.get_value()) for b in model.decoder.stack.blocks()]
    close(cross["decoder.cross"] - np.stack(bias)[:, None, None], vectors.sum(3), ulps=2000)


def test_rollout_gives_what_is_left_of_one_to_the_target_before(model, pairs):
    own, back, across = captured(
        model,
        pairs,
        "encoder.attention.weights",
        "decoder.attention.weights",
        "decoder.cross.weights",
    )
    found = compiled(scores.rollout, model, pairs)
    # Oracle: one matrix of all S + T places, whose rows say what a place is a mean of.
    for row in range(B):
        share = np.eye(S + T)

        def mixed(share, rows, columns, weights):
            step = np.eye(S + T)
            step[rows, rows] = np.eye(rows.stop - rows.start) / 2
            step[rows, columns] += weights / 2
            return step @ share

        source, target = slice(0, S), slice(S, S + T)
        for layer in range(2):
            share = mixed(share, source, source, own[layer, row].mean(0))
        for layer in range(2):
            share = mixed(share, target, target, back[layer, row].mean(0))
            share = mixed(share, target, source, across[layer, row].mean(0))
        np.testing.assert_allclose(share.sum(1), 1)
        close(found[row], share[target, source])


def test_gradient_times_weight_is_a_difference_quotient_of_the_scale_on_a_source_token(
    model, pairs
):
    found, step = compiled(scores.gradient_times_weight, model, pairs), 1e-2
    told = jax.jit(lambda scale: scores.log_likelihoods(
        model, pairs, {"decoder.cross.values": Intervention(scale=jnp.broadcast_to(scale, (2, S)))}
    ))  # fmt: skip
    for s in range(S):
        way = step * np.eye(S)[s]
        quotient = (told(jnp.asarray(1 + way)) - told(jnp.asarray(1 - way))) / (2 * step)
        np.testing.assert_allclose(found[..., s], quotient, rtol=0.02, atol=1e-3)


def test_integrated_gradients_add_up_to_what_the_source_brings(model, pairs):
    found = jax.jit(lambda: scores.integrated_gradients(model, pairs, steps=32))()
    nothing = {"decoder.cross.values": Intervention(scale=jnp.zeros(2)[:, None])}
    told = jax.jit(lambda edits: scores.log_likelihoods(model, pairs, edits))
    whole = told(None) - told(nothing)
    np.testing.assert_allclose(found.sum(-1), whole, atol=2e-2, rtol=2e-2)
    assert np.abs(whole).max() > 0.5


def test_leave_one_out_is_a_run_without_the_token(model, pairs):
    found = compiled(scores.leave_one_out, model, pairs)
    shorter = pairs | {
        "source": jnp.delete(pairs["source"], 2, 1),
        "source_segment_ids": jnp.delete(pairs["source_segment_ids"], 2, 1),
        "source_positions": jnp.array([[0, 1, 3, 4, 5]] * B),
    }
    inputs = {name: x for name, x in shorter.items() if name != "target_out"}
    logits = jax.nn.log_softmax(compiled(model, **inputs))
    without = jnp.take_along_axis(logits, pairs["target_out"][..., None], -1)[..., 0]
    close(
        found[..., 2], compiled(scores.log_likelihoods, model, pairs) - without, ulps=2000, size=20
    )


def test_rank_correlations_are_those_of_scipy():
    from scipy import stats

    rng = np.random.default_rng(0)
    for _ in range(5):
        one, other = rng.integers(0, 5, 9), rng.normal(size=9)  # with ties
        np.testing.assert_allclose(
            scores.spearman(one, other), stats.spearmanr(one, other).statistic
        )
        np.testing.assert_allclose(
            scores.kendall(one, other), stats.kendalltau(one, other).statistic
        )
    assert np.isnan(scores.kendall(np.ones(4), other[:4])) and np.isnan(
        scores.spearman(np.ones(4), other[:4])
    )


def test_every_score_has_a_number_for_each_pair_of_tokens(model, pairs):
    for name, score in scores.SCORES.items():
        assert jax.eval_shape(lambda s=score: s(model, pairs)).shape == (B, T, S), name
    assert xa.analysis.scores is scores


def test_slopes_of_passages_need_a_decoder_that_reads_some(model, pairs):
    windows = {**pairs, "neighbours": np.ones((2, 2, 2, 3), np.int32)}
    with pytest.raises(
        ValueError, match="has no decoder.chunked.values; expected a model that reads"
    ):
        scores.passage_slopes(model, windows)
