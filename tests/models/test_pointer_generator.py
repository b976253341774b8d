"""The pointer-generator holds to See et al.'s equations, sums to 1, and copies no padding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.models import PointerGenerator, Transformer, pointer_generator, transformer
from tests import numpy_model as oracle
from tests.closeness import close
from tests.compiled import compiled

V, B, S, T = 16, 3, 6, 5
RNG = np.random.default_rng(0)
SOURCE = RNG.integers(3, 9, (B, S)).astype(np.int32)  # few kinds, so that tokens repeat
TARGET = RNG.integers(3, V, (B, T)).astype(np.int32)
LABELS = np.concatenate([SOURCE[:, :2], RNG.integers(9, V, (B, T - 2))], 1).astype(np.int32)
SEGMENTS = (np.arange(S) < np.array([[6], [4], [5]])).astype(np.int32)
small = functools.partial(pointer_generator.tiny, vocab_size=V)
CONFIGS = {
    "one head": small(),
    "all heads, own table": small(copy_heads=None, tie_output=False),
}


@functools.cache
def model_of(name):
    build = lambda rngs: PointerGenerator(CONFIGS[name], rngs=rngs)  # noqa: E731
    return build, oracle.random_params(build)


@functools.cache
def program(build):
    """The same function each time, whose programs are made once."""
    return jax.jit(functools.partial(xa.apply, build))


def apply(build, params, source, target, **given):
    return program(build)(params, source, target, **given)


def in_float64(params):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


def mixture(p, config, source, target, valid):
    """log p [B T V] and the weights that point [B T S], in float64 numpy, one token after the other."""
    may_read = (valid > 0)[:, None, :]
    x = oracle.embed(p["target_input"], source, "sinusoidal")
    m = oracle.norm(p["encoder_norm"], oracle._layers(p["encoder"], x, allowed=may_read))
    x = oracle.embed(p["target_input"], target, "sinusoidal")
    blocks, causal = p["decoder"]["stack"]["layers"], np.tri(target.shape[1], dtype=bool)
    for i in range(len(blocks)):
        q = blocks[str(i)]
        itself = {"attention": q["attention"], "attention_residual": q["attention_residual"]}
        x = oracle.block(itself, x, allowed=causal)
        y = oracle.norm(q["cross_residual"]["norm"], x)
        read, weights = oracle.attention(q["cross"], y, m, may_read)
        x = x + read
        x = oracle.residual(
            q["feedforward_residual"],
            x,
            lambda y, q=q: oracle.feedforward(q["feedforward"], y),
            True,
        )
    s = oracle.norm(p["decoder"]["norm"], x)
    a = weights[:, : config.copy_heads].mean(1)
    head, e = p.get("output", {}), oracle.embed(p["target_input"], target, None)
    found = np.zeros((*target.shape, V))
    for b in range(len(target)):
        for t in range(target.shape[1]):
            table = head.get("tokens", p["target_input"]["embedding"])["table"]
            p_vocab = oracle.softmax(table @ s[b, t])
            gate = head["of_source"]["kernel"][:, 0] @ (a[b, t] @ m[b])
            gate += head["of_vector"]["kernel"][:, 0] @ s[b, t] + head["of_vector"]["bias"][0]
            gate += head["of_input"]["kernel"][:, 0] @ e[b, t]
            p_gen = 1 / (1 + np.exp(-gate))
            found[b, t] = p_gen * p_vocab
            for i, token in enumerate(source[b]):
                found[b, t, token] += (1 - p_gen) * a[b, t, i]
    return np.log(found), a


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_the_equations_with_their_gradients(name):
    (build, params), config = model_of(name), CONFIGS[name]
    exact = in_float64(params)
    wanted, _ = mixture(exact, config, SOURCE, TARGET, SEGMENTS)
    given = dict(source_segment_ids=jnp.asarray(SEGMENTS))

    @jax.jit
    def both(params):
        def loss(params):
            model = xa.functional.bind(build, params)
            hidden, _ = model.hidden(jnp.asarray(SOURCE), jnp.asarray(TARGET), **given)
            nll, correct = model.losses(hidden, jnp.asarray(LABELS), chunks=5)
            return nll.sum(), (nll, correct, model.logits(hidden))

        return jax.value_and_grad(loss, has_aux=True)(params)

    (_, (nll, correct, log_p)), gradient = jax.device_get(both(params))
    close(log_p, wanted, ulps=2000)
    close(nll, -np.take_along_axis(wanted, LABELS[..., None], -1)[..., 0], ulps=2000)
    np.testing.assert_array_equal(correct, wanted.argmax(-1) == LABELS)

    def total(p):
        found, _ = mixture(p, config, SOURCE, TARGET, SEGMENTS)
        return -np.take_along_axis(found, LABELS[..., None], -1).sum()

    for seed in range(3):
        rng = np.random.default_rng(seed)
        way = jax.tree.map(lambda x, rng=rng: rng.normal(size=x.shape), exact)
        ahead, back = (
            total(jax.tree.map(lambda x, d, h=h: x + h * d, exact, way)) for h in (1e-6, -1e-6)
        )
        terms = [(g * d).sum() for g, d in zip(*map(jax.tree.leaves, (gradient, way)), strict=True)]
        np.testing.assert_allclose(
            sum(terms), (ahead - back) / 2e-6, atol=1e-4 * np.abs(terms).sum()
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_the_distribution_over_the_vocabulary_sums_to_one_also_where_nothing_can_be_read(name):
    build, params = model_of(name)
    segments = np.concatenate([SEGMENTS[:2], np.zeros((1, S), np.int32)])
    log_p = apply(build, params, SOURCE, TARGET, source_segment_ids=segments)
    np.testing.assert_allclose(np.exp(log_p).sum(-1), 1, rtol=1e-5)


@pytest.mark.slow
def test_padding_is_never_copied():
    """Neither its token nor its vector reaches a probability; in packed rows neither do other texts."""
    build, params = model_of("one head")
    run = functools.partial(apply, build)
    given = dict(source_segment_ids=SEGMENTS[1:2])
    alone = run(params, SOURCE[1:2, :4], TARGET[1:2])
    for token in (9, 15):  # which no source has
        padded = SOURCE[1:2].copy()
        padded[0, 4:] = token
        close(run(params, padded, TARGET[1:2], **given), alone, ulps=2000)
    packed = dict(
        source_segment_ids=np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2, 2]], np.int32),
        source_positions=np.array([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]], np.int32),
        target_segment_ids=np.array([[1] * T + [2] * T], np.int32),
        target_positions=np.array([[*range(T), *range(T)]], np.int32),
    )
    source = np.concatenate([SOURCE[1:2, :4], SOURCE[:1]], 1)
    both = run(params, source, np.concatenate([TARGET[1:2], TARGET[:1]], 1), **packed)
    close(both[:, :T], alone, ulps=2000)


def test_without_copying_it_is_a_transformer():
    """p_gen is 1 where the gate is large: the same parameters give the Transformer's probabilities."""
    build, params = model_of("one head")
    params = jax.tree.map(np.copy, params)
    params["output"]["of_vector"]["bias"] += 1e4
    plain = {name: x for name, x in params.items() if name != "output"}
    config = transformer.tiny(vocab_size=V)
    logits = apply(lambda rngs: Transformer(config, rngs=rngs), plain, SOURCE, TARGET)
    found = apply(build, params, SOURCE, TARGET)
    close(found, jax.nn.log_softmax(logits), ulps=2000)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            dict(source_vocab_size=9),
            "source_vocab_size is 9; a token that is copied is one of the target's",
        ),
        (dict(copy_heads=3), "copy_heads is 3; the decoder's layers have 2 heads"),
    ],
)
def test_what_it_cannot_copy_from_is_refused(changes, said):
    config = dataclasses.replace(small(), **changes)
    with pytest.raises(ValueError, match=said):
        xa.init(lambda rngs: PointerGenerator(config, rngs=rngs), jax.random.key(0))


def test_it_has_no_table_and_chunks_divide_the_text():
    build, params = model_of("one head")
    model = xa.functional.bind(build, params)
    hidden = compiled(lambda model, *texts: model.hidden(*texts)[0], model, SOURCE, TARGET)
    for call in (model.output_table, lambda: model.output_product(hidden)):
        with pytest.raises(ValueError, match="a mixture, not a product with a table"):
            call()
    with pytest.raises(ValueError, match="chunks is 3; expected a divisor of the length, 5"):
        model.losses(hidden, jnp.asarray(LABELS), chunks=3)
    with pytest.raises(ValueError, match="source has 3 rows"):
        model.prefill(2, 1, 4, source=jnp.asarray(SOURCE))
