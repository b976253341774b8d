"""The all-attention decoder, a ``Decoder`` by its config alone: persistent vectors in place of feed-forward.

Source: Sukhbaatar et al. 2019, "Augmenting Self-attention with Persistent Memory".
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import crossattn as xa
from crossattn.decode import PromptLookup, generate
from crossattn.models import Decoder, decoder
from crossattn.nn import BlockConfig
from crossattn.train.sharding import MeshConfig, make_mesh, params_sharding
from tests import numpy_model as oracle
from tests.closeness import close
from tests.decode.markov import log_softmax, plain_beam_search, plain_greedy, texts

V, T, LENGTH, ROWS = 16, 6, 5, 2
TOKENS = np.random.default_rng(0).integers(3, V, (ROWS, 3, T)).astype(np.int32)
PROMPTS = [[4, 9, 5], [7]]


def all_attention(**options):
    """A build of two layers of attention to the text and to five vectors, and nothing else."""
    block = BlockConfig.of(dim=12, num_heads=2, mlp_dim=None, num_persistent=5)
    config = decoder.tiny(vocab_size=V, block=block, **options)
    return lambda rngs: Decoder(config, rngs=rngs)


BUILD = all_attention()
PARAMS = oracle.random_params(BUILD, seed=3)
PARAMS["input"]["embedding"]["table"][:2] = 0
PARAMS["input"]["embedding"]["table"] *= 3


def whole(tokens):
    return oracle.decoder(PARAMS, np.asarray(tokens))


def test_it_equals_numpy_and_has_no_other_parameters():
    layer = PARAMS["decoder"]["stack"]["layers"]["0"]
    assert set(layer) == {"attention", "attention_residual"}
    tokens = jnp.asarray(TOKENS.reshape(-1, T))
    found = jax.jit(lambda p: xa.apply(BUILD, p, tokens))(PARAMS)
    close(found, whole(tokens), ulps=1000)


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["rope", "relative"])
@pytest.mark.parametrize("scan", [False, True])
def test_beams_that_go_on_from_one_another_and_go_back_equal_the_whole(positions, scan):
    build = all_attention(positions=positions, scan=scan)
    params, parents = oracle.random_params(build), np.array([[2, 0, 0], [1, 1, 2]])

    def both(params):
        model = xa.functional.bind(build, params)
        states = model.prefill(ROWS, 3, T + 2).pad_left(jnp.array([0, 1]))
        _, states = model.decode_step(jnp.asarray(TOKENS[..., :4]), states)
        states = states.select(jnp.asarray(parents))
        _, states = model.decode_step(jnp.asarray(TOKENS[..., 4:]), states)
        states = states.rewind(jnp.array([5, 4]))
        stepped, _ = model.decode_step(jnp.asarray(TOKENS[..., :2]), states)
        past = np.take_along_axis(TOKENS[..., :4], parents[..., None], axis=1)
        text = np.concatenate([past, TOKENS[..., 4:]], axis=-1)
        rows = [(text[0, :, :5], 0), (text[1, :, 1:4], 1)]
        rows = [model(jnp.concatenate([t, TOKENS[r, :, :2]], -1))[:, -2:] for t, r in rows]
        return stepped, jnp.stack(rows)

    close(*jax.jit(both)(params), ulps=1000)


@pytest.mark.slow
def test_searches_find_what_plain_loops_over_numpy_find():
    def run(**options):
        search = lambda p: generate(  # noqa: E731
            xa.functional.bind(BUILD, p), prefix=PROMPTS, max_new_tokens=LENGTH, **options
        )
        return jax.device_get(jax.jit(search)(PARAMS))

    def log_p(row, said):
        return log_softmax(whole([[*PROMPTS[row], *said]])[0, -1])

    plain, beams, drafted = run(), run(num_beams=3), run(draft=PromptLookup(TOKENS[:, 0], 2))
    for row in range(ROWS):
        one = functools.partial(log_p, row)
        assert texts(plain, row) == texts(drafted, row) == [plain_greedy(one, LENGTH)]
        expected = plain_beam_search(one, 3, LENGTH, 0.6)
        assert texts(beams, row, 3) == [tokens for tokens, _ in expected]


def test_eight_devices_train_it_as_one_does(in_production):
    def loss(params, tokens):
        return jnp.sin(xa.apply(BUILD, params, tokens)).sum()

    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    places = params_sharding(PARAMS, xa.functional.logical_axes(BUILD), mesh)
    placed = jax.device_put(PARAMS, places)
    own = placed["decoder"]["stack"]["layers"]["0"]["attention"]["persistent"]["keys"]
    assert own.sharding.spec[1] == "tensor"
    tokens = np.resize(TOKENS, (4, T))
    rows = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))
    call = jax.jit(jax.value_and_grad(loss))
    found, alone = (jax.device_get(call(*given)) for given in ((placed, rows), (PARAMS, tokens)))
    size = max(np.abs(x).max() for x in jax.tree.leaves(alone))
    close(found, alone, ulps=1000, size=size)
    # Softmax ignores a bias of the keys only where all keys have it: here it moves text against vectors.
    assert all(np.any(x) for x in jax.tree.leaves(alone[1]))
