"""Sequences longer than a table of learned positions are refused by every call; those that fit are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.decode import Bucketed, ModelDraft, PromptLookup, generate
from crossattn.models import (
    Bert,
    Decoder,
    EncoderDecoder,
    Transformer,
    Whisper,
    bert,
    decoder,
    encoder_decoder,
    transformer,
    whisper,
)
from crossattn.nn import InputConfig
from tests import numpy_model as oracle

MOST = 8
SHALLOW = dict(encoder_layers=1, decoder_layers=1)
CONFIGS = {
    Transformer: transformer.tiny(**SHALLOW, positions="learned", max_length=MOST),
    Decoder: decoder.tiny(layers=1, max_length=MOST),
    Bert: bert.tiny(layers=1, max_length=MOST),
    EncoderDecoder: encoder_decoder.tiny(
        encoder=bert.tiny(layers=1, max_length=MOST, masked_lm=False),
        decoder=decoder.tiny(layers=1, max_length=MOST, memory_dim=32),
    ),
    Whisper: whisper.tiny(
        transformer=transformer.tiny(**SHALLOW, positions="learned", max_length=8)
    ),
}
FRAMES = jnp.zeros((1, 12, 8))


def pair(kind, config=None):
    build = lambda rngs: kind(config or CONFIGS[kind], rngs=rngs)  # noqa: E731
    return build, oracle.random_params(build)


def bound(kind, config=None):
    return xa.functional.bind(*pair(kind, config))


def text(length, rows=1):
    return jnp.asarray(np.random.default_rng(0).integers(3, 64, (rows, length)))


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (Transformer, lambda m: m.encode(text(9))),
        (Transformer, lambda m: m(text(8), text(9))),
        (Transformer, lambda m: m.prefill(1, 1, 9, source=text(8))),
        (Transformer, lambda m: generate(m, text(9), max_new_tokens=4)),
        (Transformer, lambda m: generate(m, text(8), max_new_tokens=9, num_beams=2)),
        (Transformer, lambda m: generate(m, text(8), max_new_tokens=8, candidates=2)),
        (Transformer, lambda m: generate(m, text(8), max_new_tokens=8, prefix=(1, 4))),
        (
            Transformer,
            lambda m: generate(m, text(8), max_new_tokens=9, draft=PromptLookup(text(8))),
        ),
        (Decoder, lambda m: m(text(9))),
        (Decoder, lambda m: m.prefill(1, 3, 9)),
        (Decoder, lambda m: generate(m, batch=1, prefix=text(6), max_new_tokens=4)),
        (Decoder, lambda m: generate(m, batch=1, prefix=text(9), max_new_tokens=1)),
        (Bert, lambda m: m.encode(text(9))),
        (Bert, lambda m: m(text(9), types=jnp.zeros((1, 9), int))),
        (EncoderDecoder, lambda m: m.encode(text(9))),
        (EncoderDecoder, lambda m: generate(m, text(8), max_new_tokens=9)),
        (Whisper, lambda m: m(FRAMES, text(9))),
        (Whisper, lambda m: m.prefill(len(FRAMES), 1, 9, source=FRAMES)),
    ],
)
def test_what_is_longer_than_the_table_is_refused(kind, call):
    said = "a sequence of 9 tokens was asked for, but this model has learned 8 positions: shorten"
    with pytest.raises(ValueError, match=said):
        jax.eval_shape(lambda: call(bound(kind)))


def test_rows_of_the_table_that_stand_before_it_are_no_positions():
    config = transformer.tiny(**SHALLOW, positions="learned", input=InputConfig(position_offset=2))
    with pytest.raises(ValueError, match="513 tokens was asked for, .* has learned 512"):
        bound(Transformer, config).encode(text(513))


def test_schemes_without_a_table_and_packed_rows_have_no_limit():
    config = transformer.tiny(**SHALLOW, max_length=MOST)
    encode = bound(Transformer, config).encode
    assert jax.eval_shape(lambda: encode(text(30)).vectors).shape == (1, 30, 32)
    model = bound(Decoder)
    packed = jax.jit(lambda: model(text(12), positions=jnp.tile(jnp.arange(6), 2)[None]))()
    assert np.isfinite(packed).all()


@pytest.mark.slow
def test_texts_that_fill_the_table_are_written_to_their_end():
    build, params = pair(Transformer)
    small = pair(Transformer, transformer.tiny(**SHALLOW))

    @jax.jit
    def call(params, other):
        model, another = xa.functional.bind(build, params), xa.functional.bind(small[0], other)
        options = dict(max_new_tokens=MOST, eos_id=63)
        drafts = (
            PromptLookup(text(8, 2), lookahead=4),
            ModelDraft(
                another.decode_step, lambda n: another.prefill(2, 1, n, source=text(8, 2)), 3
            ),
        )
        plain = generate(model, text(8, 2), **options)
        return plain, [generate(model, text(8, 2), draft=draft, **options) for draft in drafts]

    plain, drafted = jax.device_get(call(params, small[1]))
    assert np.isfinite(plain.scores).all() and plain.lengths.max() == MOST
    for found in drafted:
        np.testing.assert_array_equal(found.tokens, plain.tokens)
        np.testing.assert_allclose(found.scores, plain.scores, rtol=1e-3, atol=1e-4)
    last = jax.jit(
        lambda p: generate(xa.functional.bind(build, p), text(8, 2), max_new_tokens=7, candidates=2)
    )
    assert np.isfinite(last(params).scores).all()


def test_buckets_end_where_the_table_ends():
    build, params = pair(Transformer)
    run = Bucketed(
        build, batch_sizes=(2,), source_lengths=(6, 100), target_lengths=(6, 100), prefix=(1, 4)
    )
    found = run(params, text(7), max_new_tokens=7)
    assert found.tokens.shape == (1, 1, 7) and np.isfinite(found.scores).all()
    for length, count in ((9, 7), (7, 8)):
        with pytest.raises(ValueError, match="a sequence of 9 tokens was asked for"):
            run(params, text(length), max_new_tokens=count)
    write = Bucketed(
        pair(Decoder)[0], batch_sizes=(2,), source_lengths=(4, 100), target_lengths=(2, 100)
    )
    found = write(pair(Decoder)[1], prompts=[[1, 5, 6, 7, 9], [3]], max_new_tokens=3)
    assert np.isfinite(found.scores).all()
