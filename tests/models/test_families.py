"""Whisper, BERT and decoders: constants that are not trained, heads, and what they refuse.

That they compute what their papers' models compute is for ``tests/weights/test_parity.py``.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import crossattn as xa
from crossattn.models import Bert, Decoder, Whisper, bert, decoder, whisper
from crossattn.nn import OutputConfig
from crossattn.train.optim import OptimConfig, make_optimizer
from tests import numpy_model as oracle

RNG = np.random.default_rng(0)
TOKENS = jnp.asarray(RNG.integers(3, 64, (2, 5)))
FRAMES = jnp.asarray(RNG.normal(size=(2, 12, 8)), jnp.float32)
PRESENT = jnp.asarray([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def bound(model, config):
    build = lambda rngs: model(config, rngs=rngs)  # noqa: E731
    return xa.functional.bind(build, oracle.random_params(build))


def test_fewer_frames_are_fine_and_too_many_are_refused(in_production):
    module = bound(Whisper, whisper.tiny())
    assert jax.jit(module.encode)(FRAMES).vectors.shape == (2, 6, 32)
    with pytest.raises(ValueError, match="42 frames; this model reads at most 40"):
        module.encode(jnp.zeros((1, 42, 8)))


@pytest.fixture(scope="module")
def source_input():
    """Parameters, gradients, logical axes and trained parameters of a Whisper's source input."""
    build = lambda rngs: Whisper(whisper.tiny(), rngs=rngs)  # noqa: E731
    loss = lambda params: jnp.sum(xa.apply(build, params, FRAMES, TOKENS) ** 2)  # noqa: E731
    params = oracle.random_params(build)
    trees = params, jax.jit(jax.grad(loss))(params)
    trees += xa.functional.logical_axes(build), xa.functional.trainable(build)
    return [tree["source_input"] for tree in trees]


def test_the_sinusoids_of_whisper_are_not_trained(source_input):
    _, grads, _, _ = source_input
    assert not np.any(grads["positions"]["table"])
    assert np.any(grads["first"]["kernel"])


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion", "muon", "sgd", "optax"])
def test_the_sinusoids_of_whisper_are_not_decayed(name, source_input):
    params, grads, axes, trainable = source_input
    if name == "optax":
        optimizer = optax.adamw(0.1, weight_decay=0.5, mask=trainable)
    else:
        config = OptimConfig(name, 0.1, "constant", weight_decay=0.5)
        optimizer, _ = make_optimizer(config, 10, axes)

    @jax.jit
    def step(params):
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    before, after = (xa.functional.flatten(p) for p in (params, step(params)))
    same = {path for path in before if np.array_equal(before[path], after[path])}
    assert same == {"positions.table"}


def test_an_optimiser_of_flax_does_not_see_the_sinusoids_and_params_have_them():
    module = whisper.FrameInput(whisper.tiny(), rngs=nnx.Rngs(0))
    seen = {".".join(path) for path, _ in nnx.to_flat_state(nnx.state(module, nnx.Param))}
    params = xa.functional.flatten(xa.functional.params_of(module))
    assert params.keys() - seen == {"positions.table"}
    np.testing.assert_allclose(params["positions.table"][0], np.repeat([0, 1], 16))


@pytest.mark.slow
def test_padding_changes_no_vector_of_a_real_token():
    module = bound(Bert, bert.tiny(pooler=True, next_sentence=True))
    encode = jax.jit(lambda *given: module.encode(*given).vectors)
    whole, padded = encode(TOKENS[1:, :3]), encode(TOKENS[1:], PRESENT[1:])
    np.testing.assert_allclose(padded[:, :3], whole, rtol=1e-4, atol=1e-5)
    assert module.follows(whole).shape == (1, 2)
    typed, plain = jax.jit(lambda: (module(TOKENS, types=PRESENT), module(TOKENS)))()
    assert np.any(typed != plain)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(TOKENS), "no masked_lm; set masked_lm=True"),
        (lambda m: m.pooled(m.encode(TOKENS).vectors), "no pooler; set pooler=True"),
    ],
)
def test_a_head_that_is_not_there_is_named(call, message):
    module = bound(Bert, bert.tiny(masked_lm=False))
    with pytest.raises(ValueError, match=message):
        call(module)


def test_a_decoder_says_whether_it_reads():
    alone, reader = (bound(Decoder, decoder.tiny(memory_dim=m)) for m in (None, 8))
    with pytest.raises(ValueError, match="has no memory_dim, but was given one"):
        alone(TOKENS, memory=FRAMES)
    with pytest.raises(ValueError, match="has a memory_dim, but was given none"):
        reader(TOKENS)
    read = jax.jit(lambda: reader(TOKENS, memory=FRAMES, return_weights=True))
    logits, weights = read()
    assert logits.shape == (2, 5, 64)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)


def test_a_table_with_a_bias_beside_it_is_not_given_to_losses():
    module = bound(Decoder, decoder.tiny(output=OutputConfig(bias=True)))
    with pytest.raises(ValueError, match="has a bias"):
        module.output_table()
