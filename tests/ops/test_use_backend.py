"""``use_backend``: one kernel for whatever is traced inside, in whole models too."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.nn import MultiHeadAttention
from crossattn.ops import backends, product
from crossattn.testing.case import array

Q = jnp.asarray(array("q", 2, 9, 4, 8))


def loops(function, *arguments):
    """Returns whether attention goes block by block; the reference has no loop."""
    return "while" in jax.jit(function).lower(*arguments).as_text()


def test_every_attention_inside_runs_that_backend():
    def build(rngs):
        return MultiHeadAttention(16, 2, rngs=rngs)

    params, x = xa.init(build, jax.random.key(0)), jnp.ones((2, 5, 16))

    def call(x):
        return xa.apply(build, params, x)

    with xa.use_backend("chunked"):
        assert loops(call, x)
        assert xa.explain(Q, Q, Q).backend == "chunked"
        with xa.use_backend("reference"):
            assert not loops(call, x)
            assert xa.explain(Q, Q, Q).backend == "reference"
        assert loops(call, x)
        assert not loops(lambda q: xa.attend(q, q, q, backend="reference"), Q)
        with xa.use_backend(None):
            assert backends.chosen() is None
            assert xa.explain(Q, Q, Q).backend not in (None, "chunked")
    assert backends.chosen() is None


def test_what_was_compiled_outside_is_not_run_inside():
    traced = []

    @jax.jit
    def call(q):
        traced.append(backends.chosen())
        return xa.attend(q, q, q)

    outside = call(Q)
    with xa.use_backend("chunked"):
        np.testing.assert_allclose(call(Q), outside, rtol=1e-5, atol=1e-5)
        call(Q)
    call(Q)
    assert traced == [None, "chunked"]


def test_an_export_holds_what_any_machine_runs():
    with xa.use_backend("reference"):
        exported = jax.export.export(jax.jit(lambda q: xa.attend(q, q, q)))(Q)
    assert "custom_call" not in exported.mlir_module()


def test_products_of_decoding_are_left_to_xla():
    rows, matrix = jnp.ones((16, 128)), jnp.ones((128, 128))

    def multiply(x, w):
        return product.dot_general(x, w, (((1,), (0,)), ((), ())))

    with xa.use_backend("reference"):
        assert "Crossattn" not in str(jax.make_jaxpr(multiply)(rows, matrix))


def test_other_threads_choose_for_themselves():
    seen = []
    with xa.use_backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(backends.chosen()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_it_is_over_after_an_error():
    with pytest.raises(NotImplementedError, match="chunked: .*weights; .* outside of use_backend"):
        with xa.use_backend("chunked"):
            xa.attend(Q, Q, Q, return_weights=True)
    assert backends.chosen() is None
    with pytest.raises(ValueError, match="backend is 'fastest'; expected one of .*'reference'"):
        xa.use_backend("fastest").__enter__()
