"""States of a decoder with caches: sequences go on from one another, rows go back, padding is not read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.models import Decoder, decoder
from tests import numpy_model as oracle
from tests.closeness import close
from tests.compiled import compiled

B, J, T = 2, 3, 4
TOKENS = np.random.default_rng(0).integers(3, 64, (B, J, T))
NEXT = np.random.default_rng(1).integers(3, 64, (B, J, 2))
SCHEMES = [
    pytest.param("learned", False, marks=pytest.mark.slow),
    ("rope", True),
    ("relative", False),
]


def model(positions, scan):
    config = decoder.tiny(positions=positions, scan=scan)
    build = lambda rngs: Decoder(config, rngs=rngs)  # noqa: E731
    return xa.functional.bind(build, oracle.random_params(build))


def full(made, tokens):
    """Logits of the last two tokens of whole sequences [B J n]."""
    flat = jnp.asarray(tokens.reshape(-1, tokens.shape[-1]))
    return np.asarray(compiled(made, flat)).reshape(*tokens.shape, -1)[:, :, -2:]


@pytest.mark.parametrize(("positions", "scan"), SCHEMES)
def test_a_sequence_goes_on_from_the_one_it_selects(positions, scan):
    made, parents = model(positions, scan), np.array([[2, 0, 0], [1, 1, 2]])

    @jax.jit
    def go_on():
        _, states = made.decode_step(jnp.asarray(TOKENS[..., :3]), made.prefill(B, J, T + 2))
        states = states.select(jnp.asarray(parents))
        _, states = made.decode_step(jnp.asarray(TOKENS[..., 3:]), states)
        states = states.select(jnp.asarray(parents[::-1]))
        return made.decode_step(jnp.asarray(NEXT), states)[0]

    take = lambda x, index: np.take_along_axis(x, index[..., None], axis=1)  # noqa: E731
    past = np.concatenate([take(TOKENS[..., :3], parents), TOKENS[..., 3:]], axis=-1)
    past = take(past, parents[::-1])
    close(go_on(), full(made, np.concatenate([past, NEXT], axis=-1)))


@pytest.mark.quick(1)
@pytest.mark.parametrize("num_beams", [1, J])
@pytest.mark.parametrize(("positions", "scan"), SCHEMES)
def test_rows_go_back_to_positions_of_their_own(positions, scan, num_beams):
    made, lengths = model(positions, scan), np.array([1, 3])
    tokens, following = TOKENS[:, :num_beams], NEXT[:, :num_beams]
    parents = np.array([[2, 0, 0], [1, 1, 2]])[:, :num_beams] % num_beams

    @jax.jit
    def go_back():
        _, states = made.decode_step(jnp.asarray(tokens), made.prefill(B, num_beams, T + 2))
        states = states.select(jnp.asarray(parents)).rewind(jnp.asarray(lengths))
        logits, states = made.decode_step(jnp.asarray(following), states)
        # Else each layer would write them at each step, which nothing reads.
        assert all(layer.cache.positions is None for layer in states.layers)
        return logits, states.positions

    logits, positions = go_back()
    np.testing.assert_array_equal(positions, lengths + 2)
    for row, length in enumerate(lengths):
        own = np.concatenate([tokens[row, parents[row], :length], following[row]], axis=-1)
        close(logits[row], full(made, own[None])[0])


@pytest.mark.parametrize(("positions", "scan"), SCHEMES)
def test_padding_on_the_left_is_not_read(positions, scan):
    made, padding = model(positions, scan), np.array([2, 1])

    @jax.jit
    def padded():
        states = made.prefill(B, J, T + 2).pad_left(jnp.asarray(padding))
        _, states = made.decode_step(jnp.asarray(TOKENS), states)
        return made.decode_step(jnp.asarray(NEXT), states)[0]

    found = padded()
    for row, begin in enumerate(padding):
        own = np.concatenate([TOKENS[row, :, begin:], NEXT[row]], axis=-1)
        close(found[row], full(made, own[None])[0])
