"""A RETRO that retrieves as it goes: what it says through its caches is what whole texts give."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import crossattn as xa
from crossattn.nn import Encoded
from crossattn.train.sharding import MeshConfig, make_mesh, params_sharding
from tests import numpy_model as oracle
from tests.closeness import close
from tests.compiled import compiled
from tests.models.retro_oracle import logits as in_numpy

from .retro import Retro

V, D, CHUNK, K, R, T, BATCH = 24, 16, 3, 2, 5, 11, 2
RNG = np.random.default_rng(0)
KEYS = RNG.integers(3, V, (40, CHUNK)).astype(np.int32)  # chunks of a database,
TEXTS = RNG.integers(3, V, (40, R)).astype(np.int32)  # and what is retrieved for them
TEXTS[::3, 3:] = 0
TOKENS = RNG.integers(3, V, (BATCH, T)).astype(np.int32)


def build(rngs, **layout):
    return Retro(V, D, CHUNK, rngs=rngs, **layout)


PARAMS = oracle.random_params(build, seed=5)


def retrieve(chunks):
    """Neighbours [.. K R] of chunks [.. m]: those of the database's chunks with most tokens in common."""
    common = (chunks[..., None, :, None] == KEYS[:, None, :]).any(-1).sum(-1)
    return jnp.asarray(TEXTS)[jax.lax.top_k(common, K)[1]]


@jax.jit
def neighbours_of(tokens):
    B, C = len(tokens), tokens.shape[1] // CHUNK
    return retrieve(jnp.asarray(tokens)[:, : C * CHUNK].reshape(B, C, CHUNK))


@jax.jit
def whole(tokens, neighbours):
    return xa.apply(build, PARAMS, jnp.asarray(tokens), neighbours)


