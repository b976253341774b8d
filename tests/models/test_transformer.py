"""Encoder-decoders and decoders: equal to numpy, exactly causal, blind to padding and to pack neighbours."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.models import Decoder, EncoderDecoder, Transformer, decoder, encoder_decoder
from crossattn.models.transformer import tiny
from tests import numpy_model as oracle

RNG = np.random.default_rng(0)
SOURCE, TARGET = RNG.integers(3, 64, (2, 6)), RNG.integers(3, 64, (2, 5))
BLOCK = tiny().block
SHALLOW = dict(encoder_layers=1, decoder_layers=1)


LANGUAGE = decoder.tiny()
MODELS = {type(tiny()): Transformer, type(LANGUAGE): Decoder}


@functools.cache
def build(config):
    """One build for a config, whose abstract module is made once."""
    model = MODELS.get(type(config), EncoderDecoder)
    return lambda rngs: model(config, rngs=rngs)


def with_block(changes, **others):
    return tiny(block=BLOCK.changed(**changes), **SHALLOW, **others)


def forward(config):
    """A jitted forward pass and random parameters for it."""
    params = oracle.random_params(build(config))
    return jax.jit(lambda *a, **k: xa.apply(build(config), params, *a, **k)), params


def segments(*lengths, size):
    return (np.arange(size) < np.array(lengths)[:, None]).astype(np.int32)


@pytest.mark.parametrize(
    "config",
    [
        tiny(),
        tiny(**SHALLOW, tie_output=False, source_vocab_size=70, positions="learned", max_length=8),
        with_block({"norm_first": False, "activation": "gelu"}),
        with_block(
            {"norm": "rms", "activation": "swiglu", "use_bias": False, "num_kv_heads": 1},
            positions="rope",
        ),
        with_block({"qk_norm": True}, positions="none"),
    ],
    ids=[
        "sinusoidal",
        "learned, untied, two vocabularies",
        "post-norm",
        "rope, rms, gated",
        "none",
    ],
)
def test_the_whole_model_equals_numpy(config):
    run, params = forward(config)
    source_segment_ids = segments(6, 4, size=6)
    logits = run(SOURCE, TARGET, source_segment_ids=source_segment_ids)
    expected = oracle.transformer(
        params,
        SOURCE,
        TARGET,
        source_segment_ids > 0,
        positions=config.positions,
        first=config.block.norm_first,
        act=config.block.mlp.activation,
    )
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
    own = {"output", "source_input"}
    assert params.keys() & own == (set() if config.tie_output else own)


@pytest.mark.parametrize(
    "config",
    [
        LANGUAGE,
        decoder.tiny(layers=1, positions="rope", tie_output=False),
        decoder.tiny(layers=1, block=LANGUAGE.block.changed(norm_first=False)),
    ],
    ids=["learned, tied", "rope, untied", "post-norm"],
)
def test_a_whole_language_model_equals_numpy(config):
    run, params = forward(config)
    options = dict(positions=config.positions, first=config.block.norm_first, act="gelu")
    expected = oracle.decoder(params, TARGET, **options)
    np.testing.assert_allclose(run(TARGET), expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["transformer", "decoder"])
def test_a_changed_target_token_moves_no_output_before_it(name):
    if name == "decoder":
        call, _ = forward(LANGUAGE)
    else:
        run, _ = forward(tiny())
        call = lambda target: run(  # noqa: E731
            SOURCE,
            target,
            source_segment_ids=segments(6, 6, size=6),
            target_segment_ids=segments(5, 5, size=5),
        )
    before = np.asarray(call(TARGET))
    for j in range(TARGET.shape[1]):
        changed = TARGET.copy()
        changed[:, j] = (changed[:, j] + 1) % 64
        after = np.asarray(call(changed))
        np.testing.assert_array_equal(after[:, :j], before[:, :j])
        assert np.all(np.any(after[:, j:] != before[:, j:], axis=-1))


@pytest.mark.parametrize("positions", ["sinusoidal", "relative"])
def test_more_padding_changes_no_logits_of_real_tokens(positions):
    run, _ = forward(tiny(**SHALLOW, positions=positions))

    def padded(extra, filler):
        def pad(tokens):
            return np.pad(tokens, [(0, 0), (0, extra)], constant_values=filler)

        return run(
            pad(SOURCE),
            pad(TARGET),
            source_segment_ids=segments(6, 4, size=6 + extra),
            target_segment_ids=segments(5, 3, size=5 + extra),
        )

    short, long, other = padded(0, 0), padded(3, 0), padded(3, 9)
    for row, length in ((0, 5), (1, 3)):
        np.testing.assert_allclose(long[row, :length], short[row, :length], rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(long[row, :length], other[row, :length])


def test_source_padding_is_masked_also_when_the_target_has_no_segments():
    run, _ = forward(tiny())
    ignored = SOURCE.copy()
    ignored[1, 4:] = 9
    valid = segments(6, 4, size=6)
    np.testing.assert_array_equal(
        run(SOURCE, TARGET, source_segment_ids=valid),
        run(ignored, TARGET, source_segment_ids=valid),
    )


@pytest.mark.parametrize("name", ["sinusoidal", "rope", "relative", "alibi", "pair"])
def test_packed_examples_equal_the_same_examples_alone(name):
    pair = name == "pair"
    run, _ = forward(encoder_decoder.tiny() if pair else tiny(**SHALLOW, positions=name))
    sources, targets = [SOURCE[0, :4], SOURCE[1, :3]], [TARGET[0, :2], TARGET[1]]

    def pack(examples):
        """One row of 8: the examples, then padding."""
        tokens = np.concatenate([*examples, np.zeros(8 - sum(map(len, examples)), int)])
        numbers = np.zeros(8, np.int32)
        places, start = np.zeros(8, np.int32), 0
        for number, example in enumerate(examples, 1):
            numbers[start : start + len(example)] = number
            places[start : start + len(example)] = np.arange(len(example))
            start += len(example)
        return tokens[None], numbers[None], places[None]

    def call(sources, targets):
        source, source_segment_ids, source_positions = pack(sources)
        target, target_segment_ids, target_positions = pack(targets)
        return run(
            source,
            target,
            source_segment_ids=source_segment_ids,
            target_segment_ids=target_segment_ids,
            source_positions=source_positions,
            target_positions=target_positions,
        )[0]

    packed = call(sources, targets)
    for source, target, start in zip(sources, targets, (0, 2), strict=True):
        alone = call([source], [target])
        np.testing.assert_allclose(
            packed[start : start + len(target)], alone[: len(target)], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("positions", ["learned", "relative"])
def test_packed_texts_of_a_language_model_equal_the_same_texts_alone(positions):
    run, _ = forward(decoder.tiny(layers=1, positions=positions))
    text, numbers, places = TARGET[:1], np.array([[1, 1, 2, 2, 0]]), np.array([[0, 1, 0, 1, 0]])
    packed = run(text, segment_ids=numbers, positions=places)
    for start in (0, 2):
        alone = run(text[:, start : start + 2])
        np.testing.assert_allclose(packed[:, start : start + 2], alone, rtol=1e-4, atol=1e-4)


def test_returned_weights_are_a_distribution_over_real_source_tokens():
    model = xa.functional.bind(build(tiny()), oracle.random_params(build(tiny())))
    packs = dict(
        source_segment_ids=segments(6, 4, size=6), target_segment_ids=segments(5, 3, size=5)
    )
    read = jax.jit(lambda *tokens, **packs: model(*tokens, **packs, return_weights=True))
    _, weights = read(SOURCE, TARGET, **packs)
    weights = np.asarray(weights)
    assert weights.shape == (2, 2, 2, 5, 6)  # [L, B, N, T, S]
    np.testing.assert_allclose(weights[:, 0].sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(weights[:, 1, :, :3].sum(-1), 1, rtol=1e-5)
    assert not weights[:, 1, :, :, 4:].any()
    assert not weights[:, 1, :, 3:].any()


@pytest.mark.slow
def test_every_parameter_gets_a_gradient_where_layers_are_scanned():
    own = dict(positions="relative", tie_output=False, source_vocab_size=50)
    config = tiny(encoder_layers=1, scan=True, **own)
    params = oracle.random_params(build(config))

    def loss(params):
        logits = xa.apply(build(config), params, jnp.asarray(SOURCE % 50), jnp.asarray(TARGET))
        return -jax.nn.log_softmax(logits)[..., 3].mean()

    gradients = jax.jit(jax.grad(loss))(params)
    for path, gradient in jax.tree.leaves_with_path(gradients):
        name = jax.tree_util.keystr(path)
        if name.endswith("['key']['bias']"):  # softmax does not see it
            continue
        per_layer = gradient if "layers" in name else gradient[None]
        assert all(np.any(g != 0) for g in per_layer), name


@pytest.mark.parametrize(
    "config",
    [
        tiny(),
        tiny(scan=True, positions="relative"),
        tiny(tie_output=False, source_vocab_size=50, positions="learned"),
        LANGUAGE,
    ],
    ids=["looped", "scanned", "untied", "decoder"],
)
def test_every_axis_of_every_parameter_has_a_logical_name(config):
    shapes = jax.eval_shape(lambda: xa.init(build(config), jax.random.key(0)))
    axes = xa.functional.logical_axes(build(config))
    known = {"vocab", "embed", "heads", "kv_heads", "head_dim", "mlp", "layers", "norm", None}

    def check(shape, names):
        assert isinstance(names, tuple) and len(names) == len(shape.shape)
        assert set(names) <= known
        size = {"vocab": {64, 50}, "embed": {32}, "mlp": {64}, "heads": {2}, "head_dim": {16}}
        for name, n in zip(names, shape.shape, strict=True):
            assert name not in size or n in size[name]

    is_axes = lambda x: isinstance(x, tuple)  # noqa: E731
    jax.tree.map(check, shapes, axes, is_leaf=lambda x: is_axes(x) or hasattr(x, "shape"))


@pytest.mark.parametrize("scan", [False, True], ids=["looped", "scanned"])
def test_the_parameter_count_is_the_closed_form(scan):
    D, F, V, L = 32, 64, 64, 2
    attention, feedforward, norm = 4 * (D * D + D), 2 * D * F + F + D, 2 * D
    encoder = L * (attention + feedforward + 2 * norm) + norm
    decoder = L * (2 * attention + feedforward + 3 * norm) + norm
    config = tiny(scan=scan)
    shapes = jax.eval_shape(lambda: xa.init(build(config), jax.random.key(0)))
    assert xa.functional.count(shapes) == V * D + encoder + decoder
    shapes = xa.functional.shapes(build(LANGUAGE))  # has 64 learned positions too
    assert xa.functional.count(shapes) == (V + 64) * D + encoder


def test_dropout_needs_a_key_and_repeats_with_it():
    config = with_block({"dropout_rate": 0.3, "attention_dropout_rate": 0.3})
    run, params = forward(config)
    still = oracle.transformer(params, SOURCE, TARGET, np.ones(SOURCE.shape, bool))
    np.testing.assert_allclose(run(SOURCE, TARGET), still, rtol=1e-3, atol=1e-2)
    first, second = (run(SOURCE, TARGET, key=jax.random.key(i)) for i in (0, 1))
    assert not np.allclose(first, second)
    np.testing.assert_array_equal(first, run(SOURCE, TARGET, key=jax.random.key(0)))
