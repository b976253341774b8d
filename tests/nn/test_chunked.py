"""Chunked cross-attention against a loop over tokens in numpy, whole texts and parts of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import crossattn as xa
from crossattn.nn import (
    AdditiveAttention,
    Block,
    BlockConfig,
    BlockState,
    ChunkedAttention,
    Encoded,
)
from tests import numpy_model as oracle
from tests.closeness import close
from tests.compiled import compiled

B, D, M, K, R, CHUNK = 2, 8, 6, 2, 4, 3
SHAPE = BlockConfig.of(dim=D, num_heads=2, mlp_dim=12)
RNG = np.random.default_rng(0)


def build_of(relative, chunk=CHUNK):
    return lambda rngs: (
        SHAPE.chunked_attention(rngs, chunk=chunk, memory_dim=M, relative=relative).inner
    )


def drawn(T, chunk=CHUNK):
    """A text, the neighbours of its chunks, and which of them are real; one chunk has none."""
    C = T // chunk
    x, neighbours = RNG.normal(size=(B, T, D)), RNG.normal(size=(B, C, K, R, M))
    valid = RNG.random((B, C, K, R)) < 0.7
    valid[0, :1] = False
    return x.astype(np.float32), neighbours.astype(np.float32), valid


def plainly(params, x, neighbours, valid, positions=None, chunk=CHUNK):
    """Output [B T D] and weights [B N T (K R)], token by token."""
    T, S = x.shape[1], K * R
    out, weights = np.zeros(x.shape), np.zeros((B, 2, T, S))
    for row in range(B):
        for t in range(T):
            place = t if positions is None else positions[row, t]
            if (place + 1) // chunk == 0:
                continue
            own = (place + 1) // chunk - 1
            allowed = valid[row, own].reshape(1, S)
            if not allowed.any():
                continue
            bias = None
            if "relative" in params:  # distances are small, so that each has a bucket
                far = np.tile(np.arange(R), K) - (place + 1) % chunk
                bias = params["relative"]["table"][(far > 0) * 16 + np.abs(far)].T[:, None]
            memory = neighbours[row, own].reshape(S, M)
            out[row, t : t + 1], weights[row, :, t : t + 1] = oracle.attention(
                params["attention"], x[row, t : t + 1], memory, allowed, bias=bias
            )
    return out, weights


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize(("T", "chunk"), [(9, 3), (10, 3), (11, 3), (2, 3), (4, 1)])
def test_a_token_reads_the_neighbours_of_the_last_whole_chunk(T, chunk, relative):
    build = build_of(relative, chunk)
    params, (x, neighbours, valid) = oracle.random_params(build), drawn(T, chunk)

    def call(p, x, neighbours):
        attention = xa.functional.bind(build, p)
        memory = attention.memory(neighbours, valid=jnp.asarray(valid))
        return attention(x, memory, return_weights=True)

    hidden = np.where(valid[..., None], neighbours, np.nan)
    found = jax.jit(call)(params, x, hidden)
    expected = plainly(params, x, neighbours, valid, chunk=chunk)
    close(found, expected)
    np.testing.assert_array_equal(found[0] == 0, expected[0] == 0)  # exactly, whatever the biases
    assert T < chunk or np.any(expected[0][0] != 0)


@pytest.mark.quick(2)
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("pieces", [[1] * 10, [2, 7, 1]], ids=["one by one", "in pieces"])
def test_parts_of_a_text_read_by_position_what_the_whole_reads(pieces, relative):
    build = build_of(relative)
    params, (x, neighbours, valid) = oracle.random_params(build), drawn(10)
    attention = xa.functional.bind(build, params)
    memory = attention.memory(jnp.asarray(neighbours), valid=jnp.asarray(valid))
    read = jax.jit(lambda x, positions: attention(x, memory, positions=positions))
    own = np.array([[0], [-2]])  # row 1 begins with padding
    for places in (np.arange(10), np.maximum(np.arange(10) + own, 0)):
        whole = np.broadcast_to(places, (B, 10))
        expected = plainly(params, x, neighbours, valid, whole)[0]
        starts = np.cumsum([0, *pieces])
        cuts = [slice(a, b) for a, b in zip(starts, starts[1:], strict=False)]
        found = [read(jnp.asarray(x[:, cut]), jnp.asarray(places[..., cut])) for cut in cuts]
        close(jnp.concatenate(found, axis=1), expected)


def test_positions_past_the_last_chunk_read_nothing():
    build = build_of(False)
    attention = xa.functional.bind(build, oracle.random_params(build))
    x, neighbours = map(jnp.asarray, drawn(6)[:2])
    call = lambda at: attention(x, neighbours, positions=at + jnp.arange(6), return_weights=True)  # noqa: E731
    out, weights = jax.jit(call)(jnp.int32(6))  # of a text with two chunks: 6 and 7 read the second
    assert np.all(out[:, :2] != 0) and not np.any(out[:, 2:]) and not np.any(weights[:, :, 2:])


def test_any_attention_reads_chunks():
    build = lambda rngs: ChunkedAttention(AdditiveAttention(D, memory_dim=M, rngs=rngs), CHUNK)  # noqa: E731
    x, neighbours, valid = drawn(7)
    attention = xa.functional.bind(build, oracle.random_params(build))

    def read(attention, x, neighbours, valid):
        memory = attention.memory(neighbours, valid=valid)
        whole = attention(x, memory, return_weights=True)
        placed = attention(x, memory, positions=jnp.arange(7), return_weights=True)
        flat = neighbours.reshape(B, 2, K * R, M)[:, 1], valid.reshape(B, 2, -1)[:, 1]
        one = attention.attention.memory(flat[0], valid=flat[1])
        return whole, placed, attention.attention(x[:, 5:], one)

    whole, placed, last = compiled(read, attention, x, neighbours, valid)
    close(placed, whole)
    close(whole[0][:, 5:], last)


@pytest.mark.slow
def test_a_block_and_a_scanned_stack_read_neighbours_by_name():
    def block(rngs):
        reading = SHAPE.chunked_attention(rngs, chunk=CHUNK, memory_dim=M, gated=True)
        return Block(attention=SHAPE.self_attention(rngs, causal=True), chunked=reading)

    x, neighbours, valid = drawn(7)
    memories = {"neighbours": Encoded(jnp.asarray(neighbours), jnp.asarray(valid))}
    params = oracle.random_params(block)
    call = lambda p, x: xa.apply(block, p, x, memories=memories)[0]  # noqa: E731
    y = (
        x
        + oracle.attention(
            params["attention"],
            oracle.norm(params["attention_residual"]["norm"], x),
            allowed=np.tri(7, dtype=bool),
        )[0]
    )
    normed = oracle.norm(params["chunked_residual"]["norm"], y)
    update, _ = plainly(params["chunked"], normed, neighbours, valid)
    expected = y + np.tanh(params["chunked_residual"]["gate"]) * update
    close(jax.jit(call)(params, x), expected, ulps=1000)
    stack = lambda scan: lambda rngs: xa.nn.Stack(block, 2, scan=scan, rngs=rngs)  # noqa: E731
    looped = oracle.random_params(stack(False))
    scanned = {"layers": xa.nn.stack_layers(looped["layers"])}
    run = lambda scan: lambda p: xa.apply(stack(scan), p, jnp.asarray(x), memories=memories)[0]  # noqa: E731
    close(compiled(run(True), scanned), compiled(run(False), looped), ulps=1000)
    made = xa.functional.bind(block, params)
    state = BlockState(made.read(memories).memories, made.attention.cache((B,), 9))
    with pytest.raises(
        ValueError, match="^chunked reads 'neighbours' by position, .*give text_pos"
    ):
        made(jnp.asarray(x), state)


@pytest.mark.usefixtures("in_production")
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda a, x, n: a(x, n[:, :1]), r"a text of 7 tokens has 2 whole chunks of 3, .* has 1;"),
        (
            lambda a, x, n: a(x, n[:, 0]),
            r"x has batch axes \(2,\), and the memory of chunks \(2,\);",
        ),
        (lambda a, x, n: a.memory(n[0, 0]), r"x has shape \(2, 4, 6\); expected \[\*B C K R M\]"),
        (lambda a, x, n: a(x[:1], n), r"x has batch axes \(1,\), .* \(2, 2\); expected the same"),
        (lambda a, x, n: a(x, n, xa.masks.causal()), "takes no mask; expected valid= of its"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(call, said):
    x, neighbours, _ = drawn(7)
    attention = build_of(False)(nnx.Rngs(0))
    with pytest.raises(ValueError, match=said):
        call(attention, jnp.asarray(x), jnp.asarray(neighbours))
