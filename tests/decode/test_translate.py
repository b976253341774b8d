"""Decoding real (tiny) models: against naive loops of full forwards; what is shared and reused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.decode import PromptLookup, attention_of, generate
from crossattn.models import Decoder, Transformer, decoder, transformer
from tests import numpy_model as oracle

from . import markov
from .markov import EOS
from .translators import LENGTH, SEGMENTS, SOURCE, V, translator

BEAMS = 3
BUILD, PARAMS = translator()


@pytest.fixture(scope="module")
def run():
    """A jitted translate, compiled once a set of options."""

    @functools.cache
    def jitted(**options):
        def call(source, segment_ids):
            model = xa.functional.bind(BUILD, PARAMS)
            return generate(model, source, segment_ids, max_new_tokens=LENGTH, **options)

        return jax.jit(call)

    return jitted


@pytest.fixture(scope="module")
def next_log_p():
    """log p [V] of the token after some tokens, by a full forward of everything in numpy."""

    @functools.cache
    def log_p(row, tokens):
        target_in = np.array([[1, *tokens]])
        valid = SEGMENTS[row : row + 1] > 0
        logits = oracle.transformer(PARAMS, SOURCE[row : row + 1], target_in, valid)[0, -1]
        return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()

    return log_p


def check_plain(found, next_log_p, beams):
    """The hypotheses are those of a greedy loop, or of a beam search over lists, and the rows differ."""
    said = set()
    for row in range(3):
        expected = [greedy_loop(next_log_p, row)]
        if beams > 1:
            of_row = functools.partial(next_log_p, row)
            expected = markov.plain_beam_search(of_row, beams, LENGTH, 0.6)
        tokens, lengths = np.asarray(found.tokens[row]), np.asarray(found.lengths[row])
        own = [tuple(x[:n].tolist()) for x, n in zip(tokens, lengths, strict=True)]
        assert own == [tokens for tokens, _ in expected]
        np.testing.assert_allclose(found.scores[row], [s for _, s in expected], rtol=1e-3)
        said.add(own[0])
    assert len(said) > 1, "the source should matter"


def greedy_loop(next_log_p, row):
    """Tokens and score of the naive loop."""
    tokens, score = (), 0.0
    while len(tokens) < LENGTH and tokens[-1:] != (EOS,):
        log_p = next_log_p(row, tokens)
        tokens, score = (*tokens, int(log_p.argmax())), score + log_p.max()
    return tokens, score


@pytest.mark.parametrize("beams", [1, BEAMS], ids=["greedy", "beams"])
def test_a_search_equals_a_plain_one_of_full_forwards(run, next_log_p, beams):
    check_plain(run(num_beams=beams)(SOURCE, SEGMENTS), next_log_p, beams)


@pytest.mark.parametrize("beams", [1, BEAMS])
def test_rows_finish_independently_of_the_batch_around_them(run, beams):
    together = run(num_beams=beams)(SOURCE, SEGMENTS)
    order = np.array([2, 0, 2])
    shuffled = run(num_beams=beams)(SOURCE[order], SEGMENTS[order])
    np.testing.assert_array_equal(shuffled.tokens, together.tokens[order])
    for row in range(3):
        alone = run(num_beams=beams)(SOURCE[[row] * 3], SEGMENTS[[row] * 3])
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
        np.testing.assert_allclose(alone.scores[0], together.scores[row], rtol=1e-5)


@pytest.mark.parametrize("scan", [False, True], ids=["looped", "scanned"])
def test_beams_share_one_copy_of_the_source(scan):
    config = transformer.tiny(vocab_size=V, encoder_layers=1, scan=scan)
    build = lambda rngs: Transformer(config, rngs=rngs)  # noqa: E731
    shapes = jax.eval_shape(lambda: xa.init(build, jax.random.key(0)))
    read = dict(source=jnp.asarray(SOURCE), source_segment_ids=jnp.asarray(SEGMENTS))

    def keys(p):
        layers = xa.functional.bind(build, p).prefill(3, BEAMS, LENGTH, **read).layers
        return layers[0].memories["cross"].keys, layers[0].cache.keys

    source, cache = jax.eval_shape(keys, shapes)
    assert source.shape == (3, 6, 2, 16)  # [B S K H]: no beam axis
    assert cache.shape == (3, BEAMS * LENGTH, 2, 16)

    def loop(p):
        model = xa.functional.bind(build, p)
        return generate(model, **read, max_new_tokens=LENGTH, num_beams=BEAMS)

    text = str(jax.make_jaxpr(loop)(shapes))
    assert f"f32[{3 * BEAMS},6,2,16]" not in text
    assert f"f32[3,{BEAMS},6,2,16]" not in text
    assert "f32[3,6,2,16]" in text


def test_attention_of_a_hypothesis_is_what_decoding_attended_to(run):
    found = run(num_beams=BEAMS)(SOURCE, SEGMENTS)
    tokens, lengths = np.asarray(found.tokens[:, 0]), np.asarray(found.lengths[:, 0])
    model = xa.functional.bind(BUILD, PARAMS)
    weights = np.asarray(jax.jit(lambda *a: attention_of(model, *a))(SOURCE, tokens, SEGMENTS))
    assert weights.shape == (2, 3, 2, LENGTH, 6)  # [L B N T S]

    @jax.jit
    def step(tokens, states):
        return model.decode_step(tokens, states, return_weights=True)[1:]

    read = dict(source=jnp.asarray(SOURCE), source_segment_ids=jnp.asarray(SEGMENTS))
    states = model.prefill(3, 1, LENGTH, **read)
    last = np.ones(3, np.int32)
    for t in range(LENGTH):
        states, stepped = step(last[:, None, None], states)
        going = t < lengths
        np.testing.assert_allclose(
            weights[:, going, :, t], stepped[:, going, 0, :, 0], rtol=1e-3, atol=1e-5
        )
        assert not weights[:, ~going, :, t].any()
        last = tokens[:, t]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": BEAMS, "length_penalty": 0.6},
        {"draft": PromptLookup(np.array([[4, 5]] * 3), 2)},
    ],
    ids=["greedy", "beams", "draft"],
)
def test_a_decoder_that_reads_writes_what_full_forwards_of_numpy_say(options):
    config = decoder.tiny(vocab_size=V, tie_output=False, memory_dim=8)
    build = lambda rngs: Decoder(config, rngs=rngs)  # noqa: E731
    params = oracle.random_params(build, seed=21)
    memory = 3 * np.random.default_rng(3).normal(size=(3, 6, 8)).astype(np.float32)
    read = dict(memory=memory, memory_segment_ids=SEGMENTS)
    found = jax.jit(
        lambda p: generate(
            xa.functional.bind(build, p), inputs=read, max_new_tokens=LENGTH, **options
        )
    )(params)

    @functools.cache
    def next_log_p(row, tokens):
        own = dict(memory=memory[[row]], source_allowed=SEGMENTS[[row], None] > 0)
        logits = oracle.decoder(params, np.array([[1, *tokens]]), act="gelu", **own)[0, -1]
        return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()

    check_plain(found, next_log_p, options.get("num_beams", 1))


def test_a_memory_that_does_not_fit_is_refused():
    def made(memory_dim):
        config = decoder.tiny(vocab_size=V, memory_dim=memory_dim)
        build = lambda rngs: Decoder(config, rngs=rngs)  # noqa: E731
        return xa.functional.bind(build, oracle.random_params(build))

    alone, reader = made(None), made(8)
    memory = np.zeros((3, 6, 8), np.float32)
    with pytest.raises(ValueError, match="has no memory_dim, but was given one to read"):
        generate(alone, max_new_tokens=2, inputs={"memory": memory})
    with pytest.raises(ValueError, match="has a memory_dim, but was given none to read"):
        generate(reader, batch=3, max_new_tokens=2)
    with pytest.raises(ValueError, match="memory has 3 rows; expected as many as the batch, 2"):
        generate(reader, batch=2, max_new_tokens=2, inputs={"memory": memory})
