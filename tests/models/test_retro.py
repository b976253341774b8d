"""RETRO: float64 equations, what a token depends on, decoding as neighbours come, the mass of passages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.models import Decoder, Retro, decoder, retro
from tests import numpy_model as oracle
from tests.closeness import close
from tests.compiled import compiled
from tests.models.retro_oracle import logits as in_numpy

V, M, K, R, T, B = 64, 3, 2, 4, 11, 2
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(3, V, (B, T)).astype(np.int32)
FOUND = RNG.integers(3, V, (B, T // M, K, R)).astype(np.int32)
FOUND[0, 1] = 0  # a chunk without neighbours
FOUND[1, :, 1, 2:] = 0  # short passages


def made(**changes):
    config = retro.tiny(**{"chunk": M, **changes})
    build = lambda rngs: Retro(config, rngs=rngs)  # noqa: E731
    return build, oracle.random_params(build, seed=3)


BUILD, PARAMS = made(interval=1)


@jax.jit
def whole(tokens, neighbours):
    return xa.apply(BUILD, PARAMS, jnp.asarray(tokens), neighbours=neighbours)


def numpy_logits(params, tokens, found):
    """Logits [B T V] of a tiny RETRO of its equations alone."""
    table, places = (
        np.asarray(params["input"][name]["table"], np.float64) for name in ("embedding", "learned")
    )
    embed = lambda ids: table[ids] * table.shape[1] ** 0.5 + places[: ids.shape[-1]]  # noqa: E731
    return in_numpy(params, tokens, found, chunk=M, embed=embed, table=table, act="gelu")


def test_its_logits_are_those_of_the_equations():
    found = whole(TOKENS, FOUND)
    close(found, numpy_logits(PARAMS, TOKENS, FOUND), ulps=2000)


def test_a_token_depends_on_nothing_after_it_through_neighbours_either():
    before = whole(TOKENS, FOUND)
    for t in range(T):
        changed = TOKENS.copy()
        changed[:, t] = (changed[:, t] - 2) % (V - 3) + 3
        differs = np.any(whole(changed, FOUND) != before, axis=-1)
        np.testing.assert_array_equal(differs.argmax(-1), t)
    for row, u in np.ndindex(B, T // M):
        changed = FOUND.copy()
        changed[row, u] = np.where(changed[row, u] > 0, changed[row, u], 9) % (V - 4) + 4
        differs = np.any(whole(TOKENS, changed) != before, axis=-1)
        first = (u + 1) * M - 1
        assert differs[row].argmax() == first and not differs[1 - row].any()
        assert differs[row, first:].all()  # of chunks that are not next by way of self-attention


@pytest.mark.quick(1)
@pytest.mark.parametrize("changes", [{}, {"scan": True}, {"positions": "rope"}, {"interval": 1}])
def test_without_neighbours_it_is_the_plain_decoder(changes):
    build, params = made(**changes)
    plain = decoder.tiny(**{k: x for k, x in changes.items() if k == "positions"})
    of_plain = lambda rngs: Decoder(plain, rngs=rngs)  # noqa: E731
    given = xa.functional.flatten(params)
    if "scan" in changes:  # each block of a period has an axis of periods
        given = {k: x[0] if k.startswith("decoder.stack") else x for k, x in given.items()}
    shapes = xa.functional.flatten(xa.functional.shapes(of_plain))
    kept = xa.functional.nest({path: given[path] for path in shapes})
    expected = compiled(lambda p, tokens: xa.apply(of_plain, p, tokens), kept, TOKENS)
    run = jax.jit(lambda tokens, **found: xa.apply(build, params, tokens, **found))
    for found in ({}, {"neighbours": np.zeros_like(FOUND)}):
        close(run(jnp.asarray(TOKENS), **found), expected, ulps=500)
    assert np.abs(run(jnp.asarray(TOKENS), neighbours=FOUND) - expected)[:, M - 1 :].max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"scan": True}, {"positions": "rope"}])
def test_decoding_while_neighbours_come_equals_the_whole_text(changes):
    build, params = made(**changes)

    @jax.jit
    def stepped(params):
        model = xa.functional.bind(build, params)
        states, logits = model.prefill(B, 1, T), []
        for t in range(T):
            if (t + 1) % M == 0:
                u = t // M
                states = model.retrieved(states, u, TOKENS[:, u * M : t + 1], FOUND[:, u])
            each, states = model.decode_step(jnp.asarray(TOKENS)[:, None, t, None], states)
            logits.append(each[:, 0, 0])
        return jnp.stack(logits, 1)

    expected = jax.jit(lambda p: xa.apply(build, p, jnp.asarray(TOKENS), neighbours=FOUND))(params)
    close(stepped(params), expected, ulps=2000)


@pytest.mark.slow
def test_neighbours_of_a_prompt_are_given_to_prefill_and_those_of_the_rest_later():
    @jax.jit
    def decoded(params, tokens, found):
        model = xa.functional.bind(BUILD, params)
        chunks = tokens[:, : 2 * M].reshape(B, 2, M)
        states = model.prefill(B, 1, T, neighbours=found[:, :2], chunks=chunks)
        first, states = model.decode_step(tokens[:, None, : 3 * M - 1], states)
        states = model.retrieved(states, 2, tokens[:, 2 * M : 3 * M], found[:, 2])
        rest, _ = model.decode_step(tokens[:, None, 3 * M - 1 :], states)
        return jnp.concatenate([first, rest], 2)[:, 0]

    close(decoded(PARAMS, TOKENS, FOUND), whole(TOKENS, FOUND), ulps=2000)


def test_the_mass_of_passages_is_that_of_the_weights_and_a_passage_of_padding_has_none():
    found = FOUND.copy()
    found[1, 0, 1] = 0
    model = xa.functional.bind(BUILD, PARAMS)
    mass = compiled(lambda model, *given: model.mass(*given), model, TOKENS, found)
    reads = [
        [t >= M - 1 and found[row, (t + 1) // M - 1].any() for t in range(T)] for row in range(B)
    ]
    close(mass.sum(-1), np.array(reads, np.float32), ulps=20)
    np.testing.assert_array_equal(mass[1, M - 1 : 2 * M - 1, 1], 0)
    assert mass[1, 2 * M - 1 :, 1].min() > 0.01


def test_a_text_shorter_than_a_chunk_reads_nothing():
    close(whole(TOKENS[:, : M - 1], FOUND), whole(TOKENS, FOUND)[:, : M - 1], ulps=500)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            dict(neighbours=FOUND, chunks=TOKENS[:, :6].reshape(B, 3, 2)),
            r"expected \[B C 3\] and \[B C K R\]",
        ),
        (dict(neighbours=FOUND[:1]), "neighbours has 1 rows"),
    ],
)
def test_neighbours_that_do_not_fit_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        xa.apply(BUILD, PARAMS, jnp.asarray(TOKENS), **given)


def test_half_of_what_prefill_needs_is_refused():
    model = xa.functional.bind(BUILD, PARAMS)
    with pytest.raises(ValueError, match="one of neighbours and chunks; expected both, or none"):
        model.prefill(B, 1, T, neighbours=FOUND)
