"""Processors against those of transformers, against numpy, and by what they promise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crossattn.decode import Context, constraints, sampling
from crossattn.decode.logits import topk
from crossattn.decode.logits.processors import apply
from tests.closeness import close
from tests.decode.markov import check_frequencies
from tests.peers import peer

V, X, EOS = 300, 9, 2
RNG = np.random.default_rng(0)
LOGITS = (3 * RNG.normal(size=(4, V))).astype(np.float32)
TOKENS = RNG.integers(3, 6, (4, X)).astype(np.int32)  # few different ones, so that n-grams repeat


def run(*processors, logits=LOGITS, tokens=TOKENS, length=X, start=1):
    """[B V] after the processors, jitted."""
    found = jax.jit(
        lambda logits, tokens, length: apply(
            processors, logits[:, None], tokens[:, None], length, start
        )
    )(logits, tokens, jnp.int32(length))
    return np.asarray(found[:, 0])


def theirs(name, *arguments, logits=LOGITS, tokens=TOKENS, **options):
    torch = peer("torch")
    logits_process = peer("transformers.generation.logits_process")
    process = getattr(logits_process, name)(*arguments, **options)
    return process(torch.tensor(tokens).long(), torch.tensor(logits)).numpy()


@pytest.mark.parametrize(
    ("ours", "name", "arguments"),
    [
        (sampling.temperature(0.7), "TemperatureLogitsWarper", [0.7]),
        (sampling.top_k(1), "TopKLogitsWarper", [1]),
        (sampling.top_k(40), "TopKLogitsWarper", [40]),
        (sampling.top_k(1000), "TopKLogitsWarper", [1000]),
        (sampling.top_p(0.1), "TopPLogitsWarper", [0.1]),
        (sampling.top_p(0.9), "TopPLogitsWarper", [0.9]),
        (sampling.min_p(0.1), "MinPLogitsWarper", [0.1]),
        (sampling.repetition_penalty(1.3), "RepetitionPenaltyLogitsProcessor", [1.3]),
        (constraints.no_repeat_ngram(1), "NoRepeatNGramLogitsProcessor", [1]),
        (constraints.no_repeat_ngram(2), "NoRepeatNGramLogitsProcessor", [2]),
        (constraints.no_repeat_ngram(3), "NoRepeatNGramLogitsProcessor", [3]),
        (constraints.ban([7, 250]), "SuppressTokensLogitsProcessor", [[7, 250]]),
        (constraints.ban_first([7, EOS]), "SuppressTokensAtBeginLogitsProcessor", [[7, EOS], 1]),
        (
            constraints.ban_ngrams([[9], [4, 5], [3, 3, 4], [5, 4, 3, 5]]),
            "NoBadWordsLogitsProcessor",
            [[[9], [4, 5], [3, 3, 4], [5, 4, 3, 5]]],
        ),
        (constraints.min_new_tokens(4, EOS), "MinNewTokensLengthLogitsProcessor", [1, 4, EOS]),
        (constraints.max_new_tokens(X, EOS), "ForcedEOSTokenLogitsProcessor", [X + 1, EOS]),
        (constraints.force({0: 8}), "ForcedBOSTokenLogitsProcessor", [8]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_processors_do_what_those_of_transformers_do(ours, name, arguments):
    for length in (1, 2, 4, 5, 6, X):
        # On sequences one by one, for they have all tokens or none.
        tokens = TOKENS[:, :length]
        close(run(ours, length=length), theirs(name, *arguments, tokens=tokens))


@pytest.mark.parametrize("p", [0.05, 0.5, 0.95, 1.0])
def test_a_nucleus_is_the_smallest_set_with_that_much_probability(p):
    kept = np.isfinite(run(sampling.top_p(p)))
    for row, logits in enumerate(LOGITS.astype(np.float64)):
        probabilities = np.exp(logits) / np.exp(logits).sum()
        order = np.argsort(-logits)
        before = np.cumsum(probabilities[order]) - probabilities[order]
        expected = np.zeros(V, bool)
        expected[order[before < p - 1e-9]] = True
        np.testing.assert_array_equal(kept[row], expected)


def test_ties_of_a_nucleus_stay_together():
    logits = np.log(np.array([[0.3, 0.2, 0.2, 0.2, 0.1]], np.float32))
    kept = np.isfinite(run(sampling.top_p(0.4), logits=logits, tokens=TOKENS[:1]))
    assert kept.tolist() == [[True, True, True, True, False]]


def test_allowed_tokens_may_depend_on_step_and_row():
    table = np.zeros((4, 2, V), bool)
    for row in range(4):
        table[row, 0, 10 + row] = table[row, 1, 20 + row] = True
    for length, base in ((1, 10), (2, 20), (7, 20)):
        found = run(constraints.allow_where(table), length=length)
        assert np.isfinite(found).sum() == 4
        assert found.argmax(-1).tolist() == [base + row for row in range(4)]
    always = run(constraints.allow_where(table[0, :1]), length=5)
    np.testing.assert_array_equal(always, run(constraints.allow([10])))


def test_lengths_may_differ_from_row_to_row():
    early = run(constraints.min_new_tokens(np.array([0, 2, 4, 9]), EOS), length=5)  # four generated
    assert np.isfinite(early[:, EOS]).tolist() == [True, True, True, False]
    late = run(constraints.max_new_tokens(np.array([9, 6, 5, 2]), EOS), length=5)
    assert (np.isfinite(late).sum(-1) == 1).tolist() == [False, False, True, True]


def test_processors_apply_in_order_and_a_function_is_one():
    def doubled(logits, context: Context):
        return 2 * logits * (context.length == X) + context.row

    found = run(sampling.temperature(4.0), doubled)
    close(found, LOGITS / 2 + np.arange(4)[:, None])


@pytest.mark.parametrize(
    "make",
    [
        lambda: sampling.temperature(0.0),
        lambda: sampling.top_k(0),
        lambda: sampling.top_p(0.0),
        lambda: sampling.min_p(1.5),
        lambda: sampling.repetition_penalty(-1.0),
        lambda: constraints.no_repeat_ngram(0),
        lambda: constraints.ban_ngrams([[3], []]),
    ],
)
def test_what_makes_no_sense_is_refused(make):
    with pytest.raises(ValueError, match="expected"):
        make()


@pytest.mark.parametrize(
    ("size", "k"), [(8000, 8), (300, 2), (301, 1), (1000, 3), (5, 9), (70, 60)]
)
def test_the_largest_are_found_as_by_a_stable_sort(size, k):
    x = RNG.normal(size=(3, 2, size)).astype(np.float32)
    for values in (x, np.round(x) + 0.0, np.where(x > 1, x, -np.inf)):  # ties, and no -0
        found, places = jax.jit(topk.top_k, static_argnums=1)(values, k)
        order = np.argsort(-values, axis=-1, kind="stable")[..., :k]
        np.testing.assert_array_equal(places, order)
        np.testing.assert_array_equal(found, np.take_along_axis(values, order, -1))


@pytest.mark.parametrize("size", [5, 200])
def test_drawn_tokens_have_the_softmax_as_their_distribution(size):
    draws, logits = 40_000, (2 * RNG.normal(size=size)).astype(np.float32)
    logits[1] = -np.inf
    expected = np.exp(logits.astype(np.float64))
    expected /= expected.sum()
    uniform = jax.random.uniform(jax.random.key(0), (draws,))
    found = jax.jit(topk.draw)(jnp.broadcast_to(logits, (draws, size)), uniform)
    check_frequencies(np.bincount(np.asarray(found), minlength=size), draws * expected)


def test_an_extreme_draw_is_no_impossible_token():
    logits = np.full((2, 300), -np.inf, np.float32)
    logits[:, [17, 200]] = [0.0, 1.0]
    uniform = np.array([0.0, np.nextafter(np.float32(1), np.float32(0))])
    assert np.asarray(jax.jit(topk.draw)(logits, uniform)).tolist() == [17, 200]
