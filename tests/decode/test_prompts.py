"""Prompts of unlike lengths in one batch: each row says what it says alone."""

import jax
import numpy as np
import pytest

import crossattn as xa
from crossattn.decode import ModelDraft, PromptLookup, generate, translate
from crossattn.decode.target import Target

from .translators import LENGTH, SEGMENTS, SOURCE, bound, language_model, translator

PROMPTS = [[1, 5, 9, 4, 12], [1, 7], [1, 3, 8]]
SEARCHES = {"beams": dict(beams=3), "candidates": dict(candidates=3)}


def written(pair, prompts, **options):
    build, params = pair

    @jax.jit
    def call(params):
        model = xa.functional.bind(build, params)
        return generate(model, batch=len(prompts), prefix=prompts, max_length=LENGTH, **options)

    return jax.device_get(call(params))


def check(pair, **options):
    together = written(pair, PROMPTS, **options)
    alone = written(pair, PROMPTS[1:2], **options)
    np.testing.assert_array_equal(together.tokens[1], alone.tokens[0])
    np.testing.assert_allclose(together.scores[1], alone.scores[0], rtol=1e-4)
    return together


@pytest.mark.parametrize("positions", ["learned", "rope", "relative"])
def test_a_row_says_what_it_says_alone(positions):
    found = check(language_model(positions=positions, layers=1))
    assert len({tuple(row) for row in found.tokens[:, 0].tolist()}) > 1


@pytest.mark.parametrize(
    "search, scan", [("beams", True), ("candidates", False)], ids=["beams scanned", "candidates"]
)
def test_whatever_the_search(search, scan):
    check(language_model(scan=scan), **SEARCHES[search])


def test_drafts_change_nothing():
    pair = language_model(seed=3)
    small = bound(language_model(seed=4, layers=1))
    drafts = (
        ModelDraft(small.step, lambda room: small.start(3, 1, room), lookahead=2),
        PromptLookup(np.array([[5, 9, 4], [7, 3, 8], [3, 8, 3]]), lookahead=3),
    )
    expected = written(pair, PROMPTS)
    for draft in drafts:
        found = written(pair, PROMPTS, draft=draft)
        np.testing.assert_array_equal(found.tokens, expected.tokens)


def test_padding_says_nothing():
    pair = language_model(positions="learned")
    lengths = np.array([len(prompt) for prompt in PROMPTS])
    filled = np.full((3, 5), 11)
    for row, prompt in enumerate(PROMPTS):
        filled[row, -len(prompt) :] = prompt
    drawn = dict(key=jax.random.key(0))
    expected = written(pair, PROMPTS, **drawn)
    found = written(pair, filled, prefix_lengths=lengths, **drawn)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.scores, expected.scores)


def test_targets_of_a_source_may_begin_unlike():
    build, params = translator()
    call = jax.jit(
        lambda source, segments, prefix, lengths: translate(
            xa.functional.bind(build, params),
            source,
            segments,
            prefix=prefix,
            prefix_lengths=lengths,
            max_length=LENGTH,
        )
    )
    prefix = np.array([[1, 5, 9], [0, 1, 7], [0, 0, 1]])
    together = call(SOURCE, SEGMENTS, prefix, np.array([3, 2, 1]))
    for row, length in ((1, 2), (2, 1)):
        own = prefix[row : row + 1, 3 - length :]
        one = SOURCE[row : row + 1], SEGMENTS[row : row + 1]
        alone = call(*one, own, np.array([length]))
        np.testing.assert_array_equal(together.tokens[row], alone.tokens[0])


def test_bad_lengths_are_refused():
    with pytest.raises(
        ValueError, match=r"prefix_lengths has shape \(2,\); expected \[B\] = \[3\]"
    ):
        Target(3, LENGTH, prefix=np.ones((3, 4), int), prefix_lengths=[1, 2])
    with pytest.raises(ValueError, match="prefix 1 is empty"):
        Target(2, LENGTH, prefix=[[1, 2], []])
