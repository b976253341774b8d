"""The recurrent encoder-decoder holds to its papers' equations, to its texts in packed rows, and decodes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import crossattn as xa
from crossattn.decode import (
    Bucketed,
    Capture,
    ModelDraft,
    PromptLookup,
    generate,
    speculative,
)
from crossattn.decode.search.penalties import Coverage
from crossattn.models import RNNEncoderDecoder, rnn_encoder_decoder
from tests import numpy_model as oracle
from tests.closeness import close
from tests.decode.markov import (
    EOS,
    log_softmax,
    plain_beam_search,
    plain_greedy,
    plain_groups,
    texts,
)
from tests.decode.search.test_contrastive import K, plain
from tests.decode.translators import bound, translator
from tests.models import rnn_oracle

V, D, LENGTH, BATCH = 16, 12, 7, 3
RNG = np.random.default_rng(0)
SOURCE = RNG.integers(3, V, (BATCH, 6)).astype(np.int32)
TARGET = RNG.integers(3, V, (BATCH, 5)).astype(np.int32)
SEGMENTS = (np.arange(6) < np.array([[6], [4], [5]])).astype(np.int32)
small = functools.partial(rnn_encoder_decoder.tiny, vocab_size=V, dim=D)

LUONG = dict(attention="luong", decoder_layers=1)
CONFIGS = {
    "bahdanau": small(encoder_dim=2 * D, source_vocab_size=V + 2),
    "luong, dot": small(**LUONG, cell="lstm", score="dot"),
    "luong, general": small(attention="luong", bridge=False, cell="lstm", encoder_dim=D),
    "luong, concat": small(**LUONG, score="concat", bidirectional=False, encoder_layers=1),
    "luong, local-m": small(**LUONG, scope="local-m", window=1, input_feeding=False),
    "luong, local-p": small(**LUONG, scope="local-p", window=2, encoder_layers=1),
    "none": small(attention=None, bidirectional=False, bridge=False),
}


@functools.cache
def model_of(name):
    """Returns the function that builds a model, and parameters."""
    build = lambda rngs: RNNEncoderDecoder(CONFIGS[name], rngs=rngs)  # noqa: E731
    return build, oracle.random_params(build)


def loss_of(hidden, module=jnp):
    return module.sin(3 * hidden).sum()


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_the_equations_of_the_papers_with_their_gradients(name):
    (build, params), config = model_of(name), CONFIGS[name]
    seen = config.attention is not None

    @functools.partial(jax.jit, static_argnums=1)
    def both(params, row):
        def loss(params):
            model = xa.functional.bind(build, params)
            source = jnp.asarray(SOURCE[[row], : SEGMENTS[row].sum()])
            target = jnp.asarray(TARGET[[row]])
            hidden, weights = model.hidden(source, target, return_weights=seen)
            return loss_of(hidden), (hidden, weights)

        return jax.value_and_grad(loss, has_aux=True)(params)

    (_, (hidden, weights)), gradient = jax.device_get(both(params, 1))
    exact = rnn_oracle.in_float64(params)
    read = lambda p: rnn_oracle.vectors(p, config, SOURCE[1, :4], TARGET[1])  # noqa: E731
    wanted, read_weights = read(exact)
    close(hidden[0], wanted, ulps=2000)
    if seen:
        assert weights.shape == (1, 1, 1, 5, 4)
        close(weights[0, 0, 0], read_weights, ulps=2000)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        way = jax.tree.map(lambda x, rng=rng: rng.normal(size=x.shape), exact)
        moved = [jax.tree.map(lambda x, d, s=s: x + s * d, exact, way) for s in (1e-6, -1e-6)]
        ahead, back = (loss_of(read(p)[0], np) for p in moved)
        terms = [(g * d).sum() for g, d in zip(*map(jax.tree.leaves, (gradient, way)), strict=True)]
        np.testing.assert_allclose(
            sum(terms), (ahead - back) / 2e-6, atol=1e-4 * np.abs(terms).sum()
        )


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", ["bahdanau", "luong, general", "luong, local-p", "none"])
def test_a_packed_row_equals_its_texts_alone(name):
    (build, params), config = model_of(name), CONFIGS[name]
    lengths = [(4, 3), (1, 1), (2, 4)]  # of three pairs in a row, then two places of padding

    def packed(side, of):
        own = [of(i, pair[side]) for i, pair in enumerate(lengths)]
        return jnp.asarray(np.concatenate([*own, [0, 0]])[None])

    source, target = packed(0, lambda i, n: SOURCE[i, :n]), packed(1, lambda i, n: TARGET[i, :n])
    ids = [packed(side, lambda i, n: np.full(n, i + 1)) for side in (0, 1)]
    places = [packed(side, lambda i, n: np.arange(n)) for side in (0, 1)]
    given = dict(
        source_segment_ids=ids[0],
        target_segment_ids=ids[1],
        source_positions=places[0],
        target_positions=places[1],
        return_weights=config.attention is not None,
    )
    model = xa.functional.bind(build, params)
    hidden, weights = jax.jit(lambda: model.hidden(source, target, **given))()
    for i, (S, T) in enumerate(lengths):
        wanted, read = rnn_oracle.vectors(
            rnn_oracle.in_float64(params), config, SOURCE[i, :S], TARGET[i, :T]
        )
        close(hidden[0, ids[1][0] == i + 1], wanted, ulps=2000, err_msg=f"text {i}")
        if weights is not None:
            rows = np.asarray(weights)[0, 0, 0, ids[1][0] == i + 1]
            close(rows[:, ids[0][0] == i + 1], read, ulps=2000)
            assert not rows[:, ids[0][0] != i + 1].any()


def test_dropout_follows_its_key_and_spares_the_states():
    config = small(dropout_rate=0.5)
    build = lambda rngs: RNNEncoderDecoder(config, rngs=rngs)  # noqa: E731
    params = oracle.random_params(build)
    texts = jnp.asarray(SOURCE), jnp.asarray(TARGET)
    run = jax.jit(lambda key: xa.functional.bind(build, params).hidden(*texts, key=key)[0])
    one, same, other = (np.asarray(run(jax.random.key(i))) for i in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert 0.3 < (one == 0).mean() < 0.7 and np.any(one != other)
    plain = run(None)
    wanted = rnn_oracle.vectors(rnn_oracle.in_float64(params), config, SOURCE[0], TARGET[0])[0]
    close(plain[0], wanted, ulps=2000)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(bridge=False, decoder_layers=1), "encoder has 2 layers of size 12, the decoder 1 of"),
        (dict(dim=13), "dim is 13; two directions expect an even number"),
        (dict(cell="rnn"), "cell is 'rnn'; expected one of gru, lstm"),
        (dict(attention="dot"), "attention is 'dot'; expected one of bahdanau, luong, None"),
        (
            dict(attention="luong", score="dot", encoder_dim=24),
            "memory_dim is 24 and dim 12; 'dot'",
        ),
    ],
)
def test_what_does_not_fit_is_named(changes, said, in_production):
    with pytest.raises(ValueError, match=said):
        jax.eval_shape(lambda: RNNEncoderDecoder(small(**changes), rngs=nnx.Rngs(0)) and 0)


def test_there_are_no_weights_without_attention():
    model = xa.functional.bind(*model_of("none"))
    with pytest.raises(ValueError, match="asks for attention, but this model has attention=None"):
        model.hidden(jnp.asarray(SOURCE), jnp.asarray(TARGET), return_weights=True)


# Decoding: every search that needs no more than its states have.

TOLD = {
    "bahdanau": small(encoder_layers=1, decoder_layers=1),
    "luong, local-p": small(**LUONG, scope="local-p", window=2, encoder_layers=1, cell="lstm"),
    "none": small(attention=None, encoder_layers=1, decoder_layers=1),
}


@functools.cache
def talkative(name, seed=20):
    """Builds a model whose texts differ from source to source and end now and then."""
    config = dataclasses.replace(TOLD[name], tie_output=False, output=xa.nn.OutputConfig(bias=True))
    build = lambda rngs: RNNEncoderDecoder(config, rngs=rngs)  # noqa: E731
    params = oracle.random_params(build, seed=seed)
    for part in (params["decoder"]["cells"], params["encoder"]["layers"]):
        for path in xa.functional.flatten(part):
            if path.endswith("kernel"):
                *parents, last = path.split(".")
                functools.reduce(dict.__getitem__, parents, part)[last] *= 3.0
    params["output"]["table"] *= 2.0
    params["output"]["bias"][[0, 1]] = -100.0  # padding and the beginning are never said
    return build, params, config


@functools.cache
def searcher(name, **options):
    build, params, _ = talkative(name)
    search = lambda p: generate(  # noqa: E731
        xa.functional.bind(build, p), SOURCE, SEGMENTS, max_new_tokens=LENGTH, **options
    )
    return jax.device_get(jax.jit(search)(params))


def vectors(name, row, tokens):
    _, params, config = talkative(name)
    exact = rnn_oracle.in_float64(params)
    return rnn_oracle.vectors(exact, config, SOURCE[row, : SEGMENTS[row].sum()], tokens)[0]


def logits(name, hidden):
    output = talkative(name)[1]["output"]
    return hidden @ output["table"].astype(np.float64).T + output["bias"]


def next_log_p(name, row, tokens):
    return log_softmax(logits(name, vectors(name, row, (1, *tokens))[-1]))


def greedily(name, row):
    return plain_greedy(functools.partial(next_log_p, name, row), LENGTH)


@pytest.mark.parametrize("name", TOLD)
def test_it_says_greedily_what_a_plain_loop_says(name):
    found = searcher(name)
    said = [greedily(name, row) for row in range(BATCH)]
    assert [texts(found, row) for row in range(BATCH)] == [[text] for text in said]
    assert len(set(said)) > 1, "the source should matter"


@pytest.mark.parametrize("name", TOLD)
def test_its_beams_are_those_of_a_plain_beam_search(name):
    found = searcher(name, num_beams=4)
    for row in range(BATCH):
        expected = plain_beam_search(functools.partial(next_log_p, name, row), 4, LENGTH, 0.6)
        assert texts(found, row, 4) == [tokens for tokens, _ in expected]
        np.testing.assert_allclose(found.scores[row], [s for _, s in expected], rtol=1e-3)
    assert any(texts(found, row)[0] != greedily(name, row) for row in range(BATCH)), "beams matter"


def test_its_groups_of_beams_are_those_of_a_plain_diverse_search():
    found = searcher("luong, local-p", num_beams=4, num_beam_groups=2, diversity_penalty=2.0)
    for row in range(BATCH):
        log_p = functools.partial(next_log_p, "luong, local-p", row)
        expected = plain_groups(log_p, 2, 2, 2.0, LENGTH, 0.6)
        assert texts(found, row, 4) == [tokens for tokens, _ in expected]
        np.testing.assert_allclose(found.scores[row], [s for _, s in expected], rtol=1e-3)
    plain_beams = searcher("luong, local-p", num_beams=4)
    assert any(texts(found, row, 4) != texts(plain_beams, row, 4) for row in range(BATCH))


@pytest.mark.parametrize("name", ["bahdanau", "none"])
def test_it_draws_tokens_as_often_as_its_probabilities_say(name):
    rows, (build, params, _) = 4000, talkative(name)
    source, segments = (np.repeat(x[:1], rows, axis=0) for x in (SOURCE, SEGMENTS))
    draw = lambda p, key: generate(  # noqa: E731
        xa.functional.bind(build, p), source, segments, max_new_tokens=2, key=key
    )
    drawn = np.asarray(jax.jit(draw)(params, jax.random.key(0)).tokens[:, 0])
    first = np.exp(next_log_p(name, 0, ()))
    said = np.where(np.arange(V) == EOS, 0.0, first).argmax()
    second = np.exp(next_log_p(name, 0, (int(said),)))
    for tokens, p in ((drawn[:, 0], first), (drawn[drawn[:, 0] == said, 1], second)):
        counts, expected = np.bincount(tokens, minlength=V), len(tokens) * p
        assert len(tokens) > 300 and p.max() < 0.9, "there is something to draw"
        assert np.all(np.abs(counts - expected) <= 5 * np.sqrt(expected * (1 - p)) + 1)


def test_it_contrasts_what_a_plain_loop_does():
    found = searcher("bahdanau", candidates=K, alpha=0.5)
    for row in range(BATCH):
        expected = plain(
            functools.partial(vectors, "bahdanau", row),
            functools.partial(logits, "bahdanau"),
            0.5,
            (1,),
        )
        assert texts(found, row) == [expected[:LENGTH]]


def test_its_attention_is_captured_and_covered():
    found = searcher("bahdanau", num_beams=3, capture=Capture(), coverage=Coverage(0.2))
    assert found.weights.shape == (BATCH, 3, 1, 1, LENGTH, 6)
    close(found.weights[0, 0, 0, 0, : found.lengths[0, 0]].sum(-1), np.ones(found.lengths[0, 0]))
    assert not found.weights[1, ..., 4:].any(), "padding is not attended to"


def test_it_streams_in_buckets():
    build, params, _ = talkative("bahdanau")
    decode = Bucketed(build, batch_sizes=(4,), source_lengths=(8,), target_lengths=(8,))
    pieces = decode.stream(params, SOURCE, SEGMENTS, max_new_tokens=LENGTH, every=3)
    streamed = np.concatenate(list(pieces), axis=1)
    expected = searcher("bahdanau").tokens[:, 0, : streamed.shape[1]]
    np.testing.assert_array_equal(streamed, expected)


@pytest.mark.slow
def test_what_needs_more_than_its_states_have_is_refused_in_a_sentence():
    build, params, _ = talkative("bahdanau")
    model, draft = xa.functional.bind(build, params), PromptLookup(SOURCE, 2)
    read = dict(source=jnp.asarray(SOURCE), source_segment_ids=jnp.asarray(SEGMENTS))
    states = model.prefill(BATCH, 1, LENGTH + 2, **read)
    said = r"^speculative decoding .* wrong, but RecurrentStates has no rewind\(\); decode with no draft\.$"
    with pytest.raises(ValueError, match=said):
        speculative(model.decode_step, states, draft=draft, batch=BATCH, max_new_tokens=LENGTH)
    run = functools.partial(generate, model, **read, max_new_tokens=LENGTH)
    with pytest.raises(ValueError, match=r"RNNEncoderDecoder.prefill\(\) takes no lookahead; dec"):
        run(draft=draft)
    with pytest.raises(ValueError, match=r"RecurrentStates has no pad_left\(\); decode with pre"):
        run(prefix=[[1], [1, 4], [1, 5]])
    masked = functools.partial(model.decoder.decode, model.embed, jnp.zeros((BATCH, 1, 1), int))
    with pytest.raises(
        ValueError, match=r"^memory_masks was given, and a recurrent decoder has none"
    ):
        masked(states, memory_masks=lambda rows, context: {})
    large = bound(translator(decoder_layers=1))
    draft = ModelDraft(model.decode_step, lambda n: model.prefill(BATCH, 1, n, **read), 2)
    with pytest.raises(ValueError, match=r"RecurrentStates has no rewind\(\)"):
        generate(large, **read, max_new_tokens=LENGTH, draft=draft)
