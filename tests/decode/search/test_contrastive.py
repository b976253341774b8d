"""Contrastive search against a plain loop of full forwards."""

import jax
import numpy as np
import pytest

from crossattn.decode import constraints, contrastive_search, generate
from tests.decode.markov import EOS
from tests.decode.translators import LENGTH, SEGMENTS, SOURCE, V, bound, language_model, translator

K = 3


def plain(hidden, logits, alpha, before, banned=()):
    """Tokens of one row by the paper's equation 5, everything computed anew for every candidate."""
    tokens = list(before)
    while len(tokens) < len(before) + LENGTH and (len(tokens) == len(before) or tokens[-1] != EOS):
        scores = np.array(logits(hidden(tokens)[-1:])[0], np.float64)
        scores[list(banned)] = -np.inf
        p = np.exp(scores - scores.max())
        p /= p.sum()
        worth = {}
        for token in np.argsort(-p, kind="stable")[:K]:
            vectors = np.asarray(hidden([*tokens, int(token)]), np.float64)
            vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
            worth[int(token)] = (1 - alpha) * p[token] - alpha * (vectors[:-1] @ vectors[-1]).max()
        tokens.append(max(worth, key=worth.get))
    return tuple(tokens[len(before) :])


def trimmed(found, row):
    return tuple(np.asarray(found.tokens)[row, 0, : int(found.lengths[row, 0])].tolist())


@pytest.mark.parametrize(("alpha", "banned"), [(0.6, ()), (0.2, (4, 7))])
def test_a_language_model_says_what_a_plain_loop_says(alpha, banned):
    build, params = language_model(layers=1)
    befores = [(1,), (1, 5, 3), (1, 9, 4, 12, 8)]
    room = LENGTH + 5

    @jax.jit
    def vectors(params, tokens):
        return bound((build, params)).hidden(tokens)

    def hidden(tokens):
        return vectors(params, np.pad(tokens, (0, room - len(tokens)))[None])[0, : len(tokens)]

    logits = bound((build, params)).logits
    expected = [plain(hidden, logits, alpha, before, banned) for before in befores]
    # Padding that looks like what is said: were it compared with, something else would be said.
    filled = [(said * 5)[: 5 - len(own)] + own for said, own in zip(expected, befores, strict=True)]
    found = jax.jit(
        lambda p: generate(
            bound((build, p)),
            batch=3,
            max_new_tokens=LENGTH,
            candidates=K,
            alpha=alpha,
            prefix=np.array(filled),
            prefix_lengths=np.array([len(before) for before in befores]),
            processors=[constraints.ban(list(banned))],
        )
    )(params)
    assert [trimmed(found, row) for row in range(3)] == expected


def test_a_translator_says_what_a_plain_loop_says_row_by_row():
    build, params = translator(decoder_layers=1)

    @jax.jit
    def vectors(params, row, tokens):
        return bound((build, params)).hidden(
            jax.numpy.asarray(SOURCE)[row][None],
            tokens,
            source_segment_ids=jax.numpy.asarray(SEGMENTS)[row][None],
        )[0]

    found = jax.jit(
        lambda p: generate(bound((build, p)), SOURCE, SEGMENTS, max_new_tokens=LENGTH, candidates=K)
    )(params)
    for row in range(3):

        def hidden(tokens, row=row):
            padded = np.pad(tokens, (0, LENGTH + 1 - len(tokens)))[None]
            return vectors(params, row, padded)[0, : len(tokens)]

        assert trimmed(found, row) == plain(hidden, bound((build, params)).logits, 0.6, (1,))


def test_without_contrast_it_is_greedy():
    build, params = translator(decoder_layers=1)
    run = jax.jit(
        lambda p, **o: generate(bound((build, p)), SOURCE, SEGMENTS, max_new_tokens=LENGTH, **o),
        static_argnames=("candidates", "alpha"),
    )
    contrastive, greedy = run(params, candidates=K, alpha=0.0), run(params)
    np.testing.assert_array_equal(contrastive.tokens, greedy.tokens)
    np.testing.assert_allclose(contrastive.scores, greedy.scores, rtol=1e-4)


@pytest.mark.parametrize("options", [{"candidates": 0}, {"alpha": 1.5}])
def test_what_makes_no_sense_is_refused(options):
    with pytest.raises(ValueError, match="expected 1 or more, and 0 to 1"):
        contrastive_search(None, None, batch=1, max_new_tokens=V, **options)
