"""Padding of sources: hidden unasked where a model names it; frames; sources that are no batch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.decode import Bucketed, attention_of, generate
from crossattn.models import Bert, EncoderDecoder, Whisper, bert, encoder_decoder, whisper
from tests import numpy_model as oracle

from .translators import LENGTH, SEGMENTS, SOURCE, bound, translator

PAD = 3  # a token that is also chosen, so that nothing can take 0 for granted
PADDED = np.where(SEGMENTS > 0, np.where(SOURCE == PAD, 4, SOURCE), PAD)
TARGET = SOURCE[:, :4]
NAMED = translator(pad_id=PAD)
FRAMES = np.random.default_rng(1).normal(size=(3, 12, 8)).astype(np.float32)


def pair(**changes):
    """(build, params) of two BERTs."""
    config = encoder_decoder.tiny(encoder=bert.tiny(masked_lm=False, **changes))
    build = lambda rngs: EncoderDecoder(config, rngs=rngs)  # noqa: E731
    return build, oracle.random_params(build)


def hearer():
    """(build, params) of a Whisper."""
    build = lambda rngs: Whisper(whisper.tiny(), rngs=rngs)  # noqa: E731
    return build, oracle.random_params(build)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("plain", "named"), [(translator(), NAMED), (pair(), pair(pad_id=PAD))], ids=["one", "pair"]
)
def test_padding_that_a_model_names_is_hidden_unasked(plain, named):
    def logits(pair, *segment_ids):
        source, target = jnp.asarray(PADDED), jnp.asarray(TARGET)
        call = jax.jit(lambda *given: bound(pair)(source, target, source_segment_ids=given[0]))
        return np.asarray(call(*segment_ids))

    asked, unasked, read = logits(plain, SEGMENTS), logits(named, None), logits(plain, None)
    np.testing.assert_array_equal(unasked, asked)
    assert np.abs(read - asked)[1:].max() > 1e-2
    # What a call says goes before what the config says.
    np.testing.assert_array_equal(logits(named, np.ones_like(SEGMENTS)), read)


def test_a_padded_row_is_translated_as_if_it_were_alone():
    build, params = NAMED
    found = jax.jit(lambda s: generate(bound(NAMED), s, max_new_tokens=LENGTH))(PADDED)
    filled = Bucketed(build, batch_sizes=(4,), source_lengths=(8,), target_lengths=(8,))
    bucketed = filled(params, PADDED, max_new_tokens=LENGTH)
    np.testing.assert_array_equal(bucketed.tokens, found.tokens)
    short = jnp.asarray(PADDED[1:2, : SEGMENTS[1].sum()])
    alone = jax.jit(lambda s: generate(bound(translator()), s, max_new_tokens=LENGTH))(short)
    np.testing.assert_array_equal(found.tokens[1], alone.tokens[0])
    np.testing.assert_allclose(found.scores[1], alone.scores[0], rtol=1e-4)


def test_an_encoder_alone_hides_what_it_names():
    build = lambda pad_id: lambda rngs: Bert(bert.tiny(pad_id=pad_id), rngs=rngs)  # noqa: E731
    params = oracle.random_params(build(None))
    named, plain = (xa.functional.bind(build(pad_id), params) for pad_id in (PAD, None))
    unasked = jax.jit(named.encode)(PADDED).vectors
    np.testing.assert_array_equal(unasked, jax.jit(plain.encode)(PADDED, SEGMENTS).vectors)


@pytest.mark.slow
def test_frames_are_translated_in_buckets_as_they_are():
    build, params = hearer()
    found = jax.jit(lambda x: generate(bound((build, params)), x, max_new_tokens=5))(FRAMES)
    run = Bucketed(build, batch_sizes=(4,), target_lengths=(8,))
    for rows in (3, 2):
        filled = run(params, FRAMES[:rows], max_new_tokens=5)
        np.testing.assert_array_equal(filled.tokens, found.tokens[:rows])
        np.testing.assert_allclose(filled.scores, found.scores[:rows], rtol=1e-4)
    look = jax.jit(lambda x: attention_of(bound((build, params)), x, found.tokens[:, 0]))
    weights = look(FRAMES)
    assert weights.shape == (2, 3, 2, 5, 6)
    assert weights.dtype == jnp.float32


@pytest.mark.parametrize(
    ("source", "segment_ids", "message"),
    [
        (PADDED[0], None, r"shape \(6,\).*expected tokens \[B S\]\. A single.*source\[None\]"),
        (PADDED[None], None, r"shape \(1, 3, 6\).*expected tokens"),
        (PADDED.astype(np.float32), None, r"shape \(3, 6\) and dtype float32; expected frames"),
        (PADDED > 3, None, "dtype bool; expected tokens, which are integers"),
        (PADDED, SEGMENTS[0], r"source_segment_ids has shape \(6,\); expected \[B S\]"),
        (
            PADDED,
            SEGMENTS[:, :5],
            r"source_segment_ids has shape \(3, 5\); expected that of source",
        ),
    ],
)
def test_a_source_that_is_no_batch_is_refused(source, segment_ids, message, in_production):
    build, params = NAMED
    with pytest.raises(ValueError, match=message):
        generate(bound(NAMED), source, segment_ids, max_new_tokens=LENGTH)
    with pytest.raises(ValueError, match=message):
        Bucketed(build)(params, source, segment_ids, max_new_tokens=LENGTH)


@pytest.mark.parametrize(
    "changes", [{"separate_inputs": True}, {"source_vocab_size": 9}, {"pad_id": 0}]
)
def test_a_source_input_beside_a_source_of_tokens_is_refused(changes):
    text = dataclasses.replace(whisper.tiny().transformer, **changes)
    config = whisper.tiny(transformer=text)
    with pytest.raises(
        ValueError, match=f"got a source_input, and a config with {next(iter(changes))}"
    ):
        xa.functional.shapes(lambda rngs: Whisper(config, rngs=rngs))
