"""The attention-sum reader holds to Kadlec et al., and no place sees the token that stands there."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.models import AttentionSumReader, attention_sum_reader
from crossattn.nn.copying import FLOOR
from tests import numpy_model as oracle
from tests.closeness import close
from tests.models import rnn_oracle

V, B, S, T = 16, 3, 7, 5
RNG = np.random.default_rng(0)
SOURCE = RNG.integers(3, 9, (B, S)).astype(np.int32)  # few kinds, so that tokens repeat
TARGET = RNG.integers(3, V, (B, T)).astype(np.int32)
SEGMENTS = (np.arange(S) < np.array([[7], [4], [5]])).astype(np.int32)
MAY = RNG.random((B, S)) < 0.6
small = functools.partial(attention_sum_reader.tiny, vocab_size=V)
CONFIGS = {
    "gru": small(),
    "lstm, general": small(cell="lstm", score="general", embedding_dim=12),
}


@functools.cache
def model_of(name):
    build = lambda rngs: AttentionSumReader(CONFIGS[name], rngs=rngs)  # noqa: E731
    return build, oracle.random_params(build)


@functools.cache
def program(build, weights=False):
    return jax.jit(functools.partial(xa.apply, build, return_weights=weights))


def apply(name, source, target, weights=False, **given):
    build, params = model_of(name)
    return program(build, weights)(params, source, target, **given)


def surroundings(p, config, tokens):
    """What stands around each token of a text [S D]: states before it, and from the end after it."""
    size = config.embedding_dim or config.dim
    x = p["input"]["embedding"]["table"][tokens] * size**0.5
    found = []
    for direction in (0, 1):
        own = p["cells"][str(direction)]
        state = np.zeros((1 + (config.cell == "lstm"), config.dim // 2))
        vectors = []
        for one in x[::-1] if direction else x:
            vectors.append(state[0])
            state = rnn_oracle.cell(own, state, one)
        found.append(vectors[::-1] if direction else vectors)
    return np.concatenate(found, axis=-1)


def read(p, config, passage, question, may):
    """p [T V] of a passage and a question, one place after the other."""
    keys, found = surroundings(p, config, passage), np.zeros((len(question), V))
    if config.score == "general":
        keys = keys @ p["attention"]["key"]["kernel"]
    for t, query in enumerate(surroundings(p, config, question)):
        scores = np.where(may, keys @ query, -np.inf)
        for weight, token in zip(oracle.softmax(scores), passage, strict=True):
            found[t, token] += weight
    return (1 - FLOOR) * found + FLOOR / V


def wanted(p, config):
    """log p [B T V] of all."""
    each = []
    for b in range(B):
        n = SEGMENTS[b].sum()
        each.append(read(p, config, SOURCE[b, :n], TARGET[b], MAY[b, :n]))
    return np.log(each)


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_the_equations_with_their_gradients(name):
    (build, params), config = model_of(name), CONFIGS[name]
    exact = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    given = dict(candidates=MAY, source_segment_ids=SEGMENTS)
    assert (MAY & (SEGMENTS > 0)).any(1).all()
    close(apply(name, SOURCE, TARGET, **given), wanted(exact, config), ulps=4000)
    factors = RNG.normal(size=(B, T, V))

    def total(params, source, target, given):
        return (jnp.exp(xa.apply(build, params, source, target, **given)) * factors).sum()

    gradient = jax.device_get(jax.jit(jax.grad(total))(params, SOURCE, TARGET, given))
    for seed in range(3):
        rng = np.random.default_rng(seed)
        way = jax.tree.map(lambda x, rng=rng: rng.normal(size=x.shape), exact)
        moved = [jax.tree.map(lambda x, d, h=h: x + h * d, exact, way) for h in (1e-6, -1e-6)]
        ahead, back = ((np.exp(wanted(p, config)) * factors).sum() for p in moved)
        terms = [(g * d).sum() for g, d in zip(*map(jax.tree.leaves, (gradient, way)), strict=True)]
        np.testing.assert_allclose(
            sum(terms), (ahead - back) / 2e-6, atol=1e-4 * np.abs(terms).sum()
        )


def test_pointing_is_the_summed_weights_of_attend():
    build, params = model_of("gru")
    model = xa.functional.bind(build, params)
    encode = jax.jit(lambda tokens: model.encode(tokens).vectors[..., None, :])
    keys, queries = encode(SOURCE), encode(TARGET)
    mask = MAY[:, None, None, :]
    _, weights = xa.attend(queries, keys, keys, mask, scale=1.0, return_weights=True)
    log_p, own = apply("gru", SOURCE, TARGET, weights=True, candidates=MAY)
    np.testing.assert_allclose(own[0], weights, atol=1e-5)
    summed = np.zeros((B, T, V))
    for b, i in np.ndindex(B, S):
        summed[b, :, SOURCE[b, i]] += weights[b, 0, :, i]
    np.testing.assert_allclose(np.exp(log_p), (1 - FLOOR) * summed + FLOOR / V, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_stands_at_a_place_moves_the_outputs_of_all_others(name):
    before = apply(name, SOURCE, TARGET)
    for place in range(T):
        changed = TARGET.copy()
        changed[:, place] = 3 + (TARGET[:, place] - 2) % (V - 3)
        moved = np.abs(apply(name, SOURCE, changed) - before).max((0, 2))
        assert moved[place] == 0
        assert (np.delete(moved, place) > 0).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_texts_in_a_row_are_as_alone(name):
    """Also between padding; a question reads the passage of its own number."""
    one, two = (
        dict(source=SOURCE[1:2, :4], target=TARGET[1:2]),
        dict(source=SOURCE[:1], target=TARGET[:1, :3]),
    )
    padding = np.full((1, 2), 5, np.int32)
    source = np.concatenate([padding, one["source"], two["source"], padding], 1)
    target = np.concatenate([one["target"], padding, two["target"]], 1)
    found = apply(
        name,
        source,
        target,
        source_segment_ids=np.array([[0, 0, *[1] * 4, *[2] * S, 0, 0]], np.int32),
        target_segment_ids=np.array([[*[1] * T, 0, 0, *[2] * 3]], np.int32),
    )
    close(found[:, :T], apply(name, **one), ulps=4000)
    close(found[:, -3:], apply(name, **two), ulps=4000)


def test_without_candidates_all_tokens_are_alike():
    log_p = apply("gru", SOURCE, TARGET, candidates=np.zeros((B, S), bool))
    np.testing.assert_allclose(log_p, -np.log(V), rtol=1e-5)


def test_equal_surroundings_are_found_before_anything_is_learnt():
    """A blank between the words around a name points at that name, for nearly all of 64 drawn models."""
    passage = np.array([[20, 21, 3, 22, 23, 24, 4, 25, 26, 27, 5, 28]], np.int32)
    question = np.array([[23, 24, 9, 25, 26]], np.int32)
    build = lambda rngs: AttentionSumReader(attention_sum_reader.tiny(), rngs=rngs)  # noqa: E731

    @jax.jit
    @jax.vmap
    def said(key):
        texts = jnp.asarray(passage), jnp.asarray(question)
        log_p = xa.apply(build, xa.init(build, key), *texts, candidates=texts[0] < 6)
        return log_p[0, 2].argmax()

    assert (said(jax.random.split(jax.random.key(0), 64)) == 4).mean() > 0.9


def test_an_odd_size_is_refused():
    config = dataclasses.replace(small(), dim=31)
    with pytest.raises(ValueError, match="dim is 31; two directions expect an even number"):
        xa.init(lambda rngs: AttentionSumReader(config, rngs=rngs), jax.random.key(0))


def test_a_padding_token_is_no_part_of_a_passage():
    config = small(pad_id=0)
    build, params = (lambda rngs: AttentionSumReader(config, rngs=rngs)), model_of("gru")[1]
    padded = np.pad(SOURCE, ((0, 0), (0, 3)))
    found = program(build)(params, padded, TARGET)
    close(found, apply("gru", SOURCE, jnp.asarray(TARGET)), ulps=4000)