@functools.partial(jax.jit, static_argnames=("length", "layout"))
def written(params, prompt, length, layout=()):
    """Tokens [B length] and logits of each step, greedy; neighbours come at the end of each chunk."""
    model = xa.functional.bind(lambda rngs: build(rngs, **dict(layout)), params)
    given = jnp.pad(prompt, [(0, 0), (0, length - prompt.shape[1])])

    def step(carry, t):
        tokens, states = carry

        def look_up(states):
            chunk = jax.lax.dynamic_slice_in_dim(tokens, t + 1 - CHUNK, CHUNK, axis=1)
            return model.retrieved(states, t // CHUNK, chunk, retrieve(chunk))

        states = jax.lax.cond((t + 1) % CHUNK == 0, look_up, lambda states: states, states)
        logits, states = model.decode_step(tokens[:, None, t, None], states)
        said = logits[:, 0, 0].argmax(-1).astype(tokens.dtype)
        following = jnp.where(t + 1 < prompt.shape[1], tokens[:, t + 1], said)
        return (tokens.at[:, t + 1].set(following, mode="drop"), states), logits[:, 0, 0]

    states = model.prefill(len(prompt), 1, length, shape=(K, R))
    (tokens, _), logits = jax.lax.scan(step, (given, states), jnp.arange(length))
    return tokens, jnp.moveaxis(logits, 0, 1)


@pytest.mark.slow
def test_generating_with_retrieval_equals_whole_texts():
    prompt = jnp.asarray(TOKENS[:, :4])
    tokens, logits = written(PARAMS, prompt, T)
    text = np.pad(TOKENS[:, :4], [(0, 0), (0, T - 4)])  # what comes later changes nothing before
    for t in range(4, T):  # without a cache, neighbours of all chunks looked up anew
        text[:, t] = whole(text, neighbours_of(text))[:, t - 1].argmax(-1)
    np.testing.assert_array_equal(tokens, text)
    close(logits, whole(text, neighbours_of(text)), ulps=2000)
    without = whole(text, jnp.zeros_like(neighbours_of(text)))
    assert np.any(np.abs(without - logits)[:, CHUNK:] > 0.1), "neighbours matter"
    np.testing.assert_allclose(without[:, : CHUNK - 1], logits[:, : CHUNK - 1], atol=1e-4)


@pytest.mark.slow
def test_a_scanned_retro_retrieves_too():
    params, layers = dict(PARAMS), PARAMS["decoder"]["stack"]["layers"]
    period = {
        str(i): xa.nn.stack_layers({str(j): layers[str(2 * j + i)] for j in range(2)})
        for i in range(2)
    }
    params["decoder"] = PARAMS["decoder"] | {"stack": {"layers": period}}
    prompt = jnp.asarray(TOKENS[:, :4])
    tokens, logits = written(params, prompt, T, (("scan", True),))
    expected = written(PARAMS, prompt, T)
    np.testing.assert_array_equal(tokens, expected[0])
    close(logits, expected[1], ulps=1000)


def test_its_logits_are_those_of_the_equations():
    """Of passages with padding, and of a chunk without passages."""
    found = np.array(neighbours_of(TOKENS))
    found[0, 1] = 0
    assert (found[1] == 0).any(), "no passage has padding"
    expected = in_numpy(
        PARAMS,
        TOKENS,
        found,
        chunk=CHUNK,
        embed=lambda ids: oracle.embed(PARAMS["target_input"], ids, "sinusoidal"),
        table=PARAMS["output"]["table"],
        act="relu",
    )
    close(whole(TOKENS, found), expected, ulps=2000)


def test_a_token_depends_on_nothing_after_it():
    """Also through what is retrieved for its chunk."""
    before = whole(TOKENS, neighbours_of(TOKENS))
    for t in range(T):
        changed = TOKENS.copy()
        changed[:, t] = (changed[:, t] - 2) % (V - 3) + 3
        differs = np.any(whole(changed, neighbours_of(changed)) != before, axis=-1)
        np.testing.assert_array_equal(differs.argmax(-1), t)
    for chunk in range(T // CHUNK):
        changed = neighbours_of(TOKENS).at[:, chunk].add(-1)
        differs = np.any(whole(TOKENS, changed) != before, axis=-1)
        np.testing.assert_array_equal(differs.argmax(-1), (chunk + 1) * CHUNK - 1)


@pytest.mark.slow
@pytest.mark.parametrize("num_beams", [1, 2])
def test_rows_with_padding_that_go_back_read_the_chunks_of_their_own_text(num_beams):
    padding, J = np.array([0, 2]), num_beams
    own = [TOKENS[row, : T - 1 - pad] for row, pad in enumerate(padding)]
    given = np.stack([np.pad(text, (pad, 0)) for text, pad in zip(own, padding, strict=True)])
    given = jnp.repeat(jnp.asarray(given)[:, None], J, axis=1)
    read = [neighbours_of(text[None]) for text in own]

    @jax.jit
    def steps(params):
        model = xa.functional.bind(build, params)
        states = model.prefill(BATCH, J, T, shape=(K, R)).pad_left(jnp.asarray(padding))
        for chunk in range(3):  # row 1 has two; its third is padding, which nothing reads
            pairs = [
                (x[:, chunk] if chunk < x.shape[1] else jnp.zeros((1, K, R), int)) for x in read
            ]
            texts = [np.resize(text, 9)[chunk * CHUNK :][:CHUNK] for text in own]
            numbers = jnp.full((BATCH,), chunk)
            found = jnp.concatenate(pairs).astype(jnp.int32)
            states = model.retrieved(states, numbers, jnp.asarray(np.stack(texts)), found)
        first, states = model.decode_step(given[..., :6], states)
        _, ahead = model.decode_step(given[..., 6:9], states)
        back = ahead.rewind(jnp.array([6, 6]))
        second, _ = model.decode_step(given[..., 6:], back)
        return jnp.concatenate([first, second], axis=2)

    found = steps(PARAMS)
    for row, pad in enumerate(padding):
        text = np.pad(own[row], (0, pad))[None]  # what comes later changes nothing before
        expected = whole(text, neighbours_of(text))[0, : len(own[row])]
        for j in range(J):
            close(found[row, j, pad:], expected, ulps=2000)


def test_memories_that_come_later_are_held_to_those_of_the_states():
    model = xa.functional.bind(build, PARAMS)
    states = model.prefill(BATCH, 1, T, shape=(K, R))
    assert states.source_valid is None  # no one mask says what all tokens may read
    vectors = jnp.ones((BATCH, 1, K, R, D))
    for options, said in (
        (
            dict(chunk=3, neighbours=vectors),
            "^chunk is 3, and 1 are written; .* among the 3 of the",
        ),
        (
            dict(chunk=0, neighbours=vectors[:, :, :1]),
            r"keys of shape \(2, 1, 5, .*alike but for C",
        ),
        (dict(chunk=0, images=vectors), "^got the memory 'images', which no layer reads"),
    ):
        with pytest.raises(ValueError, match=said):
            model.decoder.reread(states, **options)
    bare = model.decoder.prefill(model.decoder.read(), BATCH, 1, T)
    with pytest.raises(
        ValueError, match="and the states nothing; .* give Encoded.empty to prefill"
    ):
        model.decoder.reread(bare, chunk=0, neighbours=vectors)


def test_a_whole_memory_is_replaced_by_one_of_another_length():
    config = xa.models.decoder.tiny(memory_dim=6)
    make = lambda rngs: xa.models.Decoder(config, rngs=rngs)  # noqa: E731
    model = xa.functional.bind(make, oracle.random_params(make))
    one, other = (jnp.asarray(RNG.normal(size=(BATCH, n, 6)), jnp.float32) for n in (4, 7))
    valid = jnp.arange(7) < jnp.array([[7], [2]])
    tokens = jnp.asarray(TOKENS[:, None])

    def decoded(model, one, other):
        _, states = model.decode_step(tokens[..., :0], model.prefill(BATCH, 1, T, memory=one))
        changed = model.decoder.reread(states, source=Encoded(other, valid))
        return model.decode_step(tokens, changed)[0][:, 0]

    expected = compiled(lambda m, x: m(tokens[:, 0], memory=Encoded(x, valid)), model, other)
    close(compiled(decoded, model, one, other), expected, ulps=1000)


@pytest.mark.slow
def test_every_parameter_learns_and_eight_devices_give_what_one_gives(in_production):
    tokens, mesh = np.resize(TOKENS, (4, T)), make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))

    def loss(params, tokens, neighbours):
        return jnp.sin(xa.apply(build, params, tokens, neighbours)).sum()

    places = params_sharding(PARAMS, xa.functional.logical_axes(build), mesh)
    split = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    inputs = (tokens, np.asarray(neighbours_of(tokens)))
    call = jax.jit(jax.value_and_grad(loss))
    there = call(jax.device_put(PARAMS, places), *jax.device_put(inputs, split))
    found, alone = (jax.device_get(x) for x in (there, call(PARAMS, *inputs)))
    size = max(np.abs(x).max() for x in jax.tree.leaves(alone))
    close(found, alone, ulps=1000, size=size)
    for path, leaf in xa.functional.flatten(alone[1]).items():
        assert path.endswith("key.bias") or np.any(leaf), path
