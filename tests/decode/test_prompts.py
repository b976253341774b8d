"""Prompts of unlike lengths in one batch: each row says what it says alone."""

import functools

import jax
import numpy as np
import pytest

import crossattn as xa
from crossattn.decode import (
    ModelDraft,
    PromptLookup,
    constraints,
    generate,
    sampling,
)
from crossattn.decode.config import GenerationConfig
from tests.closeness import close

from .markov import EOS
from .translators import LENGTH, SEGMENTS, SOURCE, V, bound, language_model, translator

PROMPTS = [[1, 5, 9, 4, 12], [1, 7], [1, 3, 8]]


def written(pair, prompts, **options):
    build, params = pair

    @jax.jit
    def call(params):
        model = xa.functional.bind(build, params)
        return generate(model, batch=len(prompts), prefix=prompts, max_new_tokens=LENGTH, **options)

    return jax.device_get(call(params))


def check(pair, **options):
    together = written(pair, PROMPTS, **options)
    alone = written(pair, PROMPTS[1:2], **options)
    for name in ("tokens", "lengths"):
        np.testing.assert_array_equal(getattr(together, name)[1], getattr(alone, name)[0])
    np.testing.assert_allclose(together.scores[1], alone.scores[0], rtol=1e-4)
    return together


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("changes", "options"),
    [
        *((dict(positions=name, layers=1), {}) for name in ("learned", "rope", "relative")),
        (dict(scan=True), dict(num_beams=3)),
        ({}, dict(candidates=3)),
    ],
    ids=["learned", "rope", "relative", "beams scanned", "candidates"],
)
def test_a_row_says_what_it_says_alone(changes, options):
    found = check(language_model(**changes), **options)
    assert len({tuple(row) for row in found.tokens[:, 0].tolist()}) > 1


def whole(logits, context):
    """A processor of one's own, that reads everything it is given."""
    own = jax.numpy.arange(len(context.tokens)) < context.length
    told = jax.numpy.sum(jax.numpy.where(own, context.tokens, 0)) + 7 * context.start
    return logits + jax.numpy.sin(told + context.length * jax.numpy.arange(len(logits)))


TABLE = np.tri(4, V, 8, dtype=bool)
PROCESSORS = {
    "ban": constraints.ban([3, 4]),
    "ban_first": constraints.ban_first([3, EOS]),
    "allow": constraints.allow([3, 5, EOS]),
    "allow_where": constraints.allow_where(TABLE),
    "ban_ngrams": constraints.ban_ngrams([[EOS, 1, 7, 6], [EOS, EOS, 1, 7, 6, 3], [6, 7], [8]]),
    "no_repeat_ngram 1": constraints.no_repeat_ngram(1),
    "no_repeat_ngram 2": constraints.no_repeat_ngram(2),
    "no_repeat_ngram 3": constraints.no_repeat_ngram(3),
    "min_new_tokens": constraints.min_new_tokens(3, EOS),
    "max_new_tokens": constraints.max_new_tokens(3, EOS),
    "force": constraints.force({1: 8}),
    "temperature": sampling.temperature(0.7),
    "top_k": sampling.top_k(4),
    "top_p": sampling.top_p(0.5),
    "min_p": sampling.min_p(0.2),
    "repetition_penalty": sampling.repetition_penalty(1.5),
    "one's own": whole,
}


@functools.cache
def processed(rows):
    """What each processor makes of these rows' logits, of two beams after 0 and 2 words."""
    logits = np.random.default_rng(0).normal(size=(3, 2, V)).astype(np.float32)[list(rows)]
    config = GenerationConfig(len(rows), LENGTH, prefix=[PROMPTS[row] for row in rows], pad_id=EOS)
    said = np.array([[6, 3], [6, 8]])

    @jax.jit
    def call(logits):
        tokens = config.tokens(2).at[:, :, config.start : config.start + 2].set(said)
        lengths = [jax.numpy.int32(config.start + count) for count in (0, 2)]
        return {
            name: [config.process([processor], logits, tokens, length) for length in lengths]
            for name, processor in PROCESSORS.items()
        }

    return jax.device_get(call(logits))


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_sees_of_each_row_what_it_sees_of_it_alone(name):
    together = processed((0, 1, 2))[name]
    for row in range(3):
        for mine, own in zip(together, processed((row,))[name], strict=True):
            close(mine[row], own[0])


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_padding_is_nothing_that_was_said(options):
    steering = [
        lambda logits, context: logits.at[EOS].add(3.0 * context.generated),
        sampling.repetition_penalty(1.3),
        constraints.ban_ngrams([[EOS, 1, 7, token] for token in range(3, V)]),
        constraints.no_repeat_ngram(1),
    ]
    # The end is what stands before short prompts: were it read, none of them could end.
    found = check(language_model(layers=1), processors=steering, pad_id=EOS, **options)
    assert found.lengths[1, 0] < LENGTH


@pytest.mark.slow
def test_drafts_change_nothing():
    pair = language_model(seed=3)
    small = bound(language_model(seed=4, layers=1))
    drafts = (
        ModelDraft(small.decode_step, lambda length: small.prefill(3, 1, length), lookahead=2),
        PromptLookup(np.array([[5, 9, 4], [7, 3, 8], [3, 8, 3]]), lookahead=3),
    )
    expected = written(pair, PROMPTS)
    for draft in drafts:
        found = written(pair, PROMPTS, draft=draft)
        np.testing.assert_array_equal(found.tokens, expected.tokens)


@pytest.mark.slow
def test_targets_of_a_source_may_begin_unlike():
    build, params = translator()
    call = jax.jit(
        lambda source, segment_ids, prefix, lengths: generate(
            xa.functional.bind(build, params),
            source,
            segment_ids,
            prefix=prefix,
            prefix_lengths=lengths,
            max_new_tokens=LENGTH,
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
        GenerationConfig(3, LENGTH, prefix=np.ones((3, 4), int), prefix_lengths=[1, 2])
    with pytest.raises(ValueError, match="prefix 1 is empty"):
        GenerationConfig(2, LENGTH, prefix=[[1, 2], []])
