"""Calls of tokamax, without it: arguments that its kernels take; by ``jax.nn`` the oracle's results."""

import functools
import types

import jax
import pytest

import crossattn as xa
from crossattn import testing
from crossattn.ops.backends import tokamax
from tests.ops.pretended_gpu import pretended_gpu

# What jax.nn has as well.
CASES = {
    name: case
    for name, case in testing.cases().items()
    if "softcap" not in case.options and case.k.shape == case.v.shape
}


def attention(q, k, v, bias, mask, *, implementation, logits_soft_cap, **options):
    """Refuses what the kernels of 0.0.17 fail on, or answer wrongly."""
    assert implementation == ("xla",) and logits_soft_cap is None
    assert options["scale"] > 0
    for matrix in (bias, mask):
        if matrix is not None:
            assert matrix.shape[2] in (1, q.shape[1]) and matrix.shape[3] == k.shape[1]
            assert q.shape[1] % 16 == k.shape[1] % 16 == 0
    return jax.nn.dot_product_attention(q, k, v, bias, mask, **options)


@pytest.fixture(autouse=True)
def _no_tokamax(monkeypatch):
    library = types.SimpleNamespace(dot_product_attention=attention)
    monkeypatch.setattr(tokamax, "_library", lambda: library)


@pytest.mark.quick(20)
@pytest.mark.parametrize("name", CASES)
def test_its_calls_are_ones_that_its_kernels_take(name):
    try:
        testing.check(functools.partial(xa.attend, backend="tokamax"), CASES[name])
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))


def test_heads_that_no_multiprocessor_holds_are_refused():
    x = jax.ShapeDtypeStruct((1, 512, 1, 1024), "bfloat16")
    call = jax.jit(functools.partial(xa.attend, backend="tokamax"))
    with pretended_gpu(), pytest.raises(NotImplementedError, match="up to 256, not 1024"):
        call.trace(x, x, x).lower(lowering_platforms=("cuda",))
