"""jax.export: masks and memories are arguments of an exported function, and lengths may be symbols."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import crossattn as xa
from crossattn.decode import Hypotheses
from crossattn.nn import BlockState
from tests.ops.masks.table import MASKS, S, T
from tests.peers import package

package("flatbuffers", "test")
# JAX fills masks with placeholders of its own.
pytestmark = pytest.mark.usefixtures("in_production")

DRAW = np.random.default_rng(0).normal


def operands(T, S, batch=2):
    return [np.float32(DRAW(size=(batch, n, 3, 8))) for n in (T, S, S)]


def shapes(*dimensions):
    b, T, S = dimensions
    return [jax.ShapeDtypeStruct((b, n, 3, 8), jnp.float32) for n in (T, S, S)]


def through_bytes(call, *arguments):
    """Returns the function after it was exported, written and read again."""
    exported = export.export(jax.jit(call))(*arguments)
    return export.deserialize(exported.serialize(vjp_order=0)).call


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_mask_is_an_argument_of_an_exported_function(mask):
    def call(mask):
        return mask.materialize(T, S)

    mask = jax.tree.map(jnp.asarray, mask)
    np.testing.assert_array_equal(through_bytes(call, mask)(mask), call(mask))


def test_memories_states_and_results_cross_the_border():
    keys, values = (np.float32(DRAW(size=(2, 4, 2, 8))) for _ in "kv")
    cache = xa.Memory.empty((2,), 6, 2, 8).append(keys, values)

    def call(state):
        memory = state.cache
        stats = xa.attention_stats(memory.keys, memory.keys, memory.mask())
        return state, stats, Hypotheses(stats.argmax, stats.lse, memory.length)

    state = BlockState(cache=cache)
    found = through_bytes(call, state)(state)
    assert jax.tree.structure(found) == jax.tree.structure(call(state))
    np.testing.assert_array_equal(found[0].cache.keys, cache.keys)
    np.testing.assert_allclose(found[1].entropy, call(state)[1].entropy, rtol=1e-5, atol=1e-6)


def test_kernels_are_exported_where_they_are_allowed_and_without_them_where_chunked_is_chosen():
    """As docs/attend.md writes it."""
    q, k, v = operands(3, 5)
    expected = xa.attend(q, k, v)
    kernels = ("CrossattnForward", "CrossattnBackward", "tpu_custom_call")
    allowed = [export.DisabledSafetyCheck.custom_call(name) for name in kernels]
    exported = export.export(jax.jit(xa.attend), disabled_checks=allowed)(q, k, v)
    found = export.deserialize(exported.serialize(vjp_order=0)).call(q, k, v)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    with xa.use_backend("chunked"):
        found = through_bytes(lambda *x: xa.attend(*x), q, k, v)(q, k, v)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def masked(q, k, v, valid, positions):
    """Everything that goes by a length: a bias, positions, padding, the log-sum-exp."""
    bias = 0.1 * jnp.arange(k.shape[1], dtype=jnp.float32)[None, None, None]
    mask = xa.masks.causal(q_positions=positions) & xa.masks.key_padding(valid)
    return q, k, v, mask | xa.masks.lengths(1), bias


@pytest.mark.quick(1)
@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_lengths_may_be_symbols(backend):
    def call(q, k, v, valid, positions):
        q, k, v, mask, bias = masked(q, k, v, valid, positions)
        out, lse = xa.attend(q, k, v, mask, bias=bias, backend=backend, return_lse=True)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse)), (out, lse)

    b, T, S = export.symbolic_shape("b, t, s")
    kinds = (jax.ShapeDtypeStruct((b, S), bool), jax.ShapeDtypeStruct((b, T), jnp.int32))
    differentiate = jax.grad(call, (0, 1, 2), has_aux=True)
    exported = through_bytes(differentiate, *shapes(b, T, S), *kinds)
    expected = jax.jit(differentiate)
    # One block, and several with the last one not full.
    for T, S in ((3, 5), (150, 70)):
        valid, positions = np.arange(S) < [[S], [S // 2]], np.arange(T)[None] + [[0], [3]]
        given = (*operands(T, S), valid, positions.astype(np.int32))
        for mine, one in zip(
            *map(jax.tree.leaves, (exported(*given), expected(*given))), strict=True
        ):
            np.testing.assert_allclose(mine, one, rtol=1e-4, atol=1e-4)


def test_explain_says_what_runs_where_lengths_are_symbols():
    found = xa.explain(*shapes(*export.symbolic_shape("b, t, s")))
    assert found.backend == "chunked"
    assert "exported program" in found.refused["cpu"]
    dropped = xa.explain(
        *shapes(*export.symbolic_shape("b, t, s")), dropout_rate=0.1, dropout_key=jax.random.key(0)
    )
    assert dropped.backend == "reference"
    assert "no dropout for symbolic lengths" in dropped.refused["chunked"]
